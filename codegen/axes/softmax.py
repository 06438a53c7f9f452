"""How P comes from scores, and the precisions that a caller may ask for."""

from __future__ import annotations

from codegen.axes.axis import Axis


class Softmax(Axis):
    """score: accumulator of Q K^T, s32 for 8-bit integers.
    terms: e4m3 numbers whose sum is a P; each takes a product with V and one with ones.

    bent: the code is bent inside an octave, as 2^x is, which takes a few registers more.
    rare: few calls have it, so that a class of problems gets fewer kernels.
    instructions: of a thread for one element of S, by family: scale, maximum, exponential or code, conversion. Read off
    SASS, but for `quadratic` of sm89, which has no kernel: that is by its source.
    text: what the head comment of a kernel says.
    """

    score: str
    terms: int
    bent: bool
    rare: bool
    instructions: dict[str, float]
    text: str

    EXP2 = (
        "exp2",
        {
            "score": "f32",
            "terms": 1,
            "bent": False,
            "rare": False,
            "instructions": {"sm89": 4.5, "sm90a": 6.5},
            "text": "exponential softmax on float32 scores",
        },
    )
    EXP2X2 = (
        "exp2x2",
        {
            "score": "f32",
            "terms": 2,
            "bent": False,
            "rare": True,
            "instructions": {"sm89": 7.25, "sm90a": 9.25},
            "text": "exponential softmax on float32 scores, P in two terms",
        },
    )
    LINEAR = (
        "linear",
        {
            "score": "f16",
            "terms": 1,
            "bent": False,
            "rare": False,
            "instructions": {"sm89": 2.0, "sm90a": 3.6},
            "text": "code-domain softmax on f16 scores",
        },
    )
    QUADRATIC = (
        "quadratic",
        {
            "score": "f16",
            "terms": 1,
            "bent": True,
            "rare": True,
            "instructions": {"sm89": 4.0, "sm90a": 5.6},
            "text": "code-domain softmax on f16 scores, bent inside an octave",
        },
    )

    CODES = (
        "codes",
        {
            "score": "s32",
            "terms": 1,
            "bent": False,
            "rare": True,
            "instructions": {"sm89": 3.8, "sm90a": 4.6},
            "text": "code-domain softmax on s32 scores",
        },
    )
    BYTES = (
        "bytes",
        {
            "score": "s32",
            "terms": 1,
            "bent": False,
            "rare": True,
            "instructions": {"sm89": 8.0},
            "text": "exponential softmax on s32 scores, P in u8 with V's descales multiplied in",
        },
    )

    @property
    def by_code(self) -> bool:
        """Whether P comes from scores by its e4m3 code, without an exponential."""
        return self.score != "f32" and not self.by_byte

    @property
    def by_byte(self) -> bool:
        """Whether P is u8, relative to the largest that its keys add to O."""
        return self is Softmax.BYTES

    @property
    def exact(self) -> bool:
        """Whether scores are sums of integers."""
        return self.score == "s32"

    @property
    def narrow(self) -> bool:
        """Whether scores are f16, which operands of any range would overflow."""
        return self.score == "f16"

    @property
    def score_registers(self) -> int:
        """Of four scores."""
        return 2 if self.narrow else 4


class Precision(Axis):
    """What a caller asks for. softmaxes: what serves it, the preferred one first.

    New ones come last, as callers of the table name a precision by its position.
    """

    softmaxes: tuple[Softmax, ...]

    FAST = "fast", {"softmaxes": (Softmax.LINEAR, Softmax.EXP2)}
    ACCURATE = "accurate", {"softmaxes": (Softmax.EXP2,)}
    HIGH = "high", {"softmaxes": (Softmax.EXP2X2,)}
    BALANCED = "balanced", {"softmaxes": (Softmax.QUADRATIC, Softmax.EXP2)}
    INT8 = "int8", {"softmaxes": (Softmax.CODES,)}
    INT8_FULL = "int8_full", {"softmaxes": (Softmax.BYTES,)}
