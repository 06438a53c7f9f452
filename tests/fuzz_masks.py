"""Random calls of ``attention`` with a mask or a bias, each a function of a seed and a number: every element is held to
float64 on the operands that the kernel gets."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_cases import Case, arguments, draw, inputs_of, sinks_of
from fuzz_check import operands_for
from fuzz_judge import Verdict, raised
from gpu import is_emulated
from kernel_gates import lse_limit
from layouts import on_card
from reference import Operands, Reference
from tensor_core import STEP, scores

import fp8cutlass
from fp8cutlass import BlockMask, UnsupportedError
from fp8cutlass.choose.target import target
from fp8cutlass.manifest import INTEGER, load_manifest

KINDS = ("boolean", "packed", "documents", "padding", "prefix", "blocks", "bias", "hiding bias")
DENSITIES = (0.0, 0.01, 0.2, 0.5, 0.9, 0.99, 1.0)
# Of P: half a step of e4m3, with `linear` 0.69 of a code more, with `quadratic` 0.08; two terms leave 2^-9.
ROUNDING = {"linear": 0.11, "codes": 0.11, "quadratic": 0.075, "exp2": 0.0625, "exp2x2": 2.0**-8, "bytes": 2.0**-20}
# Of the largest P of a row, what may be lost: code domains end 14 octaves below it.
LOST = {"linear": 2.0**-13, "codes": 2.0**-13, "quadratic": 2.0**-13, "exp2": 2.0**-17, "exp2x2": 2.0**-17}
MOST_ERROR = 0.5  # of P, beyond which an element says nothing


@dataclass(frozen=True)
class MaskedCase:
    """A call without a band, and what it is given for ``attn_mask``: sizes of 1 along the axes of ``shared``."""

    call: Case
    kind: str
    density: float
    shared: tuple[bool, bool, bool, bool]
    dtype: torch.dtype
    block: tuple[int, int]

    @property
    def number(self) -> int:
        """Of the case, in its seed."""
        return self.call.number

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the mask."""
        c = self.call
        sizes = (c.batch, c.heads, c.seqlen_q, c.seqlen_k)
        return tuple(1 if one else n for one, n in zip(self.shared, sizes, strict=True))  # type: ignore[return-value]


def draw_masked(seed: int, number: int, cells: int) -> MaskedCase:
    """Case ``number`` of a seed. The same on every machine."""
    r = random.Random(f"masks {seed}/{number}")
    kind = r.choice(KINDS)
    case = replace(draw(seed, number, cells), alignment=None, window=None, pick=None)
    if case.out == "e4m3":
        case = replace(case, out=None)
    return MaskedCase(
        call=case,
        kind=kind,
        density=r.choice(DENSITIES),
        shared=(r.random() < 0.5, r.random() < 0.5, r.random() < 0.2, r.random() < 0.1),
        dtype=r.choice((torch.float32, torch.bfloat16, torch.float16)),
        block=(r.choice((1, 64, 128, 256, 100)), r.choice((1, 64, 128, 256, 48))),
    )


def mask_of(case: MaskedCase, device: str) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """``attn_mask``, and in plain tensors which keys rows see, and what is added to the scores."""
    c = case.call
    generator = torch.Generator().manual_seed(c.number)
    shape, row, key = case.shape, torch.arange(c.seqlen_q)[:, None], torch.arange(c.seqlen_k)

    def numbers(most: int, *sizes: int) -> torch.Tensor:
        return torch.randint(0, most + 1, sizes, generator=generator)

    seen = torch.rand(shape, generator=generator) < case.density
    if case.kind == "boolean":
        return seen.to(device), seen, None
    if case.kind == "packed":
        return BlockMask.from_dense(seen.to(device), c.seqlen_k), seen, None
    if case.kind == "bias" or case.kind == "hiding bias":
        bias = 3 * torch.randn(shape, generator=generator)
        if case.kind == "hiding bias":
            bias = bias.masked_fill(~seen, -torch.inf)
        bias = bias.to(case.dtype)
        return bias.to(device), None, bias
    if case.kind == "documents":
        ids = numbers(1 + c.seqlen_k // 40, c.batch, c.seqlen_k).sort(-1).values
        own = ids[:, torch.arange(c.seqlen_q) % c.seqlen_k]
        return BlockMask.documents(own.to(device), ids.to(device)), (own[..., None] == ids[:, None])[:, None], None
    if case.kind == "padding":
        lengths = numbers(c.seqlen_k, c.batch)
        return BlockMask.padding(lengths.to(device), c.seqlen_k), (key < lengths[:, None])[:, None, None], None
    if case.kind == "prefix":
        lengths = numbers(c.seqlen_k, c.batch)
        causal = key <= row + c.seqlen_k - c.seqlen_q
        seen = (key < lengths[:, None, None]) | causal
        mask = BlockMask.prefix(lengths.to(device), c.seqlen_q, c.seqlen_k, bottom_right=True)
        return mask, seen[:, None], None
    sizes = (-(-c.seqlen_q // case.block[0]), -(-c.seqlen_k // case.block[1]))
    bitmap = torch.rand((*shape[:2], *sizes), generator=generator) < case.density
    seen = bitmap.repeat_interleave(case.block[0], 2).repeat_interleave(case.block[1], 3)
    seen = seen[:, :, : c.seqlen_q, : c.seqlen_k]
    return BlockMask.blocks(bitmap.to(device), c.seqlen_q, c.seqlen_k, case.block), seen, None


def masked_reference(
    operands: tuple[torch.Tensor, ...],
    scale: float,
    seen: torch.Tensor | None,
    bias: torch.Tensor | None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    products: torch.Tensor | None = None,
) -> Reference:
    """``attention64`` with the scores of a case; ``products`` in the place of Q K^T."""
    q, k, v = operands
    k64, v64 = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    q64 = scale * q.double()
    logits = q64 @ k64.transpose(-1, -2) if products is None else scale * products
    if softcap:  # before the bias
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.double()
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    finite = logits.masked_fill(logits == -torch.inf, 0.0).abs()
    lse = logits.logsumexp(-1)
    if sinks is not None:
        lse = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks.to(lse)[:, None]))
    probabilities = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return Reference(
        probabilities @ v64, lse, probabilities, v64, float(finite.max()) if finite.numel() else 0.0, q64, k64
    )


def products_on_card(operands: Operands, score: str, device: str) -> torch.Tensor:
    """Q K^T (B, H, Sq, Sk) in float64, its sums as the tensor core makes them."""
    heads = operands.fp8[0].shape[1]

    def of_heads(fp8: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = F.pad(fp8.to(device).float(), (0, -fp8.shape[3] % STEP))
        largest = values.abs().amax(-1)  # a row has one descale
        descale = torch.where(largest == 0, 0.0, real.to(device).abs().amax(-1) / largest.double())
        return tuple(x.repeat_interleave(heads // fp8.shape[1], 1).flatten(0, 1) for x in (values, descale))  # type: ignore[return-value]

    (q, q_descale), (k, k_descale) = (of_heads(operands.fp8[i], operands.real[i]) for i in (0, 1))
    products = scores(q, k, score, emulated_mma=False).double() * q_descale[:, :, None] * k_descale[:, None]
    return products.unflatten(0, (-1, heads))


def run_masked_case(case: MaskedCase, device: str) -> Verdict:
    """Run and judge one case; an error that is not documented is a failure."""
    try:
        return _run(case, device)
    except Exception as error:  # whatever it is, it belongs into the report with the case's number
        return raised(error, device)


def _run(case: MaskedCase, device: str) -> Verdict:
    call, inputs = case.call, inputs_of(case.call)
    tensors = [on_card(x) if device == "cuda" else x for x in inputs.tensors]
    options = arguments(call, inputs, device)
    mask, seen, bias = mask_of(case, device)
    options["attn_mask"] = mask
    served, text = fp8cutlass.supports(*tensors, **options)
    if not served:
        try:
            fp8cutlass.attention(*tensors, **options)
        except UnsupportedError as error:
            if str(error) == text:
                return Verdict("unserved", details=(text,))
        return Verdict("failed", details=(f"supports says {text!r}, attention does not",))
    variant = load_manifest(target(tensors[0].device).directory).find(text.split()[0])
    results = [fp8cutlass.attention(*tensors, **options, return_lse=True, return_amax=True) for _ in range(2)]
    missed = [] if all(map(torch.equal, *results)) else ["a second call gives other bits"]
    if case.kind == "boolean":
        packed = options | {"attn_mask": BlockMask.from_dense(mask, call.seqlen_k)}
        again = fp8cutlass.attention(*tensors, **packed, return_lse=True, return_amax=True)
        missed += [] if all(map(torch.equal, results[0], again)) else ["packed before it gives other bits"]
    operands, mean = operands_for(call, inputs, variant)
    real = tuple(x.to(device) for x in operands.real)
    on = tuple(None if x is None else x.to(device) for x in (seen, bias))
    exact = call.precision in INTEGER  # no product of integers is cut
    emulated = device == "cpu" or is_emulated(variant) or exact
    products = None if emulated else products_on_card(operands, variant.score, device)
    reference = masked_reference(real, call.softmax_scale, *on, call.softcap, sinks_of(call), products=products)
    out, lse, amax = results[0]
    out = (out if call.layout == "bhsd" else out.transpose(1, 2)).double()
    if mean is not None:  # the LSE is that of the keys as they were given
        q = inputs.tensors[0] if call.layout == "bhsd" else inputs.tensors[0].transpose(1, 2)
        shared = mean.repeat_interleave(call.heads // call.kv_heads, 1)[:, :, None].double()
        shift = (call.softmax_scale * (q.double() * shared).sum(-1)).to(device)
        lse = lse - shift
        reference.max_score = max(reference.max_score, float(shift.abs().max()))
    missed += judge_masked(reference, variant, operands, out, lse.double(), results[0][0].dtype, emulated=emulated)
    largest = float(out.abs().max()) if out.numel() else 0.0
    if abs(float(amax) - largest) > torch.finfo(results[0][0].dtype).eps * largest:
        missed.append(f"amax {float(amax):.4g} of an output with {largest:.4g}")
    return Verdict("failed" if missed else "passed", variant.id, tuple(missed))


def judge_masked(
    reference: Reference,
    variant: Any,
    operands: Operands,
    out: torch.Tensor,
    lse: torch.Tensor,
    stored: torch.dtype,
    *,
    emulated: bool = True,
) -> list[str]:
    """The gates that a result misses: each element within what the rounding of P and of scores allows. ``emulated``: no
    tensor core cut the products of its scores; else the reference has ``products_on_card``."""
    missed = []
    dead = reference.lse == -torch.inf
    if not torch.equal(lse == -torch.inf, dead):
        missed.append("rows that wrongly have keys, or none")
    if bool(out[dead].any()):
        missed.append("rows without keys that are not 0")
    score = lse_limit(variant, reference.max_partial, emulated=emulated) + 2.0**-21 * reference.max_score
    error = (lse - reference.lse)[~dead].abs()
    if not bool((error <= score).all()):
        missed.append(f"LSE {float(error.max()):.4g} > {score:.4g}")
    p, v = reference.probabilities, reference.values.abs()
    rounding = ROUNDING[variant.softmax] + 2 * score
    if rounding > MOST_ERROR:
        return missed
    limit = 2 * rounding / (1 - rounding) * (p @ v)
    if variant.softmax == "bytes":  # each P is rounded by half a step of 255, in units of V's descale
        descale = operands.descales[2].to(p).repeat_interleave(p.shape[1] // operands.descales[2].shape[1], 1)
        step = (p * descale[:, :, None]).amax(-1, keepdim=True) / 255
        limit += 0.5 * step * (v / descale[..., None]).nan_to_num(0.0).sum(2, keepdim=True)
    else:
        limit += LOST[variant.softmax] * p.amax(-1, keepdim=True) * v.sum(2, keepdim=True)
    limit += torch.finfo(stored).eps * reference.out.abs() + torch.finfo(stored).tiny
    beyond = ((out - reference.out).abs() / limit.clamp(min=1e-300))[~dead]
    if not bool((beyond <= 1).all()):
        missed.append(f"an element is {float(beyond.max()):.3g} times as far from float64 as rounding may bring it")
    return missed
