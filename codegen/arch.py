"""Facts about targets (what code is compiled for), cards (what it runs on), families (which source serves what)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """A compile target. Limits are per block or per multiprocessor (SM), from the CUDA programming guide's table."""

    name: str
    compute: str
    code: str
    capability: tuple[int, int]
    smem_per_block: int
    smem_per_sm: int
    cards: tuple[str, ...]

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


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kernel source. `emulated` names targets where it gives right results without the speed it was made for.

    model_card: the card whose numbers decide between its variants where nothing was measured.
    strided_descales: a kernel of scaling `block` reads its descales through strides, so it serves coarser ones too.
    """

    name: str
    template: str
    targets: tuple[str, ...]
    emulated: tuple[str, ...]
    smem_per_block: int
    smem_per_sm: int
    model_card: str
    strided_descales: bool


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
        ),
        Target(
            name="sm90a",
            compute="compute_90a",
            code="sm_90a",
            capability=(9, 0),
            smem_per_block=232_448,
            smem_per_sm=233_472,
            cards=("H100", "H200"),
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

FAMILIES = {
    f.name: f
    for f in (
        Family(
            name="sm89",
            template="sm89_forward.cu.j2",
            targets=("sm89", "sm90a"),
            emulated=("sm90a",),
            smem_per_block=101_376,
            smem_per_sm=102_400,
            model_card="L4",
            strided_descales=False,
        ),
        Family(
            name="sm90a",
            template="sm90a_forward.cu.j2",
            targets=("sm90a",),
            emulated=(),
            smem_per_block=232_448,
            smem_per_sm=233_472,
            model_card="H200",
            strided_descales=True,
        ),
    )
}


def families_of(target: str) -> tuple[Family, ...]:
    """The families that serve a target, in order of preference: those made for it before those emulated there."""
    serving = [f for f in FAMILIES.values() if target in f.targets]
    return tuple(sorted(serving, key=lambda f: target in f.emulated))


def family_of(target: str) -> Family:
    """The family that serves a target first."""
    return families_of(target)[0]


def model_card(target: str) -> Card:
    """The card that stands for a target in the cost model."""
    return CARDS[family_of(target).model_card]
