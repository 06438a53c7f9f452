"""Kernels that keep K and V of ragged batches in shared memory: the bits of a dense call of each sequence by itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gpu import built_manifest
from residents import kept, kept_of_lengths, made
from test_gpu_resident import CASES, IDS

from fp8cutlass import attention_varlen
from fp8cutlass.choose import resident as choice
from fp8cutlass.dtypes import OUT_DTYPES
from fp8cutlass.manifest import Resident, Variant

MANIFEST = built_manifest()
Lengths = list[tuple[int, int]]  # rows and keys


def ends(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


def batch_of(resident: Resident, lengths: Lengths, heads: int, kv_heads: int, width: int = 0) -> list[torch.Tensor]:
    """q, k and v (tokens, heads, width)."""
    rows, keys = (max(1, sum(n)) for n in zip(*lengths, strict=True))
    return [x[0].transpose(0, 1).contiguous() for x in made(resident, 1, heads, kv_heads, rows, keys, width)]


def expected(
    resident: Resident, variant: Variant, operands: list[torch.Tensor], lengths: Lengths, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = operands
    out = torch.zeros(q.shape[0], q.shape[1], resident.head_dim, dtype=q.dtype, device="cuda")
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device="cuda")
    bottom_right = options.pop("bottom_right", True)
    row = key = 0
    for rows, keys in lengths:
        if rows and keys:
            of = [x.transpose(0, 1)[None] for x in (q[row : row + rows], k[key : key + keys], v[key : key + keys])]
            offset = keys - rows if bottom_right else 0
            found = kept(resident, variant, of, causal_offset=offset, **options)
            out[row : row + rows, :, : q.shape[2]] = found[0][0].transpose(0, 1)
            lse[:, row : row + rows] = found[1][0]
        row, key = row + rows, key + keys
    return out, lse


def assert_same_bits(
    resident: Resident, variant: Variant, operands: list[torch.Tensor], lengths: Lengths, **options: Any
) -> None:
    want = expected(resident, variant, operands, lengths, **options)
    tables = [ends([n[i] for n in lengths]) for i in (0, 1)]
    for _ in range(3):
        found = kept_of_lengths(resident, variant, operands, *tables, **options)
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def random_lengths(most: int, sequences: int, seed: int, most_rows: int = 200) -> Lengths:
    """Some sequences without rows or keys, some with one."""
    of = random.Random(seed)
    return [
        (
            of.choice((0, 1, of.randint(1, most_rows), of.randint(1, most_rows))),
            of.choice((0, 1, most, *(of.randint(1, most),) * 5)),
        )
        for _ in range(sequences)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("resident", "variant"), CASES, ids=IDS)
class TestBits:
    def test_few(self, resident: Resident, variant: Variant) -> None:
        """One sequence, and a few with fewer items than CTAs; both places of the diagonal."""
        for lengths in ([(resident.keys, resident.keys)], [(1, 1)], random_lengths(resident.keys, 5, 1)):
            for bottom_right in (True, False):
                operands = batch_of(resident, lengths, 3, 3)
                assert_same_bits(resident, variant, operands, lengths, bottom_right=bottom_right)

    def test_many(self, resident: Resident, variant: Variant) -> None:
        """So many that each CTA uses its ring and its shared memory several times over."""
        lengths = random_lengths(resident.keys, 150, 2)
        assert_same_bits(resident, variant, batch_of(resident, lengths, 12, 12), lengths)
        assert_same_bits(resident, variant, batch_of(resident, lengths, 12, 4), lengths)

    def test_a_row_tile_each(self, resident: Resident, variant: Variant) -> None:
        """Each warpgroup passes by items that have no row tile for it; between them some that have many."""
        lengths = [(1000 if i % 40 == 20 else 1 + i % 64, 1 + 37 * i % resident.keys) for i in range(300)]
        assert_same_bits(resident, variant, batch_of(resident, lengths, 4, 4), lengths)

    def test_runs_without_rows(self, resident: Resident, variant: Variant) -> None:
        lengths = [(0 if 20 < i < 130 or i % 3 else 65, 0 if 100 < i < 160 else resident.keys) for i in range(200)]
        assert_same_bits(resident, variant, batch_of(resident, lengths, 2, 2), lengths)

    def test_hardly_a_sequence_has_rows(self, resident: Resident, variant: Variant) -> None:
        """Most CTAs find nothing to do, and leave the counters as they were for the next launch."""
        lengths = [(70 if i % 250 == 7 else 0, 3) for i in range(1000)]
        assert_same_bits(resident, variant, batch_of(resident, lengths, 2, 2), lengths)

    def test_columns_and_scale(self, resident: Resident, variant: Variant) -> None:
        lengths = random_lengths(resident.keys, 9, 4)
        operands = batch_of(resident, lengths, 4, 2, resident.head_dim - 24)
        assert_same_bits(resident, variant, operands, lengths, scale=-0.3)

    def test_neighbours_do_not_matter(self, resident: Resident, variant: Variant) -> None:
        """What lies behind a sequence's keys is another's, perhaps large, infinite or NaN."""
        lengths = [(70, resident.keys // 2 + 3), (70, 5), (3, resident.keys)]
        operands = batch_of(resident, lengths, 2, 2)
        begin = lengths[0][1]
        for x, value in zip(operands[1:], (torch.nan, torch.inf), strict=True):
            x[begin : begin + 5] = value
            x[begin + 5 :] *= 1000
        assert_same_bits(resident, variant, operands, lengths)

    def test_tokens_of_no_sequence(self, resident: Resident, variant: Variant) -> None:
        """Lengths that are used in part, and room behind the last sequence: zeros, and an LSE of -inf."""
        lengths, used = [(90, resident.keys), (40, 7), (200, 33)], [(33, 20), (0, 7), (200, 0)]
        operands = [torch.cat([x, x[:77]]) for x in batch_of(resident, lengths, 3, 3)]
        tables = [ends([n[i] for n in lengths]) for i in (0, 1)]
        counts = [torch.tensor([n[i] for n in used], dtype=torch.int32, device="cuda") for i in (0, 1)]
        out, lse = kept_of_lengths(resident, variant, operands, *tables, *counts)
        q, k, v = (x.transpose(0, 1)[None] for x in operands)
        dense = kept(resident, variant, [q[:, :, :33], k[:, :, :20], v[:, :, :20]], causal_offset=20 - 33)
        assert torch.equal(out[:33], dense[0][0].transpose(0, 1)) and torch.equal(lse[:, :33], dense[1][0])
        assert not out[33:].any() and bool((lse[:, 33:] == -torch.inf).all())

    def test_lengths_that_lie(self, resident: Resident, variant: Variant) -> None:
        """They change results; nothing outside of the tensors is read or written, and nobody waits for ever."""
        operands = batch_of(resident, [(300, 400)], 2, 2)
        for table in ([0, -5, 10**9, 3], [500, 100, 2, 900], [0, 300, 600, 900]):
            wrong = torch.tensor(table, dtype=torch.int32, device="cuda")
            out, lse = kept_of_lengths(resident, variant, operands, wrong, wrong)
            assert out.shape[0] == 300 and bool(out.isfinite().all()) and not bool(lse.isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", sorted({r.head_dim for r in MANIFEST.residents}))
def test_calls_take_it(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`attention_varlen` on short sequences, the first call and one that is known: the kernel's bits."""
    (resident, variant) = next((r, v) for r, v in CASES if r.head_dim == head_dim and not v.causal)
    monkeypatch.setitem(choice.MOST_KEYS, (head_dim, False), resident.keys)
    choice.for_lengths.cache_clear()
    lengths = random_lengths(resident.keys, 160, 7)
    operands = batch_of(resident, lengths, 8, 8)
    tables = [ends([n[i] for n in lengths]) for i in (0, 1)]
    want = kept_of_lengths(resident, variant, operands, *tables)
    for _ in range(2):
        found = attention_varlen(
            *operands,
            *tables,
            200,
            resident.keys,
            softmax_scale=0.125,
            out_dtype=OUT_DTYPES[resident.source],
            return_lse=True,
        )
        assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    choice.for_lengths.cache_clear()
