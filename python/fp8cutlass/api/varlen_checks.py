"""What ``attention_varlen`` refuses."""

from __future__ import annotations

import torch

from ..call.checks import WIDE_DTYPES
from ..call.options import (
    CHOICES,
    flag,
    one_of,
    wrong_kernel,
    wrong_longest,
    wrong_scale,
    wrong_sinks,
    wrong_softcap,
    wrong_window,
)
from ..call.reasons import differing, for_fp8, missing, wrong_dtypes, wrong_groups, wrong_tensors
from ..dtypes import HALF_DTYPES, OUT_NAMES
from ..errors import UnsupportedError

FP8 = torch.float8_e4m3fn
ACCEPTED = (*HALF_DTYPES, FP8)
DESCALES = ("q_descale", "k_descale", "v_descale")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def wrong_arguments(
    operands: tuple[torch.Tensor, ...],
    lengths: tuple[torch.Tensor | None, ...],
    longest: tuple[object, object],
    scale: object,
    causal: object,
    window: object,
    alignment: object,
    descales: tuple[torch.Tensor | None, ...],
    precision: object,
    out_dtype: object,
    return_lse: object,
    kernel: object,
    softcap: object,
    sinks: object,
) -> list[str]:
    """Every reason to refuse that needs no value of a tensor."""
    named = list(zip("qkv", operands, strict=True))
    wrong = wrong_tensors(named, ("tokens", "heads", "head_dim"))
    if wrong:
        return wrong
    q, k, v = operands
    wrong += differing("q", "k", [("head_dim", q.shape[2], k.shape[2])])
    wrong += differing("q", "v", [("head_dim", q.shape[2], v.shape[2])])
    wrong += differing("k", "v", [("heads", k.shape[1], v.shape[1]), ("tokens", k.shape[0], v.shape[0])])
    wrong += wrong_groups("q", "k", q.shape[1], k.shape[1])
    wrong += wrong_dtypes(named, ACCEPTED, WIDE_DTYPES)
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
        if count < 1:
            wrong.append(f"{name} must be of one sequence at least, got shape {tuple(given.shape)}")
        elif sequences is not None and count != sequences:
            wrong.append(f"{name} is for {count} sequences, cu_seqlens_q for {sequences}")
        sequences = count if sequences is None and count > 0 else sequences
    wrong += [reason for reason in map(wrong_longest, ("max_seqlen_q", "max_seqlen_k"), longest) if reason is not None]
    found = [
        flag("causal", causal),
        flag("return_lse", return_lse),
        wrong_window("window_size", window),
        one_of("causal_alignment", alignment, CHOICES["causal_alignment"]),
        one_of("precision", precision, CHOICES["precision"]),
        wrong_scale("softmax_scale", scale),
        wrong_kernel("kernel", kernel),
        wrong_softcap("softcap", softcap),
        wrong_sinks("sinks", sinks, q.shape[1], q.device),
    ]
    wrong += [reason for reason in found if reason is not None]
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype in OUT_NAMES):
        wrong.append(f"out_dtype must be one of {', '.join(map(str, OUT_NAMES))}, got {out_dtype}")
    return wrong + _wrong_descales(q, k, descales, sequences)


def _wrong_descales(
    q: torch.Tensor, k: torch.Tensor, descales: tuple[torch.Tensor | None, ...], sequences: int | None
) -> list[str]:
    wrong = []
    for name, d in zip(DESCALES, descales, strict=True):
        heads = (q.shape[1], k.shape[1]) if name == "q_descale" else (k.shape[1],)
        accepted = [(1,), *((sequences, h) for h in dict.fromkeys(heads))]
        if q.dtype != FP8:
            wrong += for_fp8([name], q.dtype) if d is not None else []
        elif d is None:
            wrong.append(missing(name, q.dtype, f"of shape {' or '.join(map(str, accepted))}"))
        elif not isinstance(d, torch.Tensor) or d.dtype != torch.float32 or tuple(d.shape) not in accepted:
            wrong.append(f"{name} must be a float32 tensor of shape {' or '.join(map(str, accepted))}")
        elif d.device != q.device:
            wrong.append(f"{name} is on {d.device}, q is on {q.device}")
    shapes = {d.dim() for d in descales if isinstance(d, torch.Tensor)}
    if len(shapes) > 1:
        wrong.append("q_descale, k_descale and v_descale must be all of shape (1,) or all (sequences, heads)")
    return wrong


def wrong_ends(name: str, cu: torch.Tensor, tokens: int) -> list[str]:
    """Of where sequences of so many tokens begin and end."""
    ends = cu.tolist()
    if ends[0] < 0 or ends[-1] > tokens or ends != sorted(ends):
        return [f"{name} must rise from 0 at least to the {tokens} tokens at most, got {ends}"]
    return []


def check_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    used_q: torch.Tensor | None,
    used_k: torch.Tensor | None,
    most_keys: int,
) -> None:
    """Of values that can be looked at."""
    wrong = []
    for letter, cu, used, tokens in (("q", cu_q, used_q, q.shape[0]), ("k", cu_k, used_k, k.shape[0])):
        beyond, lengths = wrong_ends(f"cu_seqlens_{letter}", cu, tokens), cu.diff()
        if not beyond and used is not None and bool(((used < 0) | (used > lengths)).any()):
            given = f"{lengths.tolist()}, got {used.tolist()}"
            beyond.append(f"seqused_{letter} must be 0 to the tokens of a sequence, {given}")
        wrong += beyond
    keys = cu_k.diff()
    longest = int((keys if used_k is None else torch.minimum(keys, used_k)).max())
    if longest > most_keys:
        wrong.append(f"max_seqlen_k is {most_keys}, a sequence has {longest} keys")
    if wrong:
        raise UnsupportedError(*wrong)
