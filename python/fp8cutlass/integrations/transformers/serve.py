"""A call of a model to a call of this package, or the reason why not."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from ... import stats
from ...api.attention import attention
from ...api.varlen import attention_varlen
from ...autocast import is_on
from ...cache.packed import PackedKV
from ...errors import NoKernelError, UnsupportedError
from ...stats import Reason
from .. import BIASED, CAUSAL, FULL, MASKED, short_of
from ..refusal import Refusal, refusal_of
from .band import Band, cut, version_of

DOOR = "transformers"
PACKED = "_fp8cutlass_packed"  # the attribute of a tensor of keys that ``note_packed`` sets
# Keywords that models pass on and that change nothing in attention. Any other one that is not None is not served.
HARMLESS = frozenset(
    {
        "cache_position", "deterministic", "encoder_hidden_states", "layer_idx", "logits_indices",
        "logits_processor_args", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits",
        "position_ids", "read_index", "return_dict", "token_type_ids", "use_cache", "write_index",
    }
)  # fmt: skip
HARMLESS_IF_FALSE = frozenset({"output_attentions"})


class Features(NamedTuple):
    """What a model asks for beside queries, keys, values and a mask."""

    dropout: float = 0.0
    softcap: float | None = None
    position_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # (H,): a score of a key whose value is 0
    paged: bool = False
    rest: dict[str, Any] = {}


class Scores(NamedTuple):
    """What becomes of scores."""

    scale: float | None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # (1 or B, 1 or H, Sq, Sk), of as many keys as the call has

    def of_keys(self, first: int, end: int) -> dict[str, Any]:
        """The arguments of ``attention`` for these keys."""
        bias = self.bias if self.bias is None or self.bias.shape[-1] == 1 else self.bias[..., first:end]
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks, "attn_mask": bias}


def refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: Features) -> Refusal | None:
    """The reason that needs no mask, or None. Attributes alone, so that torch.compile traces it."""
    if features.paged:
        return Refusal(Reason.PAGED)
    if features.dropout:
        return Refusal(Reason.DROPOUT)
    for name, given in features.rest.items():
        harmless = name in HARMLESS or (name in HARMLESS_IF_FALSE and given is False)
        if given is not None and not harmless:
            return Refusal(Reason.KEYWORD, name)
    found = refusal_of(q, k, v)
    if found is not None:
        return found
    if features.position_bias is not None and torch.is_grad_enabled() and features.position_bias.requires_grad:
        return Refusal(Reason.GRAD)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        return Refusal(Reason.LAYOUT)
    if k.shape[3] != q.shape[3] or v.shape[3] > q.shape[3]:
        return Refusal(Reason.HEAD_DIM, f"{q.shape[3]} of queries, {k.shape[3]} of keys, {v.shape[3]} of values")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or v.shape[1] != k.shape[1]:
        return Refusal(Reason.HEADS)
    return None


def work_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> int:
    """As ``stats`` counts it."""
    width = q.shape[3] + v.shape[3]
    return stats.work(q.shape[0], q.shape[1], q.shape[2], k.shape[2], width, causal=causal)


def serve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band: Band,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | Refusal:
    """(B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv) -> (B, Sq, H, Dv) contiguous, or why no kernel serves it."""
    packed = None if band.ragged else _packed_of(k, v)
    rows = band.longest_q if band.ragged else q.shape[2]
    if packed is None and (text := _short(q, k, v, band, rows, bias)):
        return Refusal(Reason.SHORT, text)
    if bias is not None and (bias.dtype is not q.dtype or bias.stride(-1) != 1):  # T5's begins with its heads
        bias = bias.to(q.dtype, memory_format=torch.contiguous_format, copy=True)
    if bias is not None and band.ragged:  # as ``sdpa`` gets it: what is hidden by padding is added, too
        bias = bias.masked_fill(~band.dense(q.shape[0], q.shape[2], k.shape[2], q.device), -torch.inf)
        band = Band()
    width, given = v.shape[3], Scores(scale, softcap or 0.0, sinks, bias)
    try:
        if is_on(q.device.type):
            with torch.autocast(q.device.type, enabled=False):  # the emulator's own operations are none of the model
                out = _attend(q, k, v, packed, band, given)
        else:
            out = _attend(q, k, v, packed, band, given)
    except _Unaligned:
        return Refusal(Reason.MASK, "rows end neither with the first keys nor with the last")
    except NoKernelError as error:
        if bias is not None:
            return Refusal(Reason.BIAS, str(error))
        capped = Reason.SOFTCAP if softcap else Reason.NO_KERNEL
        return Refusal(Reason.WINDOW if band.left >= 0 else capped, str(error))
    except UnsupportedError as error:  # a limit that torch's attention does not have
        return Refusal(Reason.NO_KERNEL, str(error))
    return out[..., :width].contiguous()


def _short(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, rows: int, bias: torch.Tensor | None) -> str:
    """Why a call is too short to be worth it, or "". ``sdpa`` gets a mask of a window, and of padding."""
    mask = MASKED if band.ragged or band.left >= 0 else CAUSAL if band.right == 0 else FULL
    mask = mask if bias is None else BIASED
    return short_of(rows, q.shape[3], v.shape[3], mask, work_of(q, k, v, band.right == 0), q.is_cuda)


def note_packed(k: torch.Tensor, v: torch.Tensor, packed: PackedKV) -> None:
    """Note on keys what they and their values are when packed. Slices and copies are tensors like any other."""
    setattr(k, PACKED, (packed, version_of(k), v.data_ptr(), version_of(v)))


def _packed_of(k: torch.Tensor, v: torch.Tensor) -> PackedKV | None:
    """What ``note_packed`` noted, unless a tensor was written to since. Not seen by torch.compile."""
    if torch.compiler.is_compiling() or (found := getattr(k, PACKED, None)) is None:
        return None
    packed, *noted = found
    return packed if noted == [version_of(k), v.data_ptr(), version_of(v)] else None


class _Unaligned(Exception):
    """No alignment of ``attention`` is that of the band."""


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: PackedKV | None, band: Band, scores: Scores
) -> torch.Tensor:
    if band.ragged:
        return _ragged(q, k, v, band, scores)
    if packed is not None:
        return _on_packed(q, packed, k.shape[2], band, scores)
    return _dense(q, k, v, band, scores)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scores: Scores) -> torch.Tensor:
    """(B, Sq, H, D or more), from the keys that a row can see."""
    rows, keys = q.shape[2], k.shape[2]
    found = cut(band, rows, keys)
    if found is None:
        raise _Unaligned
    band, first, end = found
    if first or end < keys:
        k, v = k[:, :, first:end], v[:, :, first:end]
    if v.shape[3] < q.shape[3]:  # columns of zeros come out as zeros
        v = F.pad(v, (0, q.shape[3] - v.shape[3]))
    shared = q.shape[1] != k.shape[1]
    out = attention(q, k, v, enable_gqa=shared, **scores.of_keys(first, end), **_mask(band, rows, end - first))
    return out.transpose(1, 2)


def _mask(band: Band, rows: int, keys: int) -> dict[str, Any]:
    """The arguments of ``attention`` for a band that ``cut`` has aligned."""
    left, right = band.left, band.right
    if rows == 1 and band.shift == keys - 1:  # of the keys that are left, one row sees all
        return {}
    if left < 0 and right < 0:
        return {}
    alignment = "top_left" if band.shift == 0 else "bottom_right"
    if left < 0 and right == 0:
        return {"is_causal": True, "causal_alignment": alignment}
    return {"window_size": (left, right), "causal_alignment": alignment}


def _on_packed(q: torch.Tensor, packed: PackedKV, keys: int, band: Band, scores: Scores) -> torch.Tensor:
    """The same on keys and values that are packed already, all of them."""
    found = cut(band, q.shape[2], keys)
    if found is None or found[1] or found[2] < keys:
        raise _Unaligned
    shared = q.shape[1] != packed.shape[1]
    mask = _mask(found[0], q.shape[2], keys)
    return attention(q, packed, enable_gqa=shared, **scores.of_keys(0, keys), **mask).transpose(1, 2)


def _ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scores: Scores) -> torch.Tensor:
    """The same for sequences of unequal lengths. Nothing is gathered: they lie where they lay."""
    batch, heads, rows, head_dim = q.shape
    if v.shape[3] < head_dim:
        v = F.pad(v, (0, head_dim - v.shape[3]))
    if band.ends_q is None or band.ends_k is None:
        raise AssertionError("a ragged band has both ends")
    q, k, v = (x.transpose(1, 2).reshape(-1, x.shape[1], head_dim) for x in (q, k, v))
    found = attention_varlen(
        q,
        k,
        v,
        band.ends_q,
        band.ends_k,
        band.longest_q,
        band.longest_k,
        band.used_q,
        band.used_k,
        scores.scale,
        window_size=(band.left, band.right),
        softcap=scores.softcap,
        sinks=scores.sinks,
    )
    out: Any = found
    return cast(torch.Tensor, out.view(batch, rows, heads, head_dim))
