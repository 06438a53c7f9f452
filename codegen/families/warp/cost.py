"""A cycle model of the sm89 family. It ranks variants where no measurement exists; nothing it says is a measurement.

One KV tile of one CTA costs the busiest of five units (tensor cores, shared memory, issue slots, MUFU, L2). CTAs that
share an SM share those units and hide each other's latency; the persistent grid runs in waves.
"""

from __future__ import annotations

from codegen.arch import Card
from codegen.cost import Cost, Shape
from codegen.families.warp.derive import derive
from codegen.variant import Variant

LAUNCH_US = 2.0
L2_LATENCY = 700  # cycles from a cp.async to its data, loaded L2
BARRIER = 60  # cycles a block-wide barrier and its skew cost
# What an SM gets from L2 when all of them read: published microbenchmarks of Ada, not measured here.
L2_BYTES_PER_CYCLE = 16
SMEM_BYTES_PER_CYCLE = 128
MUFU_PER_CYCLE = 16
ISSUE_PER_CYCLE = 4 * 32  # thread instructions an SM issues a cycle


def cost(v: Variant, shape: Shape, card: Card) -> Cost:
    d = derive(v)
    elements = v.tile_m * v.tile_n
    # Integers have the rate of f16 sums everywhere.
    score_rate = card.fp8_f32 if v.score == "f32" else card.fp8_f16
    value_rate = card.fp8_f16 if v.dtype.p.integer else card.fp8_f32
    columns = v.head_dim + (0 if v.softmax.by_byte else 8)  # of P V, and of the row sums
    tensor = 2 * elements * v.head_dim / score_rate + 2 * elements * v.terms * columns / value_rate
    tile_bytes = v.tile_n * v.head_dim
    reads = v.warps * 2 * tile_bytes + (0 if d.q_in_registers else v.tile_m * v.head_dim)
    smem = (reads + 2 * tile_bytes) / SMEM_BYTES_PER_CYCLE
    per_element = v.softmax.instructions[v.family] + (1.0 if v.scaling.per_key else 0.0)
    promotion = v.tile_m * v.head_dim * (1 + v.dtype.p.integer)  # an FMA an element of O, of integers a conversion
    matrix = d.mma_per_tile * v.warps * 32 * 1.5  # with the ldmatrix that feed them
    per_row = 40 * v.tile_m * 4  # maxima, weights: four lanes share a row
    issue = (elements * per_element + promotion + matrix + per_row) / ISSUE_PER_CYCLE
    mufu = 0.0 if v.softmax.by_code else elements / MUFU_PER_CYCLE
    l2 = 2 * tile_bytes / L2_BYTES_PER_CYCLE
    busy = max(tensor, smem, issue, mufu, l2)

    barriers = 4 if v.stages == 1 else 1
    # One CTA by itself overlaps little: products, then softmax, then products.
    alone = tensor + issue + barriers * BARRIER
    m_tiles = -(-shape.seqlen_q // v.tile_m)
    items = m_tiles * shape.batch_heads
    resident = max(1, min(d.ctas_per_sm, -(-items // card.sms)))
    tile_cycles = max(resident * busy, alone)
    # A load is issued stages - 1 tiles ahead (with one stage: half a tile ahead).
    ahead = max(v.stages - 1, 0.5) * tile_cycles
    latency = max(0.0, L2_LATENCY - ahead)
    kv_tiles = -(-shape.seqlen_k // v.tile_n)
    visited = kv_tiles * (shape.seqlen_q + v.tile_m) / (2 * shape.seqlen_q) if shape.causal else kv_tiles
    tiles = max(1.0, visited)
    waves = -(-items // (card.sms * resident))
    cycles = waves * (tiles * (tile_cycles + latency) + v.schedule.item_cycles + L2_LATENCY)
    return Cost(
        us=LAUNCH_US + cycles / (card.clock * 1e3),
        terms=(("tensor", tensor), ("shared-memory", smem), ("issue", issue), ("MUFU", mufu), ("L2", l2)),
        resident=resident,
        waves=waves,
    )
