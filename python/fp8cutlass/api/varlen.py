"""``attention_varlen``: attention over a ragged batch, with FlashAttention's names and meaning."""

from __future__ import annotations

import torch

from ..call.checks import no_derivatives
from ..call.enter import autocast, number
from ..call.operators import register
from ..call.options import wrong_scale, wrong_window
from ..call.ragged import PRECISIONS, RaggedCall, default_scale, run
from ..dtypes import HALF_DTYPES
from ..errors import NoKernelError, UnsupportedError

FP8 = torch.float8_e4m3fn
DESCALES = ("q_descale", "k_descale", "v_descale")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences of unequal lengths whose tokens lie one after the other.

    Args:
        q: (T, H, D), tokens of all sequences, bf16, fp16 or float8_e4m3fn, on the CPU (emulated) or a Hopper card.
        k, v: (Tk, Hkv, D), dtype and device of q. H is a multiple of Hkv; heads of key and value are then shared.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, on q's device: where each sequence's tokens begin, and the
            last one's end. On a card nobody waits for them. Values that are out of order or out of range are clamped
            there, so that nothing outside the tensors is read or written; on the CPU they are refused.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; taken for FlashAttention's sake, they change nothing.
        seqused_q, seqused_k: (sequences,) int32, on q's device: how many tokens of each sequence count. Default: all.
        softmax_scale: finite; default 1 / sqrt(D).
        causal: row i sees no key past its own. The same as window_size=(left, 0).
        window_size: (left, right): row i sees ``left`` keys before and ``right`` keys after its own; -1 for all.
        causal_alignment: the key of row i is ``i + keys - rows`` of its sequence (``bottom_right``, as FlashAttention
            has it) or ``i`` (``top_left``).
        q_descale, k_descale, v_descale: for FP8 operands, and then all three: float32, (1,) or (sequences, H) and
            (sequences, Hkv); q's may be (sequences, Hkv), too. ``real = fp8 * descale``.
        precision: ``fast`` or ``accurate``, as in ``attention``; FP8 operands always get ``accurate``.
        out_dtype: bf16 or fp16; default the dtype of q, bf16 for FP8.
        return_lse: also return the natural-log sum of exponentials.
        kernel: the id of a variant to run.

    Returns:
        (T, H, D), then the LSE (H, T) float32 where asked for. Rows that see no key, and tokens that belong to no
        sequence, are 0, their LSE -inf.

    Raises:
        UnsupportedError: with every reason, before anything is launched.
    """
    q, k, v = autocast((q, k, v))
    softmax_scale = number(softmax_scale)
    wrong = _wrong(
        (q, k, v), (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), softmax_scale, causal, window_size,
        causal_alignment, (q_descale, k_descale, v_descale), precision, out_dtype, return_lse,
    )  # fmt: skip
    if wrong:
        raise UnsupportedError(*wrong)
    named = [("q", q), ("k", k), ("v", v), *zip(DESCALES, (q_descale, k_descale, v_descale), strict=True)]
    if beyond := no_derivatives(named):
        raise NoKernelError(*beyond)
    if not q.is_cuda and not torch.compiler.is_compiling():
        _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k)
    if q_descale is not None and q_descale.dim() == 2 and q_descale.shape[1] != q.shape[1]:
        q_descale = q_descale.repeat_interleave(q.shape[1] // k.shape[1], 1)
    dtype = out_dtype or (torch.bfloat16 if q.dtype == FP8 else q.dtype)
    left, right = window_size
    out, lse = _operator(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        *(None if d is None else d.contiguous() for d in (q_descale, k_descale, v_descale)),
        max_seqlen_q, max_seqlen_k, default_scale(q.shape[2]) if softmax_scale is None else float(softmax_scale),
        left, 0 if causal else right, causal_alignment == "bottom_right", dtype, precision, return_lse, kernel or "",
    )  # fmt: skip
    return (out, lse) if return_lse else out


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
    max_q, max_k, scale, left, right, bottom_right, dtype, precision, return_lse, kernel = rest
    descales = tuple(d for d in (q_descale, k_descale, v_descale) if d is not None)
    return RaggedCall(
        q, k, v, cu_q, cu_k, used_q, used_k, max_q, max_k, descales, scale, left, right, bottom_right, dtype,  # type: ignore[arg-type]
        precision, return_lse, kernel,  # type: ignore[arg-type]
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
    "bool return_lse, str kernel) -> (Tensor out, Tensor lse)",
    lambda *args: run(_call(*args)),
    _fake,
)


def _wrong(
    operands: tuple[torch.Tensor, ...],
    lengths: tuple[torch.Tensor | None, ...],
    scale: object,
    causal: object,
    window: object,
    alignment: object,
    descales: tuple[torch.Tensor | None, ...],
    precision: object,
    out_dtype: object,
    return_lse: object,
) -> list[str]:
    """Every reason to refuse that needs no value of a tensor."""
    q, k, v = operands
    wrong = []
    for name, x in zip("qkv", operands, strict=True):
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            wrong.append(f"{name} must be a tensor (tokens, heads, head_dim), got {shape}")
    if wrong:
        return wrong
    if k.shape != v.shape or k.shape[2] != q.shape[2]:
        wrong.append(f"k and v must be (tokens, heads, {q.shape[2]}), got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % max(1, k.shape[1]):
        wrong.append(f"the heads of q must be a multiple of those of k, got {q.shape[1]} and {k.shape[1]}")
    if q.dtype not in (*HALF_DTYPES, FP8) or k.dtype != q.dtype or v.dtype != q.dtype:
        wrong.append(f"q, k and v must be all bfloat16, float16 or float8_e4m3fn, got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.device != q.device or v.device != q.device:
        wrong.append(f"q, k and v are on {q.device}, {k.device} and {v.device}")
    sequences = None
    for name, given in zip(LENGTHS, lengths, strict=True):
        if given is None and name.startswith("seqused"):
            continue
        if (
            not isinstance(given, torch.Tensor)
            or given.dim() != 1
            or given.dtype != torch.int32
            or given.device != q.device
        ):
            wrong.append(f"{name} must be a one-dimensional int32 tensor on {q.device}")
            continue
        count = given.shape[0] - (1 if name.startswith("cu") else 0)
        if count < 1 or (sequences is not None and count != sequences):
            wrong.append(f"{name} is for {count} sequences, cu_seqlens_q for {sequences}")
        sequences = count if sequences is None else sequences
    if not isinstance(causal, bool) or not isinstance(return_lse, bool):
        wrong.append(f"causal and return_lse must be True or False, got {causal!r} and {return_lse!r}")
    if (reason := wrong_window("window_size", window)) is not None:
        wrong.append(reason)
    if alignment not in ("bottom_right", "top_left"):
        wrong.append(f"causal_alignment must be bottom_right or top_left, got {alignment!r}")
    if precision not in PRECISIONS:
        wrong.append(f"precision must be one of {', '.join(PRECISIONS)} for a ragged batch, got {precision!r}")
    if out_dtype not in (None, *HALF_DTYPES):
        wrong.append(f"out_dtype must be bfloat16 or float16 for a ragged batch, got {out_dtype}")
    if (reason := wrong_scale("softmax_scale", scale)) is not None:
        wrong.append(reason)
    return wrong + _wrong_descales(q, k, descales, sequences)


def _wrong_descales(
    q: torch.Tensor, k: torch.Tensor, descales: tuple[torch.Tensor | None, ...], sequences: int | None
) -> list[str]:
    wrong = []
    for name, d in zip(DESCALES, descales, strict=True):
        heads = (q.shape[1], k.shape[1]) if name == "q_descale" else (k.shape[1],)
        accepted = [(1,), *((sequences, h) for h in dict.fromkeys(heads))]
        if q.dtype != FP8:
            if d is not None:
                wrong.append(f"{name} is for FP8 operands; {q.dtype} ones are quantised inside")
        elif not isinstance(d, torch.Tensor) or d.dtype != torch.float32 or tuple(d.shape) not in accepted:
            wrong.append(f"{name} must be a float32 tensor of shape {' or '.join(map(str, accepted))}")
        elif d.device != q.device:
            wrong.append(f"{name} is on {d.device}, q is on {q.device}")
    shapes = {d.dim() for d in descales if isinstance(d, torch.Tensor)}
    if len(shapes) > 1:
        wrong.append("q_descale, k_descale and v_descale must be all of shape (1,) or all (sequences, heads)")
    return wrong


def _check_lengths(q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> None:
    """On the CPU the values can be looked at."""
    wrong = []
    for name, cu, tokens in (("cu_seqlens_q", cu_q, q.shape[0]), ("cu_seqlens_k", cu_k, k.shape[0])):
        ends = cu.tolist()
        if ends[0] < 0 or ends[-1] > tokens or ends != sorted(ends):
            wrong.append(f"{name} must rise from 0 at least to the {tokens} tokens at most, got {ends}")
    if wrong:
        raise UnsupportedError(*wrong)
