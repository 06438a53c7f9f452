"""What a model expects of attention over several cards: from rates of products, of links and of memory alone.

The rates are those of one H200 and of links by their data sheets, less a part that exchanges lose. It was made before
anything ran on more than one card.
"""

from __future__ import annotations

from dataclasses import dataclass

GATHER, RING, ULYSSES = "gather", "ring", "ulysses"
NODE = 8  # cards that share NVLink
NVLINK, NIC = 450e9 * 0.8, 50e9 * 0.9  # bytes a second that one card sends, inside a node and between nodes
MEMORY = 4e12  # bytes a second, read and written
RATES = {64: 1100e12, 128: 1350e12}  # useful FLOP a second, by head_dim
BUSY_LOSS = 0.1  # of the time that a link is busy, lost to the SMs of the exchange
HEAD_GROUPS = 4
MERGE_BYTES = 18  # an element of a partial result, by torch operations
PACKED, HALF = 1.02, 2.0  # bytes an element on the wire: e4m3 with descales, bf16


@dataclass(frozen=True)
class Problem:
    """One sequence on ``ranks`` cards."""

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def flop(self) -> float:
        """Of all cards, that the mask leaves."""
        return 4.0 * self.heads * self.tokens**2 * self.head_dim * (0.5 if self.causal else 1.0)

    @property
    def keys(self) -> float:
        """Elements of K and V of one card."""
        return 2.0 * self.kv_heads * self.tokens * self.head_dim / self.ranks

    @property
    def rows(self) -> float:
        """Elements of Q of one card."""
        return float(self.heads) * self.tokens * self.head_dim / self.ranks


def seconds(p: Problem, method: str, wire: float = PACKED, rate: float = 1.0) -> float:
    """Of one call; ``wire`` bytes an element of K and V, products at ``rate`` times ours."""
    products = p.flop / p.ranks / (RATES.get(p.head_dim, RATES[128]) * rate)
    pack = (HALF + PACKED) * p.keys / MEMORY
    if p.ranks == 1:
        return products + pack
    inside = min(p.ranks, NODE)
    outside = p.ranks // inside
    if method == ULYSSES:
        exchange = (inside - 1) / inside * (HALF * 2 * p.rows + wire * p.keys) / NVLINK
        passes = 4 * HALF * (2 * p.rows + p.keys) / MEMORY  # permutes, two each way
        if outside == 1:
            return products + pack + exchange + passes
        # Ulysses in the node, all-gather of what the nodes have between them.
        between = (outside - 1) * wire * p.keys / NIC
        return pack + exchange + passes + _overlapped(products, between, HEAD_GROUPS)
    if method == GATHER:
        # What other nodes have comes over all links of the node together.
        link = max((p.ranks - 1) * wire * p.keys / NVLINK, (outside - 1) * wire * p.keys / NIC)
        return pack + _overlapped(products, link, HEAD_GROUPS)
    step = wire * p.keys / (NVLINK if outside == 1 else NIC)
    merge = MERGE_BYTES * p.rows / MEMORY
    each = products / p.ranks
    busy = each + BUSY_LOSS * min(step, each)
    return pack + each + (p.ranks - 1) * (max(busy, step) + merge)


def _overlapped(products: float, link: float, groups: int) -> float:
    """The first group's exchange, then each group's products beside the exchange of the next."""
    each, wire = products / groups, link / groups
    return wire + (groups - 1) * max(each + BUSY_LOSS * min(wire, each), wire) + each


def efficiency(p: Problem, method: str, wire: float = PACKED, rate: float = 1.0) -> float:
    """Time of one card over ``ranks`` times that of all."""
    alone = Problem(1, p.tokens, p.heads, p.kv_heads, p.head_dim, p.causal)
    return seconds(alone, method, wire, rate) / (p.ranks * seconds(p, method, wire, rate))


CASES = {"video DiT, 40 x 128, full": (40, 40, 128, False), "LLM, 64/8 x 128, causal": (64, 8, 128, True)}
RANKS, TOKENS = (2, 4, 8, 16, 64), (32768, 131072, 1048576)


def table() -> str:
    """Efficiency in percent, with e4m3 on the wire and in brackets with bf16, as Markdown."""
    sizes = {32768: "32k", 131072: "131k", 1048576: "1M"}
    head = ["", "cards", *(f"{sizes[n]}: {m}" if m == GATHER else m for n in TOKENS for m in (GATHER, RING, ULYSSES))]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, (heads, kv_heads, head_dim, causal) in CASES.items():
        for ranks in RANKS:
            cells = []
            for tokens in TOKENS:
                p = Problem(ranks, tokens, heads, kv_heads, head_dim, causal)
                for method in (GATHER, RING, ULYSSES):
                    ours, bf16 = (round(100 * efficiency(p, method, wire)) for wire in (PACKED, HALF))
                    cells.append(f"{ours} ({bf16})")
            lines.append("| " + " | ".join([name if ranks == RANKS[0] else "", str(ranks), *cells]) + " |")
    return "\n".join(lines)
