"""What a row may see, as far as kernels know it: a band of keys beside the diagonal, and where each sequence lies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

TAG = "_fp8cutlass_band"  # the attribute of a mask that holds (Band, version of the mask)


@dataclass(frozen=True)
class Band:
    """Row i of a sequence sees the keys ``i + shift - left`` to ``i + shift + right`` that are no padding.

    -1 means all keys on that side. ``ends_q`` and ``ends_k`` are of a batch whose sequences do not all begin and end
    where the tensors do: (sequences + 1,) int32, where the tokens of each begin once rows of the batch lie one after
    the other, as in ``attention_varlen``; ``used_q`` and ``used_k`` (sequences,) int32 are their lengths, None for up
    to the next one. Rows are then aligned with the end of the keys, and ``shift`` is not used.
    """

    left: int = -1
    right: int = -1
    shift: int = 0
    ends_q: torch.Tensor | None = None
    ends_k: torch.Tensor | None = None
    used_q: torch.Tensor | None = None
    used_k: torch.Tensor | None = None
    longest_q: int = 0  # upper bounds of the lengths
    longest_k: int = 0

    @property
    def ragged(self) -> bool:
        """Whether sequences have lengths of their own."""
        return self.ends_q is not None

    @property
    def limited(self) -> bool:
        """Whether a row does not see all keys of its sequence."""
        return self.left >= 0 or self.right >= 0

    def dense(self, batch: int, rows: int, keys: int, device: torch.device) -> torch.Tensor:
        """The mask as torch's attention takes it, (batch, 1, rows, keys) bool, True for what is seen."""
        row = torch.arange(rows, device=device)[None, :, None]
        key = torch.arange(keys, device=device)[None, None, :]
        seen = torch.ones(batch, rows, keys, dtype=torch.bool, device=device)
        own = row + self.shift
        if self.ends_q is not None and self.ends_k is not None:
            lengths_q, lengths_k = _lengths(self.ends_q, self.used_q), _lengths(self.ends_k, self.used_k)
            at_q, row = _place(self.ends_q, lengths_q, batch, rows)
            at_k, place = _place(self.ends_k, lengths_k, batch, keys)
            seen = (at_q[:, :, None] == at_k[:, None, :]) & (at_q >= 0)[:, :, None]
            own = (row + (lengths_k - lengths_q)[at_q])[:, :, None]
            key = place[:, None, :]
        if self.left >= 0:
            seen = seen & (key >= own - self.left)
        if self.right >= 0:
            seen = seen & (key <= own + self.right)
        return seen[:, None]


FULL, CAUSAL = Band(), Band(right=0)


def _lengths(ends: torch.Tensor, used: torch.Tensor | None) -> torch.Tensor:
    return ends.diff().long() if used is None else torch.minimum(used, ends.diff()).long()


def _place(ends: torch.Tensor, lengths: torch.Tensor, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token, (batch, tokens): its sequence, -1 for none, and its place in it."""
    token = torch.arange(batch * tokens, device=ends.device)
    at = (torch.searchsorted(ends.long(), token, right=True) - 1).clamp(0, lengths.shape[0] - 1)
    within = token - ends.long()[at]
    there = (within >= 0) & (within < lengths[at])
    return torch.where(there, at, -1).view(batch, tokens), within.view(batch, tokens)


def cut(band: Band, rows: int, keys: int) -> tuple[Band, int, int] | None:
    """The keys that any row sees, as (band, first, end), with the band aligned for what is left of them.

    None where the rows are then aligned neither with the first key nor with the last, which no kernel serves.
    """
    first, end, shift = 0, keys, band.shift
    if band.right >= 0:
        end = max(0, min(keys, rows + shift + band.right))
    if band.left >= 0:
        first = max(0, min(end, shift - band.left))
    shift -= first
    if band.limited and shift not in (0, end - first - rows):
        return None
    return (replace(band, shift=shift) if first else band), first, end


def padded(band: Band, valid: torch.Tensor, rows: int, keys: int) -> Band | None:
    """The band of a batch with ``keys`` keys an entry, of which ``valid`` (batch, keys or less) bool says which count.

    None where a sequence has a hole. Waits for the device once. Without a limit on either side all rows are computed;
    else those that are padding themselves are not, and become zeros.
    """
    batch, width = valid.shape
    count = valid.sum(1, dtype=torch.int32)
    first = valid.to(torch.int8).argmax(1).to(torch.int32)
    last = width - valid.flip(1).to(torch.int8).argmax(1).to(torch.int32)
    whole, joined = torch.stack(((count == width).all(), ((count == last - first) | (count == 0)).all())).tolist()
    if whole:
        return band
    if not joined:
        return None
    begins = torch.arange(batch + 1, dtype=torch.int32, device=valid.device)
    if not band.limited:
        ends_q, used_q = begins * rows, None
    else:
        begin = (first - band.shift).clamp(0, rows)
        used_q = ((first + count - band.shift).clamp(0, rows) - begin).to(torch.int32)
        ends_q = _with_end(begins[:-1] * rows + begin, batch * rows)
    return replace(
        band,
        ends_q=ends_q,
        ends_k=_with_end(begins[:-1] * keys + first, batch * keys),
        used_q=used_q,
        used_k=count,
        longest_q=rows,
        longest_k=keys,
    )


def _with_end(begins: torch.Tensor, end: int) -> torch.Tensor:
    return torch.cat((begins, begins.new_full((1,), end)))


def of_sequences(band: Band, index: torch.Tensor) -> Band:
    """The band of rows that hold several sequences: ``index`` (batch, tokens) is the same for the tokens of one.

    Waits for the device once.
    """
    batch, tokens = index.shape
    changes = torch.ones_like(index, dtype=torch.bool)
    changes[:, 1:] = index.diff(dim=1) != 0
    ends = _with_end(changes.flatten().nonzero().flatten().to(torch.int32), batch * tokens)
    return replace(band, ends_q=ends, ends_k=ends, longest_q=tokens, longest_k=tokens)


def tag(mask: torch.Tensor, band: Band) -> torch.Tensor:
    """Note on a mask which band it is. Slices and copies of it are masks like any other."""
    setattr(mask, TAG, (band, version_of(mask)))
    return mask


def tagged(mask: torch.Tensor) -> Band | None:
    """The band that ``tag`` noted, unless the mask was written to since."""
    found = getattr(mask, TAG, None)
    if found is None:
        return None
    band, version = found
    return band if torch.compiler.is_compiling() or version == version_of(mask) else None


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written to; -1 where torch does not count."""
    return -1 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version
