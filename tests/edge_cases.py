"""The edge cases that attention has to survive, by number, and what of each no test covers yet.

A test claims a case with ``@pytest.mark.edge(number)``; ``pytest --edge-table FILE`` writes what became of each.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """``text`` says what happens and what is right; ``open`` what the marked tests leave out."""

    text: str
    open: str = ""


RACES = "all kernels: scripts/sanitize.py, outside of pytest"
CASES = {
    1: Case("keys end inside a tile, NaN bytes behind K and V: the bits of the clean call"),
    2: Case("queries end inside a tile, NaN behind Q: nothing beyond O is written"),
    3: Case("lengths from 1 to 1023 on either side of every tile, queries and keys apart"),
    4: Case("no keys: O is 0, the LSE -inf"),
    5: Case("no queries, batches or heads: an empty result and no launch"),
    6: Case("causal rows before the first key: O is exactly 0, the LSE -inf"),
    7: Case("causal with unequal lengths: the documented alignment, as an explicit mask has it"),
    8: Case("a causal mask that hides whole tiles, the first or the last: no NaN"),
    9: Case("a NaN on one side of a comparison: the helpers of the tests fail"),
    10: Case("every logit of a row far below -50,000: still a softmax, as what is masked is a true -inf", "on a card"),
    11: Case("logits of a million, scales that overflow float32: finite wherever float64 is"),
    12: Case("a row maximum that rises in every tile: right, and P does not saturate"),
    13: Case("one hot key over thousands of small ones, V = 1: their mass is not lost"),
    14: Case("uniform attention over a constant V: the constant, within 2^-8", "equal probabilities on a card"),
    15: Case("one-hot attention: the row of V, exact after rounding"),
    16: Case("32k, 128k and 160k + 1 keys: a needle is found, the z-test and its mean hold", "160k + 1 keys on a card"),
    17: Case("more than 2^31 elements in one contiguous tensor"),
    18: Case("views whose rows lie more than 2^31 bytes apart: 64-bit offsets everywhere"),
    19: Case("strides and sizes beyond what a tensor map can describe: served by a copy or refused"),
    20: Case("more than 65,535 batches, heads, their product or query tiles"),
    21: Case("a launch that fails: an error each time"),
    22: Case("a card for which nothing is built: an error that names it and what is built"),
    23: Case("head_dim without kernels: padded where declared, refused with the list otherwise"),
    24: Case("grouped queries: ratios 3, 5, 7, 8 and 16; heads that do not divide are refused"),
    25: Case("batch, heads, tokens or head_dim that disagree: an error with both tensors and their shapes"),
    26: Case("dtypes that are mixed or not served: refused"),
    27: Case("a last dimension that is not contiguous: a documented copy"),
    28: Case("transposed, sliced, gapped and expanded views: the bits of contiguous operands"),
    29: Case("any stride in a dimension of size 1"),
    30: Case("base addresses 1, 2, 4 or 8 bytes off 16: a copy, and the same bits"),
    31: Case("row pitches that are no multiple of 16 bytes: a copy, never a hang"),
    32: Case("stores of whole tiles past the last column: guard bytes stay"),
    33: Case("out= of another shape, dtype or device, expanded, or over an input: refused"),
    34: Case("a second call leaves the first result alone"),
    35: Case("memory that held NaN is written in full"),
    36: Case("tensors on another card than the current one: served there, and the current card stays"),
    37: Case("operands or descales on different devices: refused"),
    38: Case("kernels that opt in to more shared memory, on a second card too"),
    39: Case("threads that make the first call of a process at once"),
    40: Case("a stream that is not the default one, its producer still running"),
    41: Case("eight streams at once: the bits of serial calls"),
    42: Case("a CUDA graph replayed a hundred times with new values: the bits of eager calls"),
    43: Case("graphs of several batch sizes in any order, descales as tensors"),
    44: Case("a thousand runs: the same bits, also with injected delays and beside another process"),
    45: Case("generic writes to shared memory before asynchronous reads: a proxy fence between"),
    46: Case("lanes that store before one of them arrives on a barrier: a warp-level barrier between"),
    47: Case("scratch of a reduction used again: a barrier between", RACES),
    48: Case("fewer work items than multiprocessors, as many, and twice as many and one: no hang"),
    49: Case("a row in another batch or among other queries: the same bits for a pinned kernel"),
    50: Case(
        "descales of 0, below 0, NaN, infinite, denormal or huge: refused as numbers; as tensors, what is stated",
        "tensors on a card",
    ),
    51: Case("zeros everywhere, or in one block: descale 1, zeros, no NaN"),
    52: Case("magnitudes so small that the inverse of a descale would overflow"),
    53: Case("values beyond 448 after a caller's scale: saturated alike on both devices"),
    54: Case("a NaN or infinity in one row of Q, K or V: only the rows that see it", "on a card"),
    55: Case("descales of the wrong shape: an error with the expected one"),
    56: Case("features that are not there, a mask, dropout, gradients: refused by name"),
    57: Case("torch.compile, fake tensors, opcheck: several batches, lengths off every tile"),
    58: Case("python -O: every check is still there"),
    59: Case("the FP8 kernels run FP8 instructions, counted in the machine code"),
    60: Case("another optimisation level or assembler: the z-test still holds"),
}
