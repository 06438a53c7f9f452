"""The peers by name, FP8 first. The ratio of a cell is taken against the better of :data:`report.FP8_PEERS`."""

from __future__ import annotations

from .base import Contender, Peer, Refused
from .cudnn import CudnnFp8
from .fa3 import FlashAttention3
from .own import Own
from .sage import SageAttention
from .sdpa import TorchSdpa

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        FlashAttention3("fp8"),
        CudnnFp8(),
        FlashAttention3("bf16"),
        TorchSdpa("cudnn"),
        TorchSdpa("flash"),
        SageAttention(),
    )
}

__all__ = ["PEERS", "Contender", "Own", "Peer", "Refused"]
