"""``attention``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..cache.packed import PackedKV
from ..call import memo
from ..call.backward import asked, differentiable
from ..call.enter import Form, reshaped
from ..call.fallback import sdpa
from ..call.operators import execute
from ..call.options import Options
from ..call.request import TENSORS, Request
from ..call.settle import settle
from ..errors import NoKernelError
from ..masks.block_mask import BlockMask
from . import jagged
from .deliver import deliver

if TYPE_CHECKING:
    from .arguments import Keywords, Unpack


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor | PackedKV,
    value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[False] = False,
    return_amax: Literal[False] = False,
    **options: Unpack[Keywords],
) -> torch.Tensor: ...


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor | PackedKV,
    value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True, "merge"],
    return_amax: Literal[False] = False,
    **options: Unpack[Keywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor | PackedKV,
    value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[False] = False,
    return_amax: Literal[True],
    **options: Unpack[Keywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor | PackedKV,
    value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True, "merge"],
    return_amax: Literal[True],
    **options: Unpack[Keywords],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor | PackedKV,
    value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool | Literal["merge"] = False,
    return_amax: bool = False,
    **options: Unpack[Keywords],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


def attention(
    query: torch.Tensor,
    key: torch.Tensor | PackedKV,
    value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    layout: str = "bhsd",
    q_descale: torch.Tensor | float | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    scaling: str = "block",
    precision: str = "fast",
    smooth_k: bool | None = None,
    hadamard: bool | None = None,
    out_dtype: torch.dtype | None = None,
    out_descale: torch.Tensor | float | None = None,
    return_lse: bool | Literal["merge"] = False,
    return_amax: bool = False,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    kernel: str | None = None,
    fallback: str = "error",
    backward: str = "none",
    causal_offset: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Softmax(query key^T * scale) value in FP8; the positional part is that of ``scaled_dot_product_attention``.

    Args:
        query: (B, H, Sq, D), or (B, Sq, H, D) with ``layout="bshd"``. bf16 and fp16 are quantised inside; float8_e4m3fn
            and float8_e5m2 come with descales. CPU (emulated) or CUDA. Any strides; a last dimension that is not
            contiguous is copied, on CUDA also rows that do not start on multiples of 16 bytes or lie 2^40 bytes apart.
            Sq and Sk are below 2^31 - 256. bf16 and fp16 may have any number of batch dimensions, or no heads: (S, D).
            Nested tensors (B, H, j, D) of layout ``torch.jagged`` are served as ``attention_varlen`` serves them. Under
            autocast operands are cast where one is float32 or their dtypes differ.
        key, value: (B, Hkv, Sk, D) or (B, Sk, Hkv, D), dtype and device of query. D is 1 to 256 and is padded with
            zeros to the next head dim that has kernels. bf16 and fp16 share batches and heads of size 1. Their value
            may have another D; the narrower of query and value is padded. Sk = 0 gives zeros and an LSE of -inf.
            ``scaling="block"``, and on Hopper every mode but "token", sums value in float32 with its descale: max
            |value| * 2^25 * Sk must stay below 3e38. Otherwise the descale of value is applied at the end and there is
            no such limit.
            An infinity in key makes every row of its head that sees it NaN; it is no mask.
            ``key`` may be what ``pack_kv`` made of both, without a value: scaling, precision, smooth_k and hadamard are
            then those of the packing, and query is bf16 or fp16 as they were.
        attn_mask: boolean, True where a row sees a key; a ``BlockMask``, packed once for many calls; or additive, of
            float32, bf16 or fp16: added to the scaled score, -inf hides, as does less than -2.3e38. It broadcasts to
            (B, H, Sq, Sk) in every layout. An additive one may stand beside ``is_causal`` and a window, a boolean one
            is joined (``BlockMask.window``). Kernels: head_dim up to 128, no softcap. A ``CausalBias`` is ``is_causal``
            everywhere.
        dropout_p: not supported; anything but 0.0 is refused.
        is_causal: hide from row i every key past ``i`` (``causal_alignment="top_left"``, as SDPA has it) or past
            ``i + Sk - Sq`` (``"bottom_right"``, as FlashAttention has it, refused without a mask). A row without keys
            is 0, its LSE -inf.
        scale: softmax scale, finite, default 1 / sqrt(D). Zero and negative values are allowed, numbers of numpy, and
            tensors without dimensions, which are waited for.
        enable_gqa: needed when H is a multiple of Hkv; key and value heads are shared without being repeated.
        q_descale, k_descale, v_descale: for FP8 operands, and then all three: ``real = fp8 * descale``. A float
            from 2^-126 up, or a float32 tensor: (), (1,), (H,), (B, H) or the finest shape of the scaling mode, with
            the operand's own number of heads. They are not reordered by ``layout``. Values of tensors are not checked:
            an infinite or NaN one of query or key makes NaN of what it scales on the CPU, and one of value everywhere;
            on a card one of query or key counts as 2^80 or 2^-126. Below 2^-126 it counts as 2^-126, value's as given.
        scaling: what shares a descale. ``tensor``, ``head``; ``block``: each row of query, 128 keys (of bf16 and fp16
            also 192 or 256, the tile of the kernel); ``token``: each row of query and key, each channel of value.
        precision: ``fast`` lets kernels compute P in the code domain where their conditions hold; ``balanced`` takes
            those that do so as exactly as e4m3 can be, down to 14 octaves below the largest P of a tile; ``accurate``
            computes no P so, and serves where these have no kernel: ``token`` scaling, and FP8 operands whose scores
            may not fit f16. These are e5m2, and e4m3 with a descale finer than a head's. Rows of other
            e4m3 query are divided by powers of two to fit. ``balanced`` exists on sm_90 alone.
            ``high`` multiplies V by P in two terms, so that next to nothing is lost beside the rounding of the
            operands: e4m3, bf16 and fp16 operands, bf16 and fp16 results. Pinning a less precise kernel is excluded.
            ``int8`` makes 8-bit integers of bf16 and fp16 query and key, ``int8_full`` of value and P, too, in
            ``block`` scaling; a NaN reaches all rows that see its descale. ``int8_full`` has no kernel on Hopper.
        smooth_k: subtract from every key of a head a mean of some of them before it is quantised, which changes nothing
            but rounding: for keys that share a bias. An LSE is that of the original keys. Not for FP8 operands. By
            default for ``int8`` and ``int8_full``.
        hadamard: multiply the rows of query and key by one orthonormal matrix before they are quantised, which changes
            no score but for rounding: for outliers. A bias that keys share is better subtracted first (``smooth_k``).
            Finite elements should stay below 2^120. Not for FP8 operands. By default as ``smooth_k``.
        out_dtype: bf16, fp16 or float8_e4m3fn; default the dtype of query, bf16 for FP8 operands.
        out_descale: for float8_e4m3fn output: a float in [2^-126, 2^126] or one float32; stored = result /
            out_descale, saturating.
        return_lse: also return the natural-log sum of exponentials, (B, H, Sq) float32. ``"merge"`` gives that of the
            quantised exponentials, which costs next to nothing and is for ``merge_attention`` alone.
        return_amax: also return the largest |result| before ``out_descale``, (1,) float32.
        window_size: (left, right): row i sees ``left`` keys before its own and ``right`` after it; -1 for all.
            ``is_causal`` sets right to 0. Which key is row i's own, ``causal_alignment`` says: key i, or with
            ``"bottom_right"`` key ``i + Sk - Sq``. A window with a left end has kernels for e4m3, bf16 and fp16
            operands, bf16 and fp16 results, and every scaling but "token".
        softcap: 0, or c > 0: a logit x becomes ``c * tanh(x / c)`` before the mask. It has kernels for e4m3, bf16 and
            fp16 operands, bf16 and fp16 results, every scaling but "token" and every precision but "high". ``fast`` and
            ``balanced`` are then ``accurate``.
        sinks: (H,) bf16, fp16 or float32: a logit for each head without a value, which joins the denominator once, and
            the LSE. A row without keys stays 0, its LSE -inf. Neither softcap nor sinks go with smooth_k.
        out: takes the result: shape and device of query, dtype of the result, any strides with which no two elements
            are one, no gradient, no element shared with an input (not checked while torch.compile traces). On a card
            a further call of one form on packed keys writes into it where its rows are aligned to 16 bytes; others
            copy.
        kernel: the id of a variant to run instead of the table's choice; its head_dim may be wider than D. One with
            ``linear`` or ``quadratic`` softmax takes FP8 operands of magnitude 14 at most (``quantize(..., amax=14)``)
            where a descale is finer than a head's: larger ones may overflow f16 scores or leave its softmax's range.
        fallback: ``sdpa`` runs torch's attention when the call is well formed but no kernel serves it, and warns once
            for each set of reasons; under torch.compile while the call is traced.
        backward: ``flash`` gives operands with ``requires_grad`` a gradient: torch's flash attention computes it from
            this forward's result and LSE, in the dtype of query. For bf16 and fp16 operands, without a window, causal
            with Sq = Sk, the result alone. By default such operands are refused while gradients are enabled.
        causal_offset: which key is row i's own: ``i + causal_offset``, for a shard of the rows. With is_causal or a
            window_size, instead of causal_alignment. May be negative: rows without keys are 0, their LSE -inf.

    Returns:
        The result in the shape of query, with value's D, and in query's memory order, then lse and amax as asked for.

    Raises:
        UnsupportedError: with every reason, before anything is launched.
    """
    options = Options(
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        layout,
        scaling,
        precision,
        smooth_k,
        hadamard,
        out_dtype,
        return_lse,
        return_amax,
        causal_alignment,
        window_size,
        softcap,
        kernel,
        fallback,
        backward,
        causal_offset,
    )
    signed = room = None
    eager = not torch.compiler.is_compiling() and out_descale is None
    if eager and out is not None and attn_mask is None and sinks is None:
        room = memo.room(out, query, key, options)
    if eager and (out is None or room is not None):
        plain = q_descale is None and k_descale is None and v_descale is None
        descales = () if plain else (q_descale, k_descale, v_descale)
        signed = memo.signature(query, key, value, descales, options, sinks, attn_mask)
        known = None if signed is None else memo.look_up(signed)
        if known is not None:
            operands: tuple[Any, ...] = (query, key, value)
            if layout == "bshd":
                operands = tuple(x.transpose(1, 2) if isinstance(x, torch.Tensor) else x for x in operands)
            try:
                if out is not None:  # it is `room`, in the caller's layout
                    return deliver(known(*operands, out=room)._replace(out=out), "bhsd", None)
                more = descales if sinks is None else (*descales, sinks)
                more = more if attn_mask is None else (*more, attn_mask)
                return deliver(known(*operands, *more), layout, out)
            except RuntimeError as error:
                if not memo.refused(error, descales):
                    raise
    given = (q_descale, k_descale, v_descale, out_descale)
    request = Request(query, key, value, attn_mask, *given, out, options, sinks=sinks)
    entered = reshaped(request)
    try:
        if jagged.is_jagged(query):
            return deliver(jagged.attention(request), "bhsd", None)
        if entered is not None:
            if out is not None:
                settle(request)  # checks `out`, too
            return _deliver_reshaped(*entered, out)
        call, tensors = settle(request)
    except NoKernelError as error:
        if fallback != "sdpa":
            raise
        result = sdpa(request, error)
        return result if out is None else out.copy_(result)
    if asked(backward, tensors):
        return deliver(differentiable(call, tensors), layout, out)
    outputs = execute(call, tensors)
    if signed is not None and memo.taken_as_given(tensors, query, key, value, scale):
        memo.remember(signed, call, tensors, descales)
    return deliver(outputs, layout, out)


def _deliver_reshaped(
    request: Request, form: Form, out: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The same by a call on (B, H, S, D), which is remembered as others are."""
    tensors = {name: getattr(request, name) for name in TENSORS}
    result = form.leave(attention(**tensors, **request.options._asdict()))
    if out is None:
        return result
    return out.copy_(result) if isinstance(result, torch.Tensor) else (out.copy_(result[0]), *result[1:])
