"""``BlockMask``: what is packed is what was meant, whatever it was made from; lists name the tiles that it needs."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.utils import _pytree as pytree

from fp8cutlass import BlockMask, UnsupportedError
from fp8cutlass.masks import bits as module
from fp8cutlass.masks.bits import TILE, pack, unlisted


def dense(shape: tuple[int, ...], density: float, seed: int = 0) -> torch.Tensor:
    """A random mask."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


def tiles_by_hand(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of (B, H, rows, keys) which tiles have a key that is seen, and which of these one that is not."""
    some, part = [], []
    for rows in seen.split(TILE, 2):
        cells = rows.split(TILE, 3)
        some.append(torch.stack([x.any(-1).any(-1) for x in cells], -1))
        part.append(torch.stack([x.any(-1).any(-1) & ~x.all(-1).all(-1) for x in cells], -1))
    return torch.stack(some, 2), torch.stack(part, 2)


SHAPES = [(2, 3, 200, 300), (1, 1, 1, 300), (1, 1, 128, 128), (1, 2, 5, 7), (2, 1, 257, 129)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.5, 0.999, 1.0])
def test_bits_and_lists_are_those_of_the_mask(shape: tuple[int, ...], density: float) -> None:
    """A bit in the wrong place, or a tile that is left out or taken for whole, would hide or show keys."""
    seen = dense(shape, density)
    mask = BlockMask.from_dense(seen)
    assert mask.shape == shape
    assert torch.equal(mask.dense(), seen)
    some, part = unlisted(mask.tiles, mask.counts)
    want, parts = tiles_by_hand(seen)
    assert torch.equal(some, want) and torch.equal(part, parts)
    entries = mask.tiles.masked_fill(torch.arange(mask.tiles.shape[3]) >= mask.counts[..., None], 1 << 30)
    assert bool((entries.diff(dim=-1) >= 0).all()), "tiles come in order"


PLACES = [(0, 0, 0, 0, 0, 0), (3, 1, 5, 6, 3, 1), (7, 1, 7, 15, 3, 1), (2, 0, 4, 9, 1, 0)]


def test_a_word_is_what_a_thread_reads() -> None:
    """Kernels read bits by the lane of an accumulator: row 16 w + 8 h + g, key 8 n + 2 q + c."""
    for warp, half, group, n, quad, c in (
        (0, 0, 0, 0, 0, 0),
        (3, 1, 5, 6, 3, 1),
        (7, 1, 7, 15, 3, 1),
        (2, 0, 4, 9, 1, 0),
    ):
        seen = torch.zeros(128, 128, dtype=torch.bool)
        seen[16 * warp + 8 * half + group, 8 * n + 2 * quad + c] = True
        words = pack(seen[None, None], 128).bits.view(8, 8, 4, 2)
        place, word = (warp, group, quad, half), (1 << 2 * n + c) - (1 << 32) * (2 * n + c == 31)
        assert int(words[place]) == word and int((words != 0).sum()) == 1


def test_rows_are_packed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dense((1, 2, 700, 130), 0.3)
    monkeypatch.setattr(module, "MOST_CELLS", 2 * 130 * 256)
    assert torch.equal(BlockMask.from_dense(seen).dense(), seen)


def test_what_is_shared_takes_no_memory() -> None:
    """An expanded mask of 40 layers' heads is one mask."""
    seen = dense((1, 1, 1, 500), 0.5)
    mask = BlockMask.from_dense(seen.expand(8, 16, 384, 500))
    assert mask.shape == (1, 1, 1, 500) and mask.bits is not None and mask.bits.shape == (1, 1, 1, 4, 512)
    rows = BlockMask.from_dense(dense((2, 1, 300, 1), 0.5), keys=1000)
    assert rows.bits is not None and rows.bits.shape == (2, 1, 3, 1, 512) and rows.tiles.shape == (2, 1, 3, 8)
    assert torch.equal(rows.dense(), dense((2, 1, 300, 1), 0.5).expand(2, 1, 300, 1000))
    assert rows.dense().shape == rows.shape


def test_views_are_read_by_their_strides() -> None:
    base = dense((300, 2, 200), 0.5)
    seen = base.permute(1, 2, 0)[None, :, ::2, 3:]
    assert torch.equal(BlockMask.from_dense(seen).dense(), seen)


IDS = torch.tensor([[0] * 100 + [1] * 30 + [2] * 170, [5] * 200 + [1] * 100])
LENGTHS = torch.tensor([0, 130, 300])
ROW, KEY = torch.arange(200)[:, None], torch.arange(300)[None]
MADE: dict[str, tuple[Callable[[], BlockMask], torch.Tensor]] = {
    "padding": (lambda: BlockMask.padding(LENGTHS, 300), (KEY[None] < LENGTHS[:, None, None])[:, None]),
    "documents": (lambda: BlockMask.documents(IDS), (IDS[:, :, None] == IDS[:, None])[:, None]),
    "documents of keys": (
        lambda: BlockMask.documents(IDS[:, :200], IDS),
        (IDS[:, :200, None] == IDS[:, None])[:, None],
    ),
    "causal": (lambda: BlockMask.window(200, 300, right=0), (KEY <= ROW)[None, None]),
    "window": (lambda: BlockMask.window(200, 300, 20, 3), ((KEY >= ROW - 20) & (KEY <= ROW + 3))[None, None]),
    "window at the right": (
        lambda: BlockMask.window(200, 300, 150, -1, bottom_right=True),
        (KEY >= ROW + 100 - 150)[None, None],
    ),
    "no window": (lambda: BlockMask.window(200, 300), torch.ones(1, 1, 200, 300, dtype=torch.bool)),
    "prefix": (
        lambda: BlockMask.prefix(LENGTHS, 200, 300),
        ((KEY[None] < LENGTHS[:, None, None]) | (KEY <= ROW))[:, None],
    ),
    "prefix at the right": (
        lambda: BlockMask.prefix(LENGTHS, 200, 300, bottom_right=True),
        ((KEY[None] < LENGTHS[:, None, None]) | (KEY <= ROW + 100))[:, None],
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_masks_that_follow_from_numbers(name: str) -> None:
    make, want = MADE[name]
    mask = make()
    assert torch.equal(mask.dense(), want)
    assert mask.shape == want.shape
    some, part = unlisted(mask.tiles, mask.counts)
    by_hand = tiles_by_hand(want)
    assert torch.equal(some, by_hand[0]) and torch.equal(part, by_hand[1])


def test_a_tree_sees_its_ancestors_and_what_came_before() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 3, 2, 4], [-1, 0, 1, 2, 3, 4, 5]])
    seen = BlockMask.tree(parents, 140).dense()
    for b, row in enumerate(parents.tolist()):
        for i in range(7):
            above, at = {i}, i
            while row[at] >= 0:
                at = row[at]
                above.add(at)
            assert set(seen[b, 0, i].nonzero().flatten().tolist()) == {*range(133), *(133 + j for j in above)}


@pytest.mark.parametrize("block", [128, 64, (128, 64), (32, 128), (256, 384), (100, 48)], ids=str)
def test_blocks(block: Any) -> None:
    """Blocks of whole tiles have no bits, others do."""
    rows, keys = 500, 700
    sizes = (block, block) if isinstance(block, int) else block
    bitmap = dense((2, 3, -(-rows // sizes[0]), -(-keys // sizes[1])), 0.4)
    want = bitmap.repeat_interleave(sizes[0], 2)[:, :, :rows].repeat_interleave(sizes[1], 3)[..., :keys]
    mask = BlockMask.blocks(bitmap, rows, keys, block)
    assert torch.equal(mask.dense(), want)
    assert (mask.bits is None) == (sizes[0] % 128 == 0 and sizes[1] % 128 == 0)
    assert torch.equal(mask.visited(), tiles_by_hand(want)[0])
    across = bitmap.shape[3]
    indices = torch.argsort(~bitmap, dim=-1, stable=True)
    counts = bitmap.sum(-1)
    for order in (indices, torch.where(torch.arange(across) < counts[..., None], indices, 999)):
        listed = BlockMask.block_lists(order.int(), counts.int(), rows, keys, block)
        assert torch.equal(listed.dense(), want)


def test_one_row_of_blocks_for_all_rows() -> None:
    mask = BlockMask.blocks(dense((4, 1, 5), 0.5), 900, 600)
    assert mask.shape == (1, 4, 1, 600)
    assert torch.equal(mask.dense()[0, :, 0], dense((4, 1, 5), 0.5)[:, 0].repeat_interleave(128, 1)[:, :600])


@pytest.mark.parametrize("size", [128, 64])
def test_masks_of_flex_attention(size: int) -> None:
    """Its mask_mod is asked in part blocks, not in whole ones or those that are left out."""
    document = IDS

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (document[b, q] == document[b, k]) & (q >= k - 10 * h)

    made = flex_attention.create_block_mask(mod, 2, 3, 300, 300, device="cpu", BLOCK_SIZE=size)
    want = flex_attention.create_mask(mod, 2, 3, 300, 300, device="cpu")
    mask = BlockMask.flex(made)
    assert torch.equal(mask.dense(), want)
    assert mask.shape == (2, 3, 300, 300)
    holes = flex_attention.BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32),
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q, k: k % 2 == 0,
    )
    seen = BlockMask.flex(holes).dense()
    assert not bool(seen[0, 0, :128, :128].any()) and bool(seen[0, 0, :128, 128::2].all())
    assert not bool(seen[..., 1::2].any()) and bool(seen[0, 0, 128:, ::2].all())


def test_both_and_either() -> None:
    """Documents with a causal mask are made of two; sizes of 1 broadcast."""
    one, other = dense((2, 1, 200, 300), 0.5, 1), dense((1, 3, 200, 300), 0.5, 2)
    line, column = dense((1, 1, 1, 300), 0.5, 3), dense((1, 1, 200, 1), 0.5, 4)
    bitmap = dense((1, 1, 2, 3), 0.5, 5)
    blocky = bitmap.repeat_interleave(128, 2)[:, :, :200].repeat_interleave(128, 3)[..., :300]
    masks = [
        (one, BlockMask.from_dense(one)),
        (other, BlockMask.from_dense(other)),
        (line, BlockMask.from_dense(line)),
        (column.expand(1, 1, 200, 300), BlockMask.from_dense(column, 300)),
        (blocky, BlockMask.blocks(bitmap, 200, 300)),
    ]
    for i, (seen, mask) in enumerate(masks):
        for more, others in masks[i:]:
            for got, want in ((mask & others, seen & more), (mask | others, seen | more)):
                assert torch.equal(got.dense(), want)
                assert all(map(torch.equal, unlisted(got.tiles, got.counts), tiles_by_hand(want)))


def test_counted() -> None:
    assert BlockMask.window(512, 512, right=0).counted() == (6, 4, 6)
    assert BlockMask.blocks(torch.eye(4, dtype=torch.bool), 512, 512).counted() == (12, 0, 4)


def test_a_node_of_pytrees_that_is_saved_and_moved() -> None:
    for mask in (BlockMask.documents(IDS), BlockMask.blocks(torch.eye(4, dtype=torch.bool), 512, 512)):
        leaves, spec = pytree.tree_flatten(mask)
        again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
        buffer = io.BytesIO()
        torch.save(mask, buffer)
        buffer.seek(0)
        for other in (again, torch.load(buffer), mask.to("cpu")):
            assert other.shape == mask.shape and torch.equal(other.dense(), mask.dense())
        assert mask.to("meta").device.type == "meta" and "BlockMask((" in repr(mask)


def test_made_under_compile() -> None:
    """Nothing is waited for, and one graph serves all lengths."""
    torch._dynamo.reset()

    def make(ids: torch.Tensor) -> list[torch.Tensor]:
        mask = BlockMask.documents(ids)
        return [mask.tiles, mask.counts]

    compiled = torch.compile(make, fullgraph=True, backend="eager", dynamic=True)
    for ids in (IDS, IDS[:, :270]):
        assert all(map(torch.equal, compiled(ids), make(ids)))


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: BlockMask.from_dense(torch.ones(3, 3)), "mask must be a boolean tensor.*float32"),
    (lambda: BlockMask.from_dense(torch.ones(1, 1, 1, 3, 3, dtype=torch.bool)), "1 to 4 dimensions"),
    (lambda: BlockMask.from_dense([True]), "list"),  # type: ignore[arg-type]
    (lambda: BlockMask.from_dense(torch.ones(3, 3, dtype=torch.bool), 4), "3 keys, got keys=4"),
    (lambda: BlockMask.padding(torch.tensor([3, 9]), 8), "lengths must lie in 0..8, got 3 to 9"),
    (lambda: BlockMask.padding(torch.tensor([3.0]), 8), "lengths must be of integers.*float32"),
    (lambda: BlockMask.padding(torch.tensor([3]), -1), "keys must be a number of tokens, got -1"),
    (lambda: BlockMask.documents(IDS[0, 0]), "ids must be of integers with 1 or 2 dimensions"),
    (lambda: BlockMask.documents(IDS, torch.zeros(3, 5, dtype=torch.int64)), "share batches and device"),
    (lambda: BlockMask.window(3, 3, -2), "left must be an integer from -1 up, got -2"),
    (lambda: BlockMask.prefix(torch.tensor([-1]), 3, 3), "lengths must lie in 0..3"),
    (lambda: BlockMask.tree(torch.tensor([-1, 2]), 5), "parents must lie in -1..1, got -1 to 2"),
    (lambda: BlockMask.tree(torch.tensor([-1, 0]), 1), "2 nodes.*keys=1"),
    (lambda: BlockMask.blocks(torch.ones(2, 3), 200, 300), "bitmap must be boolean"),
    (lambda: BlockMask.blocks(torch.ones(2, 2, dtype=torch.bool), 200, 300), "2 x 2 blocks.*are 2 x 3"),
    (lambda: BlockMask.blocks(torch.ones(2, 3, dtype=torch.bool), 200, 300, 0), "block must be.*got 0"),
    (lambda: BlockMask.block_lists(IDS, IDS, 200, 300), "counts must have the shape of indices"),
    (
        lambda: BlockMask.block_lists(torch.tensor([[0, 3], [1, 0]]), torch.tensor([2, 1]), 200, 300),
        "indices must lie in 0..2, got 0 to 3",
    ),
    (
        lambda: BlockMask.block_lists(torch.tensor([[0, 1], [1, 0]]), torch.tensor([3, 1]), 200, 300),
        "counts must lie in 0..2",
    ),
    (lambda: BlockMask.flex(torch.ones(3)), "flex_attention.BlockMask, got Tensor"),
    (lambda: BlockMask.window(3, 4) & BlockMask.window(3, 5), "equal keys"),
    (lambda: BlockMask.window(3, 4) | BlockMask.window(2, 4), "broadcast to one shape"),
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_is_refused_by_name(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        make()


def test_another_object_joins_with_nothing() -> None:
    with pytest.raises(TypeError):
        BlockMask.window(3, 3) & torch.ones(3, 3, dtype=torch.bool)  # type: ignore[operator]


def test_nothing_to_see() -> None:
    """Empty tensors make empty masks."""
    for rows, keys in ((0, 5), (5, 0)):
        mask = BlockMask.from_dense(torch.ones(2, 1, rows, keys, dtype=torch.bool))
        assert mask.shape == (2, 1, rows, keys) and mask.counted() == (0, 0, 0)
