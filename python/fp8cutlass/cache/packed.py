"""Keys and values that are quantised and packed once and attended many times."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._version import __version__
from ..choose.reuse import KVForm
from ..errors import UnsupportedError
from ..manifest import KEY_BLOCK
from ..memory import concatenated
from .packed_kind import Kind, cuts_of, shapes_of, shared_by

HELD = ("scaling", "precision", "smooth_k", "hadamard")  # arguments of attention that packing has settled


def key_grid(scaling: str, key_block: int) -> int:
    """Keys that packed ones can be cut between: V is packed by 128, and a block shares a descale."""
    return math.lcm(KEY_BLOCK, key_block) if scaling == "block" else KEY_BLOCK


@dataclass(frozen=True, repr=False, eq=False)
class PackedKV:
    """What ``pack_kv`` returns and ``attention`` takes as ``key``. The bytes are those that a call on key and value
    itself would make; docs/design/numerics.md describes them. Not to be made or changed by hand: ``tensors`` and
    ``rebuilt`` take it apart and put it together, ``narrow``, ``heads`` and ``joined`` are those keys and heads.

    It is a node of torch's pytrees, whose leaves are its tensors, and ``torch.load`` reads it with its defaults.
    """

    k: torch.Tensor  # (B, Hkv, Sk, head_dim of the kernel) uint8
    v: torch.Tensor  # (B, Hkv, head_dim of the kernel, ceil(Sk / 128) * 128) uint8
    k_descale: torch.Tensor  # float32, of the scaling mode; of tokens padded to whole tiles, of channels to head_dim
    v_descale: torch.Tensor
    k_mean: torch.Tensor | None  # (B, Hkv, head_dim of the kernel) float32 with smooth_k
    head_dim: int  # D of key and value
    dtype: torch.dtype  # of key and value, which a query has to have: bf16 or fp16
    kernel: str  # the variant that they were packed for; others read them too
    key_block: int  # keys that share a descale of scaling "block"
    amax: float  # what K was quantised to
    scaling: str
    precision: str
    smooth_k: bool
    hadamard: bool

    @property
    def shape(self) -> torch.Size:
        """(B, Hkv, Sk, D) of key and value."""
        return torch.Size((*self.k.shape[:3], self.head_dim))

    @property
    def like(self) -> torch.Tensor:
        """One element that nobody reads, expanded to what key and value were."""
        return self.k.new_empty((), dtype=self.dtype).expand(self.shape)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.k.device

    @property
    def form(self) -> KVForm:
        """What a kernel has to know to read it."""
        return KVForm(self.k.shape[3], self.key_block, self.amax)

    @cached_property
    def metadata(self) -> str:
        """All that tells one from another but for what the tensors hold: a text, whose hash Python keeps."""
        tensors = [None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.device) for x in self._all()]
        return sys.intern(repr((tensors, [getattr(self, name) for name in SETTLED])))

    def __getstate__(self) -> dict[str, Any]:
        """Without ``metadata``, as a copy may be read on another device."""
        return {name: x for name, x in vars(self).items() if name != "metadata"}

    @property
    def signature(self) -> str:
        """Form, shape and the package's version as a text: what two processes have to agree on to exchange tensors."""
        settled = ", ".join(f"{name}={getattr(self, name)}" for name in SETTLED)
        return f"fp8cutlass {__version__}, PackedKV {tuple(self.shape)} of {self.k.shape[3]} columns, {settled}"

    @property
    def grid(self) -> int:
        """Keys that it can be cut between: only multiples of this."""
        return key_grid(self.scaling, self.key_block)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, those that there are."""
        return self._tensors()

    def shapes(self, tokens: int | None = None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each of ``tensors()``; of as many ``tokens`` packed alike, where they are given."""
        return dict(shapes_of(self.kind, self.k.shape[2] if tokens is None else tokens))

    @property
    def kind(self) -> Kind:
        """What its shapes depend on but for the number of tokens."""
        shared, (batch, heads, _, columns) = self._shared_by(), self.k.shape
        return Kind(batch, heads, columns, self.key_block, shared["k"], shared["v"], self.k_mean is not None)

    def rebuilt(self, tensors: dict[str, torch.Tensor]) -> PackedKV:
        """The same form around other tensors, of any number of tokens: what another process packed alike.

        Raises:
            UnsupportedError: a name is missing, or a shape, a dtype or a stride is not that of the form.
        """
        expected = self.shapes()
        wrong = (
            [f"tensors must be {', '.join(expected)}, got {', '.join(tensors)}"]
            if set(tensors) != set(expected)
            else []
        )
        if not wrong and tensors["k"].dim() == 4:
            expected = self.shapes(tensors["k"].shape[2])
        for name, (shape, dtype) in () if wrong else expected.items():
            x = tensors[name]
            if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
                wrong.append(f"{name} must be {dtype} of shape {tuple(shape)}, got {x.dtype}, {tuple(x.shape)}")
            elif x.stride(-1) != 1 if name == "k" else not x.is_contiguous():
                wrong.append(f"{name} must be contiguous, got strides {x.stride()}")
        if wrong:
            raise UnsupportedError(*wrong)
        return replace(self, **tensors)  # type: ignore[arg-type]

    def narrow(self, start: int, tokens: int) -> PackedKV:
        """Keys ``start`` to ``start + tokens``: views where these are contiguous, else copies.

        Raises:
            UnsupportedError: an end is neither a multiple of ``grid`` nor that of the keys.
        """
        keys = self.k.shape[2]
        if not 0 <= start <= start + tokens <= keys:
            raise UnsupportedError(f"start and tokens must lie within the {keys} keys, got {start} and {tokens}")
        if start % self.grid or ((start + tokens) % self.grid and start + tokens != keys):
            raise UnsupportedError(
                f"packed keys can be cut between multiples of {self.grid}, got {start} to {start + tokens} of {keys}"
            )
        if (start, tokens) == (0, keys):
            return self
        cuts = cuts_of(self.kind, keys, start, tokens)
        cut = {name: getattr(self, name).narrow(*where) for name, where in cuts.items()}
        return replace(self, **{name: x if name == "k" else x.contiguous() for name, x in cut.items()})

    def heads(self, start: int, count: int) -> PackedKV:
        """``count`` heads from ``start`` on: views where these are contiguous, as with one sequence, else copies."""
        if not 0 <= start < start + count <= self.k.shape[1]:
            raise UnsupportedError(
                f"start and count must lie within the {self.k.shape[1]} heads, got {start} and {count}"
            )
        cut = {
            name: x.narrow(1, start, count) if x.dim() > 1 else x  # (1,): one descale for all
            for name, x in self._tensors().items()
        }
        return replace(self, **{name: x if name == "k" else x.contiguous() for name, x in cut.items()})  # type: ignore[arg-type]

    @staticmethod
    def joined(parts: Sequence[PackedKV]) -> PackedKV:
        """All keys of parts that were packed alike, one after the other, copied; one part alone is itself.

        Raises:
            UnsupportedError: one is no PackedKV; parts differ in anything but tokens; one before the last does not end
                on its ``grid``; the scaling shares a descale among all keys of a head, or smooth_k a mean.
        """
        if others := [x for x in parts if not isinstance(x, PackedKV)]:
            raise UnsupportedError(f"parts must be PackedKV, one is {type(others[0]).__name__}")
        wrong = [] if parts else ["parts must be one PackedKV at least, got none"]
        some = [part for part in parts if part.k.shape[2]] or list(parts[:1])
        if len(some) > 1:
            first, shared = some[0], some[0]._shared_by()
            alike = [{name: getattr(x, name) for name in SETTLED} | {"B, Hkv": x.k.shape[:2]} for x in some]
            for name, value in alike[0].items():
                others = [x[name] for x in alike if x[name] != value]
                wrong += [f"parts differ in {name}: {value} and {others[0]}"] if others else []
            wrong += [
                f"{x} keys end between multiples of {first.grid}"
                for x in (part.k.shape[2] for part in some[:-1])
                if x % first.grid
            ]
            if any(shared[name] not in ("block", "group", "token") for name in "kv"):
                wrong.append(f"scaling={first.scaling!r} shares descales among all keys of a head; 'block' does not")
            if first.smooth_k:
                wrong.append("smooth_k subtracts a mean from all keys of a head, and parts have one each")
        if wrong:
            raise UnsupportedError(*wrong)
        if len(some) == 1:
            return some[0]
        axes = {"k": 2, "v": 3, "k_descale": 2, "v_descale": 2}
        found = {name: concatenated([getattr(x, name) for x in some], at) for name, at in axes.items()}
        return replace(some[0], **found)  # type: ignore[arg-type]

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> PackedKV:
        """The same on another device, itself where it is there. Kernels of that device read it if they read such keys
        of their own; ``attention`` refuses it by name if none does."""
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in self._tensors().items()}
        return self if all(x is getattr(self, name) for name, x in moved.items()) else replace(self, **moved)  # type: ignore[arg-type]

    def _shared_by(self) -> Mapping[str, str]:
        return shared_by(self.scaling, self.dtype, self.precision)

    def _all(self) -> list[torch.Tensor | None]:
        return [getattr(self, name) for name in LEAVES]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: x for name in LEAVES if (x := getattr(self, name)) is not None}

    def __repr__(self) -> str:
        size = sum(x.numel() * x.element_size() for x in self._tensors().values())
        held = ", ".join(f"{name}={getattr(self, name)!r}" for name in HELD)
        return (
            f"PackedKV({tuple(self.shape)}, {self.dtype}, {self.device}, {held}, key_block={self.key_block}, "
            f"amax={self.amax:g}, for {self.kernel}, {size} bytes)"
        )


# In this order torch.export puts its own names into the text of guards: longer names first, or "k" is found in them.
LEAVES = ("k_descale", "v_descale", "k_mean", "k", "v")
SETTLED = ("head_dim", "dtype", "kernel", "key_block", "amax", *HELD)
Context = tuple[tuple[str, ...], tuple[Any, ...]]  # names of the leaves that are there, values of SETTLED


def _flatten(packed: PackedKV) -> tuple[list[Any], Context]:
    found = {name: x for name in LEAVES if (x := getattr(packed, name)) is not None}
    return list(found.values()), (tuple(found), tuple(getattr(packed, name) for name in SETTLED))


def _flatten_with_keys(packed: PackedKV) -> tuple[list[tuple[pytree.KeyEntry, Any]], Context]:
    leaves, context = _flatten(packed)
    return [(pytree.GetAttrKey(name), x) for name, x in zip(context[0], leaves, strict=True)], context


def _unflatten(leaves: Any, context: Context) -> PackedKV:
    names, settled = context
    held = dict.fromkeys(LEAVES) | dict(zip(names, leaves, strict=True))
    return PackedKV(**held, **dict(zip(SETTLED, settled, strict=True)))  # type: ignore[arg-type]


def _dump(context: Context) -> Any:
    return [list(context[0]), [str(x) if isinstance(x, torch.dtype) else x for x in context[1]]]


def _undump(dumped: Any) -> Context:
    settled = dict(zip(SETTLED, dumped[1], strict=True))
    settled["dtype"] = getattr(torch, settled["dtype"].removeprefix("torch."))
    return tuple(dumped[0]), tuple(settled.values())


pytree.register_pytree_node(
    PackedKV,
    _flatten,
    _unflatten,
    serialized_type_name=f"{__name__.partition('.')[0]}.{PackedKV.__name__}",
    to_dumpable_context=_dump,
    from_dumpable_context=_undump,
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([PackedKV])  # tensors, names and numbers: `torch.load` may build one
