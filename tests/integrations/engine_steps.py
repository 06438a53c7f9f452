"""Sequences of a serving engine: pages given out, shared and used again, and attention over them in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from paged_cases import attention64
from where import CPU, moved

from fp8cutlass.emulator.decode import queries

E4M3 = torch.float8_e4m3fn
TIGHT = 0.004  # relative L2 on the bytes of the cache: bf16 output is 0.0020, the rest is P, and ties of e4m3
LOOSE = 0.06  # on K and V before: e4m3 costs V 2.7%, and by K the probabilities about as much where logits are N(0, 1)


@dataclass
class Shape:
    """Of a layer."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    pages: int = 24
    k_scale: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    v_scale: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    window: int = -1  # tokens before its own that a row sees
    right: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class Sequence:
    """Tokens of a request."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.k: list[torch.Tensor] = []  # (Hkv, D) each
        self.v: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self.k)


class Requests:
    """Page 0 is no sequence's, as in both engines. Pages are given out in an order that is none of their numbers."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape, self.generator = shape, torch.Generator().manual_seed(seed)
        self.free = (torch.randperm(shape.pages - 1, generator=self.generator, device=CPU) + 1).tolist()
        self.users: dict[int, int] = {}

    def random(self, *size: int) -> torch.Tensor:
        return moved(torch.randn(*size, generator=self.generator, device=CPU).bfloat16())

    def grow(self, sequence: Sequence, tokens: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """New K and V (tokens, Hkv, D), and their slots."""
        shape, slots = self.shape, []
        k, v = (self.random(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
        k, v = k * shape.k_scale[:, None].bfloat16(), v * shape.v_scale[:, None].bfloat16()
        for i in range(tokens):
            at = len(sequence)
            if at == len(sequence.pages) * shape.page_size:
                page = self.free.pop(0)
                self.users[page] = 1
                sequence.pages.append(page)
            slots.append(sequence.pages[at // shape.page_size] * shape.page_size + at % shape.page_size)
            sequence.k.append(k[i])
            sequence.v.append(v[i])
        return k, v, slots

    def share(self, sequence: Sequence, pages: int) -> Sequence:
        """A new request with the first pages of another."""
        new, tokens = Sequence(), pages * self.shape.page_size
        assert tokens <= len(sequence)
        new.pages, new.k, new.v = sequence.pages[:pages], sequence.k[:tokens], sequence.v[:tokens]
        for page in new.pages:
            self.users[page] += 1
        return new

    def drop(self, sequence: Sequence) -> None:
        """Its pages go to the front of the list: the next request gets them, old bytes and all."""
        for page in sequence.pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.insert(0, page)

    def slot(self, sequence: Sequence, token: int) -> int:
        size = self.shape.page_size
        return sequence.pages[token // size] * size + token % size

    def judge(self, sequence: Sequence, q: torch.Tensor, out: torch.Tensor) -> None:
        """Out (rows, H, D) of the last tokens against float64: on what FP8 pages can hold, and on K and V as given."""
        shape = self.shape
        for quantised, limit in ((True, TIGHT), (False, LOOSE)):
            k, v = (
                _held(torch.stack(x), scale) if quantised else torch.stack(x).double()
                for x, scale in ((sequence.k, shape.k_scale), (sequence.v, shape.v_scale))
            )
            q16, descale = queries(q)
            wanted = attention64(
                q16.double() * descale.double(), k, v, shape.head_dim**-0.5, shape.window, shape.right, shape.softcap,
                shape.sinks,
            )  # fmt: skip
            expected = wanted.out[0].transpose(0, 1)
            error = float((out.double() - expected).norm() / expected.norm())
            assert error < limit, f"{error:.4f} of {len(q)} rows on {len(sequence)} keys, quantised: {quantised}"


def _held(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float64 of x (tokens, Hkv, D) after e4m3."""
    by = scale.expand(x.shape[1])[:, None]
    return (x.float() / by).clamp(-448, 448).to(E4M3).double() * by.double()
