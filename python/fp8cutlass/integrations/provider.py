"""fp8cutlass as a provider of torch's flash attention, for ``torch.nn.attention.activate_flash_attention_impl``.

torch chooses flash attention first and calls the provider then. So its conditions come before ours: no mask, one
head_dim for query, key and value, at most 256, causal only with as many rows as keys. What the provider does not serve
runs in the kernel that was there before. This is for the whole process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..api.attention import attention
from ..errors import UnsupportedError
from ..stats import Reason, count_served
from . import ragged
from .dense import Accuracy, accuracy_of, attend, effort, for_query_heads

NAME = "fp8cutlass"
DOOR = "provider"
DENSE = "_scaled_dot_product_flash_attention"
DENSE_CPU = "_scaled_dot_product_flash_attention_for_cpu"  # what the CPU calls in its place
QUANTIZED = "_scaled_dot_product_flash_attention.quantized"


class Handle:
    """The overrides of torch's operators. ``remove`` restores what was there before."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def remove(self) -> None:
        """Restore torch's own kernels. A second call does nothing."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def register(name: str = NAME, *, device: str = "cuda", **accuracy: Any) -> None:
    """Tell torch about the provider. Nothing changes before ``activate_flash_attention_impl(name)``.

    Args:
        name: what ``activate_flash_attention_impl`` is called with. ``"FA3"`` takes the place of FlashAttention-3 for
            programs that activate it by that name.
        device: ``"cuda"``, or ``"cpu"`` to exchange the CPU's flash attention for the emulator, which is slow.
        accuracy: ``scaling``, ``precision``, ``smooth_k``, ``hadamard`` of :func:`fp8cutlass.attention`.

    Raises:
        TypeError: an unknown argument. ValueError: another device. UnsupportedError: torch is too old.
    """
    if not hasattr(torch_attention, "register_flash_attention_impl"):
        raise UnsupportedError(f"flash attention cannot be exchanged in torch {torch.__version__}: it is too old")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, got {device!r}")
    chosen = accuracy_of("register", accuracy)
    torch_attention.register_flash_attention_impl(name, register_fn=partial(_install, device, chosen))


def activate(name: str = NAME) -> None:
    """``torch.nn.attention.activate_flash_attention_impl(name)``, and a warning where torch prefers another backend.

    On Hopper torch may prefer cuDNN. The provider is then never called: see :func:`preferred`.
    """
    if name == NAME and name not in torch_attention.list_flash_attention_impls():
        register(name)
    torch_attention.activate_flash_attention_impl(name)
    backend = preferred()
    if backend is not None and backend != SDPBackend.FLASH_ATTENTION:
        warnings.warn(
            f"torch's attention prefers {backend.name} on this device, so that {name!r} is not called. Run the model "
            "inside fp8cutlass.integrations.sdpa.use_fp8(provider=True) or inside torch.nn.attention.sdpa_kernel("
            "[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)",
            UserWarning,
            stacklevel=2,
        )


def restore() -> None:
    """``torch.nn.attention.restore_flash_attention_impl()``: torch's own kernels again."""
    torch_attention.restore_flash_attention_impl()


def preferred(device: str = "cuda") -> SDPBackend | None:
    """The backend that torch's attention takes for a bf16 call of head_dim 128 now; None without such a device."""
    if device == "cuda" and not torch.cuda.is_available():
        return None
    x = torch.empty(1, 1, 128, 128, dtype=torch.bfloat16, device=device)
    return SDPBackend(torch._fused_sdp_choice(x, x, x, None, 0.0, False))


@contextmanager
def provided(*, device: str = "cuda", **accuracy: Any) -> Iterator[None]:
    """The provider for the length of a block, and flash attention before all other backends but without cuDNN.

    A provider that was active before is active again afterwards.
    """
    before = torch_attention.current_flash_attention_impl()
    register(NAME, device=device, **accuracy)
    try:
        torch_attention.activate_flash_attention_impl(NAME)
        with sdpa_kernel(_flash_first(), set_priority=True):
            yield
    finally:
        if torch_attention.current_flash_attention_impl() is not None:
            torch_attention.restore_flash_attention_impl()
        if before is not None:
            torch_attention.activate_flash_attention_impl(before)


def _flash_first() -> list[SDPBackend]:
    """The backends that are enabled, flash attention first. cuDNN is left out: some versions of torch try it first
    whatever the order says."""
    enabled = torch_attention._cur_sdpa_kernel_backends(with_priority=True)
    moved = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    return [SDPBackend.FLASH_ATTENTION, *(backend for backend in enabled if backend not in moved)]


def _install(device: str, accuracy: Accuracy) -> Handle:
    """Override the forward operators, dense and ragged. Backward stays torch's."""
    key = device.upper()
    dense, result = (DENSE, _flash_result) if device == "cuda" else (DENSE_CPU, _cpu_result)
    library = torch.library.Library("aten", "IMPL", key)
    try:
        original = torch.library.get_kernel(f"aten::{dense}", key)  # before it is overridden
    except RuntimeError as error:
        raise UnsupportedError(f"this torch has no flash attention for {device} that could be exchanged") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*")
        library.impl(dense, partial(_dense, original, result, accuracy), key, with_keyset=True)
        library.impl(QUANTIZED, _quantized, key)
        library.impl(ragged.OPERATOR, partial(ragged.forward, _ragged_kernel(key), accuracy), key, with_keyset=True)
    return Handle(library)


def _ragged_kernel(key: str) -> Any:
    """Torch's own for ragged batches; None where it has none, as for the CPU."""
    try:
        return torch.library.get_kernel(f"aten::{ragged.OPERATOR}", key)
    except RuntimeError:
        return None


def _flash_result(query: torch.Tensor, key: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> tuple[Any, ...]:
    """out, lse, the two empty places of ragged batches, the lengths, the random state of dropout, no debug mask."""
    out = _in_order(query, out)
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    debug = torch.empty(0, dtype=query.dtype, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, debug


def _cpu_result(query: torch.Tensor, key: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> tuple[Any, ...]:
    return _in_order(query, out), lse.transpose(1, 2).contiguous().transpose(1, 2)


def _in_order(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The result with the strides that torch's operators promise to compiled code."""
    like = torch.empty_like(query, dtype=out.dtype)
    return out if out.stride() == like.stride() else like.copy_(out)


def _dense(
    original: Any,
    result: Callable[..., tuple[Any, ...]],
    accuracy: Accuracy,
    keys: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The operator's arguments. Of the CPU's operator ``attn_mask`` is one, ``return_debug_mask`` is none."""
    others: tuple[Any, ...] = (dropout_p, is_causal)
    if result is _flash_result:
        others, masks = (*others, return_debug_mask), {}
    else:
        masks = {"attn_mask": attn_mask}
    reason = None
    if return_debug_mask:
        reason = Reason.KEYWORD
    elif is_causal and query.shape[2] != key.shape[2]:
        reason = Reason.MASK  # two alignments are in use
    served = attend(
        DOOR, "", query, key, value,
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1], return_lse=True, reason=reason, accuracy=accuracy,
    )  # fmt: skip
    if served is None:
        return original.call_boxed(keys, query, key, value, *others, scale=scale, **masks)
    return result(query, key, *served)


def _quantized(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """FP8 operands with a float32 descale for each sequence and KV head, also for query."""
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedError(f"is_causal needs as many rows as keys here, got {query.shape[2]} and {key.shape[2]}")
    if dropout_p or return_debug_mask:
        raise UnsupportedError("FP8 operands take neither dropout_p nor return_debug_mask")
    out, lse = attention(
        query, key, value, None, 0.0, is_causal, scale, query.shape[1] != key.shape[1],
        q_descale=for_query_heads(q_descale, query.shape[1]), k_descale=k_descale, v_descale=v_descale,
        scaling="head", return_lse=True,
    )  # fmt: skip
    count_served(DOOR, "quantized", work=effort(query, key, value, is_causal), at=query)
    return _flash_result(query, key, out, lse)
