"""Pages of the sequences of a batch, and what each layer has stored in them. Numbers of tokens are on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...cache.paged import PagedKVCache
from ...errors import UnsupportedError
from .band import Band

CPU = torch.device("cpu")
FIRST_PAGES = 16  # of a pool that grows


@dataclass(frozen=True)
class Rows:
    """Which rows of a forward pass are tokens: ``counts[b]`` of sequence b from row ``begins[b]``."""

    begins: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """What a forward pass does to the pages. T are the rows that are tokens."""

    slots: torch.Tensor  # (T,) int64
    index: torch.Tensor | None  # (T,) int64 in (batch * rows); None where all rows are tokens
    ends: torch.Tensor  # (batch + 1,) int32: where the tokens of each sequence begin among T
    longest: int
    table: torch.Tensor  # (batch, pages) int32
    used: torch.Tensor  # (batch,) int32: keys, these included


class Pool:
    """Pages of all layers, and those that each sequence has."""

    def __init__(
        self, layers: int, num_pages: int | None, page_size: int, v_scale: str, v_descale: torch.Tensor | float | None
    ) -> None:
        self.layers, self.num_pages, self.page_size = layers, num_pages, page_size
        self.v_scale, self.v_descale = v_scale, v_descale
        self.cache: PagedKVCache | None = None
        self.clear()

    def clear(self) -> None:
        """No sequence has pages. The pages stay allocated."""
        self.pages: list[list[int]] = []  # of each sequence
        self.free = list(range(0 if self.cache is None else self.cache.num_pages))[::-1]
        self._steps: dict[object, Step] = {}
        self._read: list[tuple[Band, tuple[list[int], ...]]] = []

    def settled(self, k: torch.Tensor) -> PagedKVCache:
        """The cache, made for keys like ``k`` (batch, kv_heads, rows, head_dim) at the first call."""
        if self.cache is None:
            self.cache = self._made(self.num_pages or FIRST_PAGES, k.shape[1], k.shape[3], k.device)
            self.free = list(range(self.cache.num_pages))[::-1]
        return self.cache

    def _made(self, pages: int, heads: int, head_dim: int, device: torch.device) -> PagedKVCache:
        return PagedKVCache(
            pages, heads, head_dim, self.page_size, layers=self.layers, v_scale=self.v_scale,
            v_descale=self.v_descale, device=device,
        )  # fmt: skip

    def reserve(self, lengths: list[int]) -> None:
        """Give each sequence the pages for so many tokens; UnsupportedError, with nothing given, if there are none."""
        self.pages += [[] for _ in range(len(lengths) - len(self.pages))]
        more = [max(0, -(-n // self.page_size) - len(own)) for n, own in zip(lengths, self.pages, strict=True)]
        if sum(more) > len(self.free):
            self._grow(sum(more) - len(self.free))
        for own, count in zip(self.pages, more, strict=True):
            own.extend(self.free.pop() for _ in range(count))

    def _grow(self, missing: int) -> None:
        old = self.cache
        if old is None or old.pages is None or self.num_pages is not None:
            raise UnsupportedError(
                f"the cache has {self.num_pages} pages of {self.page_size} tokens, and {missing} more are needed: "
                "give it a larger num_pages, or None for a cache that grows"
            )
        new = self._made(old.num_pages + max(missing, old.num_pages), old.kv_heads, old.head_dim, old.device)
        if new.pages is None:
            raise AssertionError("a cache of its own pages has them")
        new.pages[:, : old.num_pages] = old.pages
        self.free = list(range(old.num_pages, new.num_pages))[::-1] + self.free
        self.cache = new

    def step(self, lengths: list[int], rows: int, tokens: Rows, device: torch.device) -> Step:
        """Where the tokens of a forward pass go. The layers whose numbers are the same share one."""
        key = (tuple(lengths), rows, tokens)
        if (known := self._steps.get(key)) is not None:
            return known
        used = [length + count for length, count in zip(lengths, tokens.counts, strict=True)]
        self.reserve(used)
        slots, index, ends = [], [], [0]
        for b, (length, begin, count) in enumerate(zip(lengths, tokens.begins, tokens.counts, strict=True)):
            place = torch.arange(length, length + count, device=CPU)
            own = torch.tensor(self.pages[b], dtype=torch.long, device=CPU)
            slots.append(own[place // self.page_size] * self.page_size + place % self.page_size)
            index.append(torch.arange(count, device=CPU) + (b * rows + begin))
            ends.append(ends[-1] + count)
        whole = ends[-1] == rows * len(lengths)
        made = Step(
            torch.cat(slots).to(device),
            None if whole else torch.cat(index).to(device),
            torch.tensor(ends, dtype=torch.int32, device=device),
            max(tokens.counts),
            self.table(device),
            torch.tensor(used, dtype=torch.int32, device=device),
        )
        self._steps = {key: made}  # the next layer asks for it, or a layer of another kind replaces it
        return made

    def table(self, device: torch.device) -> torch.Tensor:
        """(batch, most pages of a sequence, at least 1) int32."""
        most = max(1, *(len(own) for own in self.pages))
        return torch.tensor([own + [0] * (most - len(own)) for own in self.pages], dtype=torch.int32, device=device)

    def read(self, band: Band, rows: int, keys: int) -> tuple[list[int], ...]:
        """Of a ragged band: first rows and numbers of rows, first keys and numbers of keys. Waits once for a band."""
        for known, found in self._read:
            if known is band:
                return found
        ends_q, ends_k, used_q, used_k = band.ends_q, band.ends_k, band.used_q, band.used_k
        if ends_q is None or ends_k is None or used_q is None or used_k is None:
            raise AssertionError("a band of padding with a limit has ends and lengths")
        batch = torch.arange(used_q.shape[0], device=used_q.device)
        parts = torch.stack((ends_q[:-1] - batch * rows, used_q, ends_k[:-1] - batch * keys, used_k))
        found = tuple(parts.tolist())
        self._read = [*self._read[-3:], (band, found)]
        return found

    def take(self, sequences: list[int], lengths: list[int]) -> None:
        """Make sequence i a copy of ``sequences[i]``, of which ``lengths[i]`` tokens count."""
        self._steps.clear()
        old = [list(own) for own in self.pages]
        dropped = self.pages[len(sequences) :]
        self.pages = self.pages[: len(sequences)]
        self.reserve(lengths)
        src, dst = [], []
        for i, (source, length) in enumerate(zip(sequences, lengths, strict=True)):
            if source != i:
                count = -(-length // self.page_size)
                src += old[source][:count]
                dst += self.pages[i][:count]
        if self.cache is not None and src:
            device = self.cache.device
            self.cache.copy_pages(torch.tensor(src, device=device), torch.tensor(dst, device=device))
        for own in dropped:
            self.free += own


class Stored:
    """What one layer has in the pages."""

    def __init__(self, pool: Pool, layer: int) -> None:
        self.pool, self.layer = pool, layer
        self.clear()

    def clear(self) -> None:
        """Nothing."""
        self.seen = 0  # rows of all forward passes, padding included
        self.lengths: list[int] = []  # tokens of each sequence
        self._tokens: torch.Tensor | None = None  # None while all rows are tokens: nothing is kept of each step then

    @property
    def tokens(self) -> torch.Tensor:
        """(batch, seen) bool, on the CPU: which of the rows are in the pages."""
        if self._tokens is not None:
            return self._tokens
        return torch.ones(len(self.lengths), self.seen, dtype=torch.bool, device=CPU)

    def rows_of(self, band: Band | None, batch: int, rows: int) -> Rows | None:
        """Which rows of a forward pass are to be appended so that the band is then that of the pages, or None.

        UnsupportedError for another number of sequences.
        """
        keys = self.seen + rows
        if (known := len(self.pool.pages)) not in (0, batch):
            raise UnsupportedError(f"the cache has {known} sequences, and the batch has {batch}")
        lengths = self.lengths or [0] * batch
        if band is None:
            return None
        if not band.ragged:
            aligned = not band.limited or band.shift == self.seen
            return everything(batch, rows) if aligned and all(n == self.seen for n in lengths) else None
        if band.right != 0 or band.used_q is None or band.used_k is None:
            return None
        begins, counts, first, total = self.pool.read(band, rows, keys)
        tokens = self.tokens
        for b, length in enumerate(lengths):
            inside = int(tokens[b, first[b] : first[b] + length].sum()) if length else 0
            if length + counts[b] != total[b] or inside != length:
                return None
        return Rows(tuple(begins), tuple(counts))

    def append(self, k: torch.Tensor, v: torch.Tensor, tokens: Rows) -> Step:
        """Write (batch, kv_heads, rows, head_dim) to the pages; V may be narrower."""
        batch, _, rows, head_dim = k.shape
        cache = self.pool.settled(k)
        lengths = self.lengths or [0] * batch
        step = self.pool.step(lengths, rows, tokens, k.device)
        cache = self.pool.settled(k)  # it may have grown
        if v.shape[3] < head_dim:
            v = torch.nn.functional.pad(v, (0, head_dim - v.shape[3]))
        k, v = (x.transpose(1, 2).reshape(batch * rows, x.shape[1], x.shape[3]) for x in (k, v))
        if step.index is not None:
            k, v = k[step.index], v[step.index]
        cache.append(k, v, step.slots, layer=self.layer)
        if self._tokens is not None or tokens != everything(batch, rows):
            new = torch.zeros(batch, rows, dtype=torch.bool, device=CPU)
            for b, (begin, count) in enumerate(zip(tokens.begins, tokens.counts, strict=True)):
                new[b, begin : begin + count] = True
            self._tokens = torch.cat((self.tokens, new), 1) if self.seen else new
        self.lengths = [length + count for length, count in zip(lengths, tokens.counts, strict=True)]
        self.seen += rows
        return step

    def dense(self, step: Step, dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (batch, kv_heads, seen, head_dim) and V (..., width) as they are in the pages; 0 where padding was."""
        cache = self.pool.cache
        if cache is None:
            raise AssertionError("a step was made in a cache")
        k, v = cache.dequantise(step.table, step.used, self.layer)
        place = (self.tokens.cumsum(1) - 1).clamp(min=0).to(k.device)[:, None, :, None]
        there = self.tokens.to(k.device)[:, None, :, None]
        found = []
        for x in (k, v[..., :width]):
            rows = x.gather(2, place.expand(-1, x.shape[1], -1, x.shape[3]))
            found.append(torch.where(there, rows, 0.0).to(dtype))
        return found[0], found[1]

    def crop(self, rows: int) -> None:
        """Forget the last rows."""
        self.seen = max(0, self.seen - rows)
        if self._tokens is not None:
            self._tokens = self._tokens[:, : self.seen]
        self.lengths = self.tokens.sum(1).tolist() if self.seen else []

    def take(self, sequences: list[int]) -> None:
        """As ``Pool.take``, of what this layer knows."""
        if self.lengths:
            if self._tokens is not None:
                self._tokens = self._tokens[sequences]
            self.lengths = [self.lengths[i] for i in sequences]


def everything(batch: int, rows: int) -> Rows:
    """All rows are tokens."""
    return Rows((0,) * batch, (rows,) * batch)
