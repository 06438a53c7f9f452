"""Where the tokens of a step lie: page tables and lengths, made on the device from SGLang's table of slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..pages import Plans


@dataclass
class Step:
    """What the attention of every layer reads."""

    lengths: torch.Tensor  # (requests,) int32, tokens of this step included
    ends: torch.Tensor  # (requests + 1,) int32: where the query tokens of each request begin
    table: torch.Tensor  # (requests, most pages) int32
    longest_q: int
    longest_k: int  # an upper bound
    plans: Plans = field(default_factory=Plans)  # of its layers


class Slots:
    """SGLang's table (requests, context) int32 of the slot of each token, as pages of ``page_size`` slots."""

    def __init__(self, req_to_token: torch.Tensor, page_size: int, context: int) -> None:
        self.req_to_token, self.page_size = req_to_token, page_size
        context = min(context, req_to_token.shape[1])
        self.starts = torch.arange(0, context, page_size, device=req_to_token.device)
        self.context = context

    def pages_of(self, requests: torch.Tensor, longest: int) -> torch.Tensor:
        """(requests, pages of ``longest`` tokens) int32. What lies past a request's end is any number."""
        starts = self.starts[: max(1, -(-longest // self.page_size))]
        return self.req_to_token[requests[:, None].long(), starts[None]].int() // self.page_size


class Held:
    """A ``Step`` of decode in tensors whose addresses a CUDA graph keeps, for batches of 1 to ``most`` requests."""

    def __init__(self, slots: Slots, most: int) -> None:
        device = slots.req_to_token.device
        self.slots, self.most = slots, most
        self.lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self.ends = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.table = torch.zeros(most, max(1, len(slots.starts)), dtype=torch.int32, device=device)

    def step(self, requests: int) -> Step:
        """Views for a batch."""
        return Step(
            self.lengths[:requests], self.ends[: requests + 1], self.table[:requests], 1, self.slots.context
        )  # fmt: skip

    def fill(self, requests: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Write a batch: operations of fixed shape, so that a graph may record them."""
        count = requests.shape[0]
        self.lengths[:count].copy_(seq_lens[:count])
        self.table[:count].copy_(self.slots.pages_of(requests, self.slots.context))
