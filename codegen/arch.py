"""Facts about targets (what code is compiled for) and cards (what it runs on)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """A compile target. Limits are per block or per multiprocessor (SM), from the CUDA programming guide's table.

    families: whose kernels serve it. The first is made for it; others give right results there without their speed.
    """

    name: str
    compute: str
    code: str
    capability: tuple[int, int]
    smem_per_block: int
    smem_per_sm: int
    cards: tuple[str, ...]
    families: tuple[str, ...]

    @property
    def gencode(self) -> str:
        return f"-gencode=arch={self.compute},code={self.code}"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Numbers for the cost model. FP8 rates in FLOP per clock and SM; clock in GHz under sustained FP8 load."""

    name: str
    sms: int
    clock: float
    fp8_f32: int
    fp8_f16: int


REGISTERS_PER_SM = 65_536
REGISTERS_PER_THREAD = 255
SMEM_RESERVED_PER_CTA = 1_024  # the driver's own share of every resident block

TARGETS = {
    t.name: t
    for t in (
        Target(
            name="sm89",
            compute="compute_89",
            code="sm_89",
            capability=(8, 9),
            smem_per_block=101_376,
            smem_per_sm=102_400,
            cards=("L4", "L40S", "RTX 4090"),
            families=("sm89",),
        ),
        Target(
            name="sm90a",
            compute="compute_90a",
            code="sm_90a",
            capability=(9, 0),
            smem_per_block=232_448,
            smem_per_sm=233_472,
            cards=("H100", "H200"),
            families=("sm90a", "sm89"),
        ),
    )
}

# Clocks are what the model assumes: the L4 is held to about 1.2 GHz by its 72 W, an H200 was seen between 1.5 and
# 1.85 GHz under FP8 load. The H100 is the same chip as the H200, and so is not listed.
CARDS = {
    c.name: c
    for c in (
        Card(name="L4", sms=58, clock=1.2, fp8_f32=2048, fp8_f16=2048),
        Card(name="L40S", sms=142, clock=2.0, fp8_f32=2048, fp8_f16=2048),
        Card(name="RTX 4090", sms=128, clock=2.4, fp8_f32=1024, fp8_f16=2048),
        Card(name="H200", sms=132, clock=1.6, fp8_f32=8192, fp8_f16=8192),
    )
}
