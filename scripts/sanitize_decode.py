"""What kernels of decode are launched on under compute-sanitizer."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from typing import Any


def decode_batches(head_dim: int, rows: int, tile: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Batches of tests/decode_host.py and how they are launched. With the CTAs of one multiprocessor every slot of a
    warp is used more than twice, and units are shared by a few; with all of them by many. Bytes of no key are NaN."""
    import torch

    host = importlib.import_module("decode_host")
    many, group = 11 * tile + 37, 4
    lengths, queries = (many, 0, 1, tile, 130), [1, 2, 1, rows // group + 1, 0]

    def of(lengths: Sequence[int], queries: Sequence[int], page_size: int = 16, kv_heads: int = 2, **rest: Any) -> Any:
        return host.batch(lengths, list(queries), (kv_heads * group, kv_heads), head_dim, page_size, **rest)

    plain, random = of(lengths, queries), torch.Generator().manual_seed(9)
    yield plain, {"sms": 1}
    yield plain, {"sms": 1, "share": False}
    yield of((90 * tile,), [1], 64), {}  # merged by many
    yield of((5 * tile,) * 8, [1] * 8), {"sms": 2}  # whole units, some sequences apart
    yield of(lengths, queries, left=tile + 5, right=1), {"sms": 1}
    yield of(lengths, queries, 1, left=3, dtype=torch.float16, softcap=2.0, sinks=torch.linspace(-1, 9, 8)), {"sms": 1}
    yield of((3,) * 1100, [1] * 1100, 48, 1), {}  # more sequences than the cut takes at once
    pages = {"k_token": torch.rand(plain.k.shape[:3], generator=random) + 0.5}
    pages |= {"v_page": torch.rand(plain.k.shape[0], 2, generator=random) + 0.5}
    yield dataclasses.replace(plain, **pages), {"sms": 1}
    hit = of(lengths, queries, seed=3)  # a NaN in V that not all rows of a unit see
    page, token = divmod(tile - 1, 16)
    hit.v[int(hit.table[3, page]), token, 0, 5] = 0x7F
    yield hit, {"sms": 1}
    for wild in (2**31 - 1, -(2**31)):  # clamped: nothing outside the tensors is touched
        numbers = {"table": torch.full_like(plain.table, wild), "lengths": plain.lengths.clone()}
        numbers["lengths"][1::2] = wild
        yield dataclasses.replace(plain, **numbers, **pages), {"sms": 1}
        ends = torch.tensor([-5, wild, 3, wild, 2, wild], dtype=torch.int32)
        yield dataclasses.replace(plain, cu_q=ends), {"sms": 1}


def run_decode(kernel: Any) -> Iterator[None]:
    """Launches a kernel of decode after the one that cuts its work, once a turn. Results stay on the card: of wild ends
    they are written in part."""
    card = importlib.import_module("decode_card")
    for batch, options in decode_batches(kernel.head_dim, kernel.rows, kernel.tile):
        launcher = card.Launcher(card.on_card(batch), kernel, **options)
        launcher.attend(launcher.cut())
        yield
