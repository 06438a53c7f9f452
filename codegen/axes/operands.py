"""Types of Q, K, P and V, and of O."""

from __future__ import annotations

from codegen.axes.axis import Axis


class Number(Axis):
    """A type of the numbers that a product multiplies.

    torch: its name there. mma: how CUTLASS spells it. bytes: of a number. limit: the largest.
    ones: four times 1 in a word.
    sums: accumulator of the products with it that no softmax narrows.
    """

    torch: str
    mma: str
    bytes: int
    limit: int
    ones: int
    sums: str

    E4M3 = (
        "e4m3",
        {"torch": "float8_e4m3fn", "mma": "E4M3", "bytes": 1, "limit": 448, "ones": 0x38383838, "sums": "f32"},
    )
    E5M2 = (
        "e5m2",
        {"torch": "float8_e5m2", "mma": "E5M2", "bytes": 1, "limit": 57_344, "ones": 0x3C3C3C3C, "sums": "f32"},
    )

    S8 = "s8", {"torch": "int8", "mma": "S8", "bytes": 1, "limit": 127, "ones": 0x01010101, "sums": "s32"}
    U8 = "u8", {"torch": "uint8", "mma": "U8", "bytes": 1, "limit": 255, "ones": 0x01010101, "sums": "s32"}

    @property
    def integer(self) -> bool:
        """Whether sums are exact, and of another type than those of floating point."""
        return self.sums == "s32"


class Operand(Axis):
    """What a kernel multiplies: a type of Q and K, of P, and of V.

    made: quantise() makes it, with numbers so small that f16 scores hold their products; others only arrive, of any
    range, from caches and gradients.
    groups: descales of K for a block of keys. Of 4 each is that of the keys in the columns of one lane of four.
    arrives: callers bring it, too, with coarser descales; the other way round it is made inside alone.
    """

    qk: Number
    p: Number
    v: Number
    made: bool
    groups: int
    arrives: bool

    E4M3 = "e4m3", {"qk": Number.E4M3, "p": Number.E4M3, "v": Number.E4M3, "made": True, "groups": 1, "arrives": True}
    E5M2 = "e5m2", {"qk": Number.E5M2, "p": Number.E4M3, "v": Number.E5M2, "made": False, "groups": 1, "arrives": True}
    S8 = "s8", {"qk": Number.S8, "p": Number.E4M3, "v": Number.E4M3, "made": True, "groups": 4, "arrives": False}
    # P has V's descales, one a token, multiplied in.
    S8U8 = "s8u8", {"qk": Number.S8, "p": Number.U8, "v": Number.S8, "made": True, "groups": 4, "arrives": False}


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
