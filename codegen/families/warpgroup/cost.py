"""A cycle model of the sm90a family. It ranks variants where no measurement exists; nothing it says is a measurement.

One CTA an SM walks its tiles; its warpgroups share the tensor cores and the issue slots. The rates were measured one by
one on an H200. The constants that no microbenchmark gives were fitted to 84 times of whole kernels there (head_dim 64
and 128, pingpong and overlap, 512 to 16,384 keys, with and without mask), which the model then meets within 14%.
"""

from __future__ import annotations

from functools import cache

from codegen.arch import Card
from codegen.cost import Cost, Shape
from codegen.families.warpgroup.derive import ONES, derive
from codegen.variant import Variant

LAUNCH_US = 2.0
FILL_CYCLES = 1_500  # from the launch to the first product: descriptors, first loads
L2_LATENCY = 800  # cycles from a load's issue to its data, loaded L2
L2_BYTES_PER_CYCLE = 32  # what an SM gets when all of them read
MUFU_PER_CYCLE = 16
ISSUE_PER_CYCLE = 128  # thread instructions an SM issues a cycle
ALONE_CYCLES = 14  # by which a matrix instruction is late when no other warpgroup issues any

# More of them for one element of S:
TOKEN_INSTRUCTIONS = 1.0
MASK_INSTRUCTIONS = 4.0

TURN_CYCLES = 300  # a tile's barriers, waits for products, and scalar work on rows
MERGE_CYCLES = 2_000  # of a cluster: exchange through distributed shared memory, two cluster barriers


@cache
def _visited(tile_m: int, tile_n: int, shape: Shape) -> float:
    """KV tiles of an item, on average over the query tiles; a causal item ends with the tile of its last row."""
    tiles = -(-shape.seqlen_k // tile_n)
    if not shape.causal:
        return tiles
    ahead = shape.seqlen_k - shape.seqlen_q
    last = [min(shape.seqlen_q, row + tile_m) for row in range(0, shape.seqlen_q, tile_m)]
    return sum(min(tiles, -(-max(keys + ahead, 0) // tile_n)) for keys in last) / max(1, len(last))


def cost(v: Variant, shape: Shape, card: Card) -> Cost:
    d = derive(v)
    elements = v.tile_m * v.tile_n
    score_rate = card.fp8_f16 if v.softmax.by_code else card.fp8_f32
    tensor = 2 * elements * v.head_dim / score_rate + 2 * elements * v.terms * (v.head_dim + ONES) / card.fp8_f32
    if d.warpgroups == 1:
        tensor += ALONE_CYCLES * d.mma_per_tile
    per_element = v.softmax.instructions[v.family] + (TOKEN_INSTRUCTIONS if v.scaling.per_key else 0.0)
    promotion = v.tile_m * (v.head_dim + ONES)  # one FMA for each element of O
    issue = (elements * per_element + promotion) / ISSUE_PER_CYCLE
    mufu = 0.0 if v.softmax.by_code else elements / MUFU_PER_CYCLE
    l2 = 2 * v.tile_n * v.head_dim / L2_BYTES_PER_CYCLE
    softmax = max(issue, mufu)
    exposed = 1.0 if v.schedule.serial and d.warpgroups == 1 else v.schedule.exposed
    tile_cycles = max(max(tensor, softmax) + exposed * min(tensor, softmax) + TURN_CYCLES, l2)
    # A load is issued stages - 1 tiles ahead.
    tile_cycles += max(0.0, L2_LATENCY - (v.stages - 1) * tile_cycles)

    tiles = _visited(v.tile_m, v.tile_n, shape)
    item = v.schedule.item_cycles + (MASK_INSTRUCTIONS * elements / ISSUE_PER_CYCLE if shape.causal else 0.0)
    if v.cluster.ctas > 1:
        tiles = max(1.0, -(-tiles // v.cluster.ctas))
        item += MERGE_CYCLES
    items = -(-shape.seqlen_q // v.tile_m) * shape.batch_heads
    waves = -(-items // (card.sms // v.cluster.ctas))
    return Cost(
        us=LAUNCH_US + (FILL_CYCLES + waves * (tiles * tile_cycles + item)) / (card.clock * 1e3),
        terms=(("tensor", tensor), ("issue", issue), ("MUFU", mufu), ("L2", l2)),
        resident=1,
        waves=waves,
    )
