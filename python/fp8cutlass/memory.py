"""How tensors lie in memory: the two orders of (B, H, S, D), alignment, views as bytes and as words; and shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT = 16  # bytes of one vector access
WORD = torch.int64  # what copies move
WORTH = 1 << 22  # bytes of a tensor from which on words pay: looking at them costs the host some microseconds
TENSOR_MAP_STRIDE = 2**40  # bytes, of the copy engine: a stride has to be less


def broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a tensor of that shape broadcasts to the shape ``whole``."""
    return len(shape) <= len(whole) and all(
        n == 1 or n == full  # each on its own, as torch.compile makes guards of them
        for n, full in zip(shape[::-1], whole[::-1], strict=False)
    )


def is_seq_major(x: torch.Tensor) -> bool:
    """True for a (B, H, S, D) view of memory in the order (B, S, H, D)."""
    return x.shape[1] > 1 and x.shape[2] > 1 and x.stride(1) < x.stride(2)


def empty_rows(q: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate (B, H, Sq, head_dim), dense in q's memory order, (B, H, S, D) or (B, S, H, D)."""
    batch, heads, seqlen_q, _ = q.shape
    if is_seq_major(q):
        return q.new_empty((batch, seqlen_q, heads, head_dim), dtype=dtype).transpose(1, 2)
    return q.new_empty((batch, heads, seqlen_q, head_dim), dtype=dtype)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a contiguous copy where it is not ``is_aligned``."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether rows (B, H, S) start on multiples of 16 bytes, lie near enough, and are not all the same row, for which
    tensor maps have no word. A dimension of size 1 may have any stride."""
    if x.shape[2] > 1 and x.stride(2) == 0:
        return False
    size = x.element_size()
    strides = [size * stride for length, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if length > 1]
    served = all(stride % ALIGNMENT == 0 and stride < TENSOR_MAP_STRIDE for stride in strides)
    return served and x.data_ptr() % ALIGNMENT == 0


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """FP8 viewed as uint8, for what is not defined on FP8; anything else as it is."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors viewed as words of 8 bytes where all consist of these and the first is large, else as they are. torch
    copies one element a thread."""
    large = tensors[0].numel() * tensors[0].element_size() >= WORTH
    return tuple(x.view(WORD) for x in tensors) if large and all(map(_is_words, tensors)) else tensors


def _is_words(x: torch.Tensor) -> bool:
    """Whether ``x`` can be viewed as words: its rows are dense, and begin and end between words."""
    size = x.element_size()
    if x.requires_grad or x.dim() == 0 or x.stride(-1) != 1 or WORD.itemsize % size:
        return False
    lengths = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return all(n * size % WORD.itemsize == 0 for n in lengths)


def concatenated(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """``torch.cat`` of tensors of one dtype, in words."""
    found = torch.cat(words(*tensors), dim)
    return found if found.dtype is tensors[0].dtype else found.view(tensors[0].dtype)


def in_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors, one after the other, each contiguous. One tensor at least; dtypes may differ."""
    sizes = [x.numel() * x.element_size() for x in tensors]
    buffer = tensors[0].new_empty((sum(sizes),), dtype=torch.uint8)
    for room, x in zip(buffer.split(sizes), tensors, strict=True):
        if room.storage_offset() % x.element_size():
            room.copy_(x.contiguous().view(-1).view(torch.uint8))
        else:
            copy_into(room.view(x.dtype).view(x.shape), x)
    return buffer


def taken(buffer: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """What ``in_one`` has put into a buffer from byte ``at`` on, of the dtype and shape of ``like``: a view, or a copy
    where it does not begin at a multiple of an element."""
    part = buffer.narrow(0, at, like.numel() * like.element_size())
    part = part.clone() if part.storage_offset() % like.element_size() else part
    return part.view(like.dtype).view(like.shape)


def copy_into(room: torch.Tensor, x: torch.Tensor) -> None:
    """``room.copy_(x)`` of tensors of one dtype, in words."""
    into, source = words(room, x)
    into.copy_(source)
