"""Types of Q, K and V, and of O."""

from __future__ import annotations

from codegen.axes.axis import Axis


class Operand(Axis):
    """A type of Q, K and V.

    torch: its name there. mma: how CUTLASS spells it. ones: four times 1.0. limit: the largest number.
    made: quantise() makes it, with numbers so small that f16 scores hold their products; others only arrive, of any
    range, from caches and gradients.
    """

    torch: str
    mma: str
    ones: int
    limit: int
    made: bool

    E4M3 = "e4m3", {"torch": "float8_e4m3fn", "mma": "E4M3", "ones": 0x38383838, "limit": 448, "made": True}
    E5M2 = "e5m2", {"torch": "float8_e5m2", "mma": "E5M2", "ones": 0x3C3C3C3C, "limit": 57_344, "made": False}


class Out(Axis):
    """A type of O.

    policy: the class of epilogue.cuh that stores it. scaled: it is divided by a scale of the caller's.
    corrected: O is multiplied by what truncated products lose; fp16 shows it and would overflow near its end.
    """

    policy: str
    scaled: bool
    corrected: bool

    BF16 = "bf16", {"policy": "OutBf16", "scaled": False, "corrected": True}
    FP16 = "fp16", {"policy": "OutFp16", "scaled": False, "corrected": False}
    E4M3 = "e4m3", {"policy": "OutE4m3", "scaled": True, "corrected": True}
