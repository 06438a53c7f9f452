"""``attention_varlen``: attention over a ragged batch, with FlashAttention's names and meaning."""

from __future__ import annotations

from typing import Any

import torch

from ..autocast import under_autocast
from ..call import ragged_memo
from ..call.checks import WIDE_DTYPES
from ..call.enter import number
from ..call.kept import refused
from ..call.operators import register
from ..call.ragged import PRECISIONS, RaggedCall, choose, default_scale, kept, run
from ..call.reasons import no_derivatives, wrong_dtype
from ..checking import looks_at
from ..choose.target import target
from ..errors import NoKernelError, UnsupportedError
from .varlen_checks import ACCEPTED, DESCALES, FP8, check_lengths, wrong_arguments


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    *,
    causal_alignment: str = "bottom_right",
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    precision: str = "fast",
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences of unequal lengths whose tokens lie one after the other.

    Args:
        q: (T, H, D), tokens of all sequences, bf16, fp16 or float8_e4m3fn, on the CPU (emulated) or a card.
        k, v: (Tk, Hkv, D), dtype and device of q. H is a multiple of Hkv; heads of key and value are then shared.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, on q's device: where each sequence's tokens begin, and the
            last one's end. On a card nobody waits for them. Values that are out of order or out of range are clamped
            there, so that nothing outside the tensors is read or written; on the CPU they are refused.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. That of keys chooses the kernel on a card: one for
            short sequences reads no more keys of a sequence than it is for. Where lengths are looked at (on the CPU,
            and with FP8CUTLASS_CHECK), one that is too small is refused. That of rows changes nothing.
        seqused_q, seqused_k: (sequences,) int32, on q's device: how many tokens of each sequence count. Default: all.
        softmax_scale: finite; default 1 / sqrt(D).
        causal: row i sees no key past its own. The same as window_size=(left, 0).
        window_size: (left, right): row i sees ``left`` keys before and ``right`` keys after its own; -1 for all.
        causal_alignment: the key of row i is ``i + keys - rows`` of its sequence (``bottom_right``, as FlashAttention
            has it) or ``i`` (``top_left``).
        q_descale, k_descale, v_descale: for FP8 operands, and then all three: float32, (1,) or (sequences, H) and
            (sequences, Hkv); q's may be (sequences, Hkv), too. ``real = fp8 * descale``.
        precision: ``fast`` or ``accurate``, as in ``attention``. FP8 operands of short sequences get ``accurate``,
            which is faster then.
        out_dtype: bf16 or fp16; default the dtype of q, bf16 for FP8.
        return_lse: also return the natural-log sum of exponentials.
        kernel: the id of a variant to run.
        softcap: 0, or c > 0: a logit x becomes ``c * tanh(x / c)`` before the mask. ``fast`` is then ``accurate``.
        sinks: (H,) bf16, fp16 or float32: a logit for each head without a value, which joins the denominator once.
            The LSE includes it.

    Returns:
        (T, H, D), then the LSE (H, T) float32 where asked for. Rows that see no key, and tokens that belong to no
        sequence, are 0, their LSE -inf, with and without sinks.

    Raises:
        UnsupportedError: with every reason, before anything is launched.
    """
    signed = None
    descales = (q_descale, k_descale, v_descale)
    if not torch.compiler.is_compiling():
        tensors = ((q, k, v), (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), descales, sinks)
        options = (
            softmax_scale, causal, window_size, causal_alignment, precision, out_dtype, return_lse, kernel, softcap,
        )  # fmt: skip
        signed = ragged_memo.signature(*tensors, (max_seqlen_q, max_seqlen_k), options)
        known = None if signed is None else ragged_memo.look_up(signed)
        if known is not None:
            try:
                return known(*tensors, (max_seqlen_q, max_seqlen_k))
            except RuntimeError as error:
                if not refused(error):
                    raise
    made = _checked(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale, causal,
        window_size, causal_alignment, *descales, precision, out_dtype, return_lse, kernel, softcap, sinks,
    )  # fmt: skip
    out, lse = _operator(*made)
    if signed is not None and made[0] is q and made[1] is k and made[2] is v:
        ragged_memo.remember(signed, _call(*made), descales)
    return (out, lse) if return_lse else out


def kernel_of(**arguments: Any) -> str:
    """The kernel that serves ``attention_varlen(**arguments)``, all of them given; nothing is launched."""
    call = _call(*_checked(**arguments))
    if not call.q.is_cuda:
        return "the emulator, each sequence by the kernel for its sizes"
    found = kept(target(call.q.device), call)
    if found is not None:
        return found.kernel.id + " (K and V of short sequences kept in shared memory; nothing is packed)"
    return choose(target(call.q.device), call)[0].id + " (the kernel for ragged batches of its class)"


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    causal_alignment: str,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    precision: str,
    out_dtype: torch.dtype | None,
    return_lse: bool,
    kernel: str | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> tuple[Any, ...]:
    """What the operator takes; UnsupportedError with every reason against it."""
    q, k, v = under_autocast((q, k, v))
    softmax_scale = number(softmax_scale)
    wrong = wrong_arguments(
        (q, k, v), (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), (max_seqlen_q, max_seqlen_k), softmax_scale,
        causal, window_size, causal_alignment, (q_descale, k_descale, v_descale), precision, out_dtype, return_lse,
        kernel, softcap, sinks,
    )  # fmt: skip
    if wrong:
        raise UnsupportedError(*wrong)
    named = [("q", q), ("k", k), ("v", v), *zip(DESCALES, (q_descale, k_descale, v_descale), strict=True)]
    named.append(("sinks", sinks))
    beyond = [
        wrong_dtype(name, x, ACCEPTED) for name, x in zip("qkv", (q, k, v), strict=True) if x.dtype in WIDE_DTYPES
    ]
    beyond += no_derivatives(named)
    if precision not in PRECISIONS:
        beyond.append(f"precision={precision!r} has no kernel for ragged batches; {' and '.join(PRECISIONS)} have")
    if out_dtype == FP8:
        beyond.append(f"out_dtype={out_dtype} has no kernel for ragged batches; bf16 and fp16 have")
    if beyond:
        raise NoKernelError(*beyond)
    if looks_at(q):
        check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_k)
    if q_descale is not None and q_descale.dim() == 2 and q_descale.shape[1] != q.shape[1]:
        q_descale = q_descale.repeat_interleave(q.shape[1] // k.shape[1], 1)
    dtype = out_dtype or (torch.bfloat16 if q.dtype == FP8 else q.dtype)
    left, right = window_size
    return (
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        *(None if d is None else d.contiguous() for d in (q_descale, k_descale, v_descale)),
        max_seqlen_q, max_seqlen_k, default_scale(q.shape[2]) if softmax_scale is None else float(softmax_scale),
        left, 0 if causal else right, causal_alignment == "bottom_right", dtype, precision, return_lse, kernel or "",
        float(softcap), None if sinks is None else sinks.float().contiguous(),
    )  # fmt: skip


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    used_q: torch.Tensor | None,
    used_k: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    *rest: object,
) -> RaggedCall:
    max_q, max_k, scale, left, right, bottom_right, dtype, precision, return_lse, kernel, softcap, sinks = rest
    descales = tuple(d for d in (q_descale, k_descale, v_descale) if d is not None)
    return RaggedCall(
        q, k, v, cu_q, cu_k, used_q, used_k, max_q, max_k, descales, scale, left, right, bottom_right, dtype,  # type: ignore[arg-type]
        precision, return_lse, kernel, softcap, sinks,  # type: ignore[arg-type]
    )  # fmt: skip


def _fake(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(*args)  # type: ignore[arg-type]
    tokens, heads, _ = call.q.shape
    lse = call.q.new_empty((heads, tokens) if call.return_lse else (0,), dtype=torch.float32)
    return call.q.new_empty(call.q.shape, dtype=call.out_dtype), lse


_operator = register(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float scale, int left, int right, bool bottom_right, ScalarType out_dtype, str precision, "
    "bool return_lse, str kernel, float softcap, Tensor? sinks) -> (Tensor out, Tensor lse)",
    lambda *args: run(_call(*args)),
    _fake,
)
