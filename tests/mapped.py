"""Memory of a card that ends where its mapping ends: what reads or writes a byte further faults, whatever lies there.

By the driver's virtual memory management, through ctypes: a range of addresses of which only some pages are mapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
PINNED, ON_DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, 32 bytes."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def _call(name: str, *arguments: object) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} failed with CUresult {status}")


class _Raw:
    """What torch.as_tensor takes a view of."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@contextmanager
def mapping(size: int, *, span: int = 0) -> Iterator[torch.Tensor]:
    """``size`` bytes or more on the current card, uint8, with an unmapped range of as many bytes behind them; zeroed.

    ``span``: the tensor is so long, and only as many bytes at its beginning and at its end are mapped as ``size`` says.
    The memory is given back at the end: no tensor on it may be used after that.
    """
    torch.zeros(1, device="cuda")  # makes the context current
    device = torch.cuda.current_device()
    where = _Location(ON_DEVICE, device)
    properties = _Properties(PINNED, 0, where, None)
    unit = ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), ctypes.c_int(MINIMUM))
    size = -(-size // unit.value) * unit.value
    span = -(-span // unit.value) * unit.value
    total = (span or size) + size
    base, handles, zero = ctypes.c_uint64(), [], ctypes.c_size_t(0)
    room, piece, none = ctypes.c_size_t(total), ctypes.c_size_t(size), ctypes.c_uint64(0)
    _call("cuMemAddressReserve", ctypes.byref(base), room, zero, none, none)
    starts = [base.value, base.value + span - size] if span else [base.value]
    try:
        for start in starts:
            handle, address = ctypes.c_uint64(), ctypes.c_uint64(start)
            _call("cuMemCreate", ctypes.byref(handle), piece, ctypes.byref(properties), none)
            _call("cuMemMap", address, piece, zero, handle, none)
            handles.append((address, handle))
            access = _Access(where, READ_WRITE)
            _call("cuMemSetAccess", address, piece, ctypes.byref(access), ctypes.c_size_t(1))
            torch.as_tensor(_Raw(start, size), device="cuda").zero_()
        yield torch.as_tensor(_Raw(base.value, span or size), device="cuda")
    finally:
        torch.cuda.synchronize()
        for address, handle in handles:
            _call("cuMemUnmap", address, piece)
            _call("cuMemRelease", handle)
        _call("cuMemAddressFree", base, room)


def at_the_end(room: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``x`` in the last bytes of ``room``."""
    size = x.numel() * x.element_size()
    place = room[room.numel() - size :].view(x.dtype).view(x.shape)
    return place.copy_(x)
