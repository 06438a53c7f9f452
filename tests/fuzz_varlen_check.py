"""One random call of ``attention_varlen``, held sequence by sequence to float64 and, on a card, to the emulator."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_cases import SOURCES
from fuzz_check import lowered_for
from fuzz_judge import Expected, Verdict, judge, raised
from fuzz_varlen import RaggedCase, RaggedInputs, descale_of, ragged_inputs, ragged_sinks, unpoisoned
from gpu import is_emulated
from layouts import on_card
from reference import Operands, masked64, operands_of
from tensor_core import cut_products, emulated_products

import fp8cutlass
from fp8cutlass.call.ragged import RaggedCall, choose, emulate_sequence, kept, sequence_kernel
from fp8cutlass.choose.target import target
from fp8cutlass.errors import NoKernelError
from fp8cutlass.manifest import Variant

NAMES = ("q_descale", "k_descale", "v_descale")


def run_ragged_case(case: RaggedCase, device: str) -> Verdict:
    """Run and judge one case; an error that is not documented is a failure."""
    try:
        return _run(case, device)
    except NoKernelError as error:
        return Verdict("unserved", details=(str(error),))
    except Exception as error:  # whatever it is, it belongs into the report with the case's number
        return raised(error, device)


def called(case: RaggedCase, inputs: RaggedInputs, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call: out (tokens, H, D), and the LSE (H, tokens) where it is asked for."""
    tensors = [on_card(x) if device == "cuda" else x for x in inputs.tensors]

    def on_device(numbers: Any) -> torch.Tensor | None:
        return None if numbers is None else torch.tensor(numbers, dtype=torch.int32, device=device)

    options: dict[str, Any] = {"precision": case.precision, "return_lse": case.lse, "softmax_scale": case.scale}
    options |= {"causal": case.causal, "window_size": case.window, "causal_alignment": case.alignment}
    options |= {f"seqused_{x}": on_device(used) for x, used in (("q", case.used_rows), ("k", case.used_keys))}
    sinks = ragged_sinks(case)
    options |= {"softcap": case.softcap, "sinks": None if sinks is None else sinks.to(device)}
    if case.out is not None:
        options["out_dtype"] = SOURCES[case.out]
    if inputs.descales is not None:
        options |= {name: d.to(device) for name, d in zip(NAMES, inputs.descales, strict=True)}
    ends = (on_device(case.begins(lengths)) for lengths in (case.rows, case.keys))
    result = fp8cutlass.attention_varlen(*tensors, *ends, max(case.rows), max(case.keys), **options)
    return result if case.lse else (result, None)


def _run(case: RaggedCase, device: str) -> Verdict:
    inputs = ragged_inputs(case)
    out, lse = called(case, inputs, device)
    missed = [] if _same(called(case, inputs, device), (out, lse)) else ["a second call gives other bits"]
    missed += _elsewhere(case, out, lse)
    if case.poisoned >= 0:
        clean, rows = called(unpoisoned(case), ragged_inputs(unpoisoned(case)), device), _rows(case, case.poisoned)
        for x in (out, clean[0]):
            x[rows] = 0
        for y in (lse, clean[1]):
            if y is not None:
                y[:, rows] = 0
        if not _same(clean, (out, lse)):
            missed.append(f"sequence {case.poisoned} of NaN changes another one")
    kernel = ""
    for s, (rows, keys) in enumerate(case.counted):
        if not rows or not keys or s == case.poisoned:
            continue
        at = _rows(case, s)
        one = out[at].transpose(0, 1)[None]
        of_variant, found = judge_sequence(case, inputs, s, one, None if lse is None else lse[None, :, at], device)
        kernel = kernel or of_variant
        missed += [f"sequence {s}: {text}" for text in found]
    return Verdict("failed" if missed else "passed", kernel, tuple(missed))


def _rows(case: RaggedCase, s: int) -> slice:
    begin = case.begins(case.rows)[s]
    return slice(begin, begin + case.counted[s][0])


def _same(some: tuple[torch.Tensor | None, ...], others: tuple[torch.Tensor | None, ...]) -> bool:
    pairs = [(x, y) for x, y in zip(some, others, strict=True) if x is not None and y is not None]
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)


def _elsewhere(case: RaggedCase, out: torch.Tensor, lse: torch.Tensor | None) -> list[str]:
    """What is wrong with the tokens that do not count, and with the sequences without keys."""
    rest = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
    for s, (_, keys) in enumerate(case.counted):
        rest[_rows(case, s)] = not keys
    missed = [] if bool((out[rest] == 0).all()) else ["tokens that see nothing are not 0"]
    if lse is not None and not bool(lse[:, rest].isneginf().all()):
        missed.append("the LSE of tokens that see nothing is not -inf")
    return missed


def judge_sequence(
    case: RaggedCase,
    inputs: RaggedInputs,
    s: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    device: str,
) -> tuple[str, list[str]]:
    """The kernel, and the gates that the result of sequence ``s``, (1, H, rows, D), misses."""
    rows, keys = case.counted[s]
    begins = case.begins(case.rows)[s], case.begins(case.keys)[s], case.begins(case.keys)[s]
    q, k, v = (
        x[b : b + n].transpose(0, 1)[None] for x, b, n in zip(inputs.tensors, begins, (rows, keys, keys), strict=True)
    )
    variant = _kernel(case, inputs, (q, k, v), device)
    operands = _operands(case, inputs, s, (q, k, v), variant)
    seen = case.seen(s)
    how = case.softmax_scale, seen.to(device), case.softcap, ragged_sinks(case)
    reference = masked64(*(x.to(device) for x in operands.real), *how)
    emulated = None
    if device == "cuda":
        with emulated_products() if is_emulated(variant) else cut_products(two_terms=False):
            given = [d.to(device) for d in _own(case, inputs, s)]
            one, log_sum = emulate_sequence(
                _ragged_call(case, inputs, device), q.to(device), k.to(device), v.to(device), tuple(given), variant
            )
        emulated = Expected(one.float(), log_sum, one.float().abs().amax())
    stored = out.dtype
    found = judge(
        case.sequence(s), variant, reference, out.float(), lse, None, stored, emulated, {}, seen=seen.any(-1)
    )  # fmt: skip
    return variant.id, found


def _own(case: RaggedCase, inputs: RaggedInputs, s: int) -> list[torch.Tensor]:
    """The descales of FP8 operands as the emulator of one sequence takes them: (1,) or (1, heads)."""
    found = []
    for d, heads in zip(inputs.descales or [], (case.heads, case.kv_heads, case.kv_heads), strict=False):
        found.append(d if d.dim() == 1 else descale_of(case, d, s, heads).reshape(1, heads))
    return found


def _operands(
    case: RaggedCase, inputs: RaggedInputs, s: int, qkv: tuple[torch.Tensor, ...], variant: Variant
) -> Operands:
    """What the kernel has to make of a sequence, and what it stands for."""
    if case.half:
        return operands_of(variant, *qkv, "block")
    if variant.score == "f16":
        heads = [d.expand(1, x.shape[1]) for d, x in zip(_own(case, inputs, s), qkv, strict=True)]
        return lowered_for(variant, qkv, heads)
    given = zip(qkv, inputs.descales or [], strict=True)
    real = tuple(x.double() * descale_of(case, d, s, x.shape[1]).double() for x, d in given)
    return Operands(qkv, tuple(_own(case, inputs, s)), real)  # type: ignore[arg-type]


def _ragged_call(case: RaggedCase, inputs: RaggedInputs, device: str = "cpu") -> RaggedCall:
    q, k, v = inputs.tensors
    dtype = SOURCES[case.out] if case.out else q.dtype if case.half else torch.bfloat16
    ends = (q.new_empty(len(lengths) + 1) for lengths in (case.rows, case.keys))
    lengths = (*ends, None, None, max(case.rows), max(case.keys))
    sinks = ragged_sinks(case)
    options = (*case.ends, case.alignment == "bottom_right", dtype, case.precision, True, "", case.softcap)
    options = (*options, None if sinks is None else sinks.to(device))
    return RaggedCall(q, k, v, *lengths, tuple(inputs.descales or ()), case.softmax_scale, *options)


def _kernel(case: RaggedCase, inputs: RaggedInputs, qkv: tuple[torch.Tensor, ...], device: str) -> Variant:
    """The kernel of ragged batches on a card; on the CPU that of a dense call of the sequence's sizes."""
    call = _ragged_call(case, inputs)
    if device == "cuda":
        at = target(torch.device("cuda"))
        found = kept(at, call)
        return choose(at, call)[0] if found is None else found.variant
    return sequence_kernel(call, *qkv[:2])
