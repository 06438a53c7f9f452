"""What kernels of lists of tiles are launched on under compute-sanitizer."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any


def run_blocks(variant: Any) -> Iterator[None]:
    """Launches a kernel of lists of tiles, once a turn: lists of more than 32 tiles and of none, tiles seen in part at
    the ends of rows and keys, lists that batches, heads, rows or keys share, and numbers that lie."""
    import torch

    gpu, masks = importlib.import_module("gpu"), importlib.import_module("fp8cutlass.masks.block_mask")
    calls, card = importlib.import_module("calls"), importlib.import_module("fp8cutlass.call.card")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant.out]
    random = torch.Generator().manual_seed(2)
    for heads, rows, keys, shape in (
        (4, 300, 4500, (2, 4, 300, 4500)),
        (2, 129, 1000, (1, 2, 129, 1)),
        (2, 1, 257, (2, 1, 1, 257)),
        (40, 600, 130, (1, 1, 600, 130)),
    ):
        q, k, v = (
            torch.randn(2, h, tokens, variant.head_dim).to(dtype).cuda()
            for h, tokens in ((heads, rows), (heads // 2, keys), (heads // 2, keys))
        )
        seen = torch.rand(shape, generator=random) < 0.3
        seen[..., : rows // 2, 128:256] = True
        seen[..., :128] &= keys % 2 > 0
        mask = masks.BlockMask.from_dense(seen, keys).to("cuda")
        wild = dataclasses.replace(mask, tiles=mask.tiles * -(2**20), counts=mask.counts + 2**30)
        for given in (mask, dataclasses.replace(mask, bits=None), wild):
            asked = {"scaling": "block", "out_dtype": dtype, "masked": True, "return_amax": False}
            call, tensors = calls.split("half", q=q, k=k, v=v, **asked)
            tensors = tensors._replace(tiles=given.tiles, counts=given.counts, bits=given.bits)
            plan = calls.plan_of(call, variant, gpu.built_manifest())
            card.run_on_card(plan, tensors)
            yield
