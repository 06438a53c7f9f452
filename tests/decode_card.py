"""Decode kernels on a card, launched by their number: the batches of tests/decode_host.py, moved there."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from decode_host import FAR, Batch, Result
from gpu import built_manifest

from fp8cutlass.choose.target import target
from fp8cutlass.manifest import Decode
from fp8cutlass.native import decode


def on_card(b: Batch) -> Batch:
    """The same batch there."""
    moved = {f.name: x.cuda() for f in fields(b) if isinstance(x := getattr(b, f.name), torch.Tensor)}
    return replace(b, **moved)


@dataclass(frozen=True)
class Launcher:
    """A kernel and a batch on the card. ``sms``: whose CTAs take part; 0: those of all multiprocessors."""

    batch: Batch
    kernel: Decode
    share: bool = True
    sms: int = 0

    def cut(self) -> decode.Work:
        b, ends = self.batch, self._ends
        sizes: dict[str, Any] = {
            "tokens": b.q.shape[0], "most_keys": b.table.shape[1] * b.k.shape[1], "heads": b.q.shape[1],
            "kv_heads": b.k.shape[2], "left": ends[0], "right": ends[1], "share": self.share,
        }  # fmt: skip
        number = built_manifest().decodes.index(self.kernel)
        sms = self.sms or target(torch.device("cuda")).sm_count
        return decode.cut(self.kernel, number, sms, b.lengths, b.cu_q, **sizes)

    def attend(self, work: decode.Work, lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Out (tokens, H, D) and the LSE (H, tokens), on the card."""
        b, ends = self.batch, self._ends
        caches = decode.Caches(b.k, b.v, b.k_descale, b.v_descale, b.k_token, b.v_page)
        return decode.attend(
            work, b.q, caches, b.table, b.lengths, b.cu_q, scale=b.scale, left=ends[0], right=ends[1],
            softcap=b.softcap, sinks=b.sinks, return_lse=lse,
        )  # fmt: skip

    @property
    def _ends(self) -> tuple[int, int]:
        """Of the window, as the package has them."""
        left, right = (-1 if x >= FAR else x for x in (self.batch.left, self.batch.right))
        return left, right


def launch(b: Batch, kernel: Decode, *, share: bool = True, lse: bool = True, sms: int = 0) -> Result:
    """Cut and attend, and what they left."""
    launcher = Launcher(on_card(b), kernel, share, sms)
    work = launcher.cut()
    out, sums = launcher.attend(work, lse)
    assert not work.arrived.any(), "a counter of arrivals is not zero again"
    return Result(out.cpu(), torch.empty(0) if sums is None else sums.cpu(), work.cuts.cpu())
