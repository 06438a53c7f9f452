"""This package's kernels, chosen, quantised for and launched as its operator does it, without its outer layers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, cast

import torch

from fp8cutlass import __version__, attention
from fp8cutlass.call.call import Call, Tensors
from fp8cutlass.call.launch import kernel_operands
from fp8cutlass.call.plan import Plan, problem_of, score_amax
from fp8cutlass.choose.dispatch import decide
from fp8cutlass.choose.problem import Decision
from fp8cutlass.choose.target import Target, target
from fp8cutlass.dtypes import OPERANDS, operand_name
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.manifest import Variant, load_manifest
from fp8cutlass.native import extension
from fp8cutlass.native.fused import Operands

from ..data import Data
from ..report import CALL, OWN, at_precision
from .base import Contender, Refused

OUT_DTYPE = torch.bfloat16


def half_call(data: Data, scaling: str, precision: str = "fast", kernel: str = "") -> Call:
    """What is asked of bf16 tensors."""
    right = 0 if data.shape.causal else None
    return Call("half", OUT_DTYPE, data.scale, scaling, precision, right=right, kernel=kernel)


def half_plan(data: Data, variant: Variant, at: Target, scaling: str) -> tuple[Plan, Tensors]:
    """A call on bf16 tensors by one kernel, which a precision has no say in."""
    manifest, operand = load_manifest(at.directory), OPERANDS[variant.dtype]
    integers = operand.qk == torch.int8
    call = replace(half_call(data, scaling, kernel=variant.id), smooth_k=integers, hadamard=integers)  # as by default
    granularity = operand.granularity(manifest.scaling[scaling])
    plan = Plan(call, variant, manifest.index[variant.id], Decision(variant.id), granularity)
    return plan, Tensors(data.q, data.k, data.v)


def make_operands(data: Data, variant: Variant, at: Target, scaling: str) -> Operands:
    """Quantise bf16 for a kernel and pack V as the operator does: what stands between a caller's tensors and the
    launch."""
    plan, tensors = half_plan(data, variant, at, scaling)
    return kernel_operands(plan.call, variant, plan.granularity, tensors)


def launcher(number: int, operands: Operands, out: torch.Tensor, scale: float) -> Callable[[], torch.Tensor]:
    """One call of variant ``number`` that writes ``out``, without LSE and amax."""
    o = operands
    arguments = (number, o.q, o.k, o.v, o.q_descale, o.k_descale, o.v_descale, None, out, None, None, scale, 0)

    def launch() -> torch.Tensor:
        torch.ops.fp8cutlass_C.forward(*arguments)
        return out

    return launch


def whole_call(data: Data, name: str, serving: str = "", **arguments: Any) -> Contender:
    """``attention`` as a program calls it, from bf16 tensors to the output, with these ``arguments`` beside what the
    data say; ``serving`` is the kernel that is known to do it."""
    shape = data.shape
    arguments |= {"is_causal": shape.causal, "scale": data.scale, "enable_gqa": shape.heads != shape.kv_heads}

    def launch() -> torch.Tensor:
        return cast(torch.Tensor, attention(data.q, data.k, data.v, **arguments))

    return Contender(name, Own.precision, launch, kernel=serving)


class Own:
    """``kernel`` pins a variant; ``every`` adds all built kernels that serve the shape beside the chosen one, or those
    ``among`` these ids, and ``call`` the whole of ``attention``. ``asked`` is what a caller asks for by ``precision``;
    the contender is named after it."""

    precision = "fp8"

    def __init__(
        self,
        *,
        scaling: str = "block",
        kernel: str = "",
        every: bool = False,
        among: Collection[str] = (),
        call: bool = False,
        asked: str = "fast",
    ) -> None:
        self.name, self._asked = at_precision(OWN, asked), asked
        self._scaling, self._kernel, self._every, self._among, self._call = scaling, kernel, every, among, call

    def available(self) -> str | None:
        try:
            target(torch.device("cuda"))
            extension.load()
        except UnsupportedError as error:
            return "; ".join(error.reasons)
        return None

    def version(self) -> str:
        return f"fp8cutlass {__version__}"

    def prepare(self, data: Data) -> list[Contender]:
        at = target(data.q.device)
        try:
            chosen, number = self.choose(data, at, self._kernel)
        except UnsupportedError as error:
            raise Refused("; ".join(error.reasons)) from error
        out = torch.empty_like(data.q, dtype=OUT_DTYPE)
        made: dict[tuple[float, int], Operands] = {}  # kernels that read the same operands share them

        def contender(variant: Variant, number: int) -> Contender:
            first = variant.id == chosen.id

            def quantise() -> Operands:
                return make_operands(data, variant, at, self._scaling)

            key = (score_amax(variant), variant.key_block)
            if key not in made:
                made[key] = quantise()
            return Contender(
                self.name,
                self.precision,
                launcher(number, made[key], out, data.scale),
                quantise if first else None,
                kernel=variant.id,
                chosen=first,
            )

        others = self._others(data, at, chosen) if self._every else []
        contenders = [contender(*kernel) for kernel in [(chosen, number), *others]]
        return [*contenders, self._whole(data, chosen)] if self._call else contenders

    def _whole(self, data: Data, chosen: Variant) -> Contender:
        asked = {"scaling": self._scaling, "precision": self._asked, "kernel": self._kernel or None}
        return whole_call(data, at_precision(CALL, self._asked), chosen.id, **asked)

    def choose(self, data: Data, at: Target, kernel: str = "") -> tuple[Variant, int]:
        """The table's choice, or the pinned kernel, and its number; UnsupportedError where it does not serve."""
        call = half_call(data, self._scaling, self._asked, kernel)
        dtype = operand_name(data.q.dtype, self._asked)
        problem = problem_of(call, at, data.q.device, data.q.shape, data.k.shape, dtype)
        variant, number, _ = decide(at.directory, problem, kernel)
        if at.arch not in variant.targets:  # only a pinned one
            raise UnsupportedError(f"{variant.id} is built for {', '.join(variant.targets)}, not {at.arch}")
        if variant.head_dim != data.shape.head_dim:
            raise UnsupportedError(f"{variant.id} would need head_dim {data.shape.head_dim} to be padded")
        return variant, number

    def _others(self, data: Data, at: Target, chosen: Variant) -> list[tuple[Variant, int]]:
        """Every other built forward kernel of the card's own family that serves the shape; where that family has none,
        of any family."""
        serving = []
        for variant in load_manifest(at.directory).variants:
            if self._among and variant.id not in self._among:
                continue
            try:
                serving.append(self.choose(data, at, variant.id))
            except UnsupportedError:  # another head_dim, mask, output or scaling
                continue
        native = [kernel for kernel in serving if kernel[0].family == at.arch]
        return [kernel for kernel in native or serving if kernel[0].id != chosen.id]
