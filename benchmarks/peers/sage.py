"""SageAttention through its one public function, which quantises inside: INT8 Q K^T and, on Ada and Hopper, FP8 P V.

So it is a whole call from bf16, to be compared with whole calls of ours; its kernel alone cannot be timed.

Version 2.2.0 launches on the default stream, which neither a graph nor a stream of torch waits for. Its results are
then wrong here. benchmarks/README.md has the change to its sources under which it can be timed.
"""

from __future__ import annotations

import importlib

import torch

from ..data import Data
from ..machine import version_of
from ..report import SAGE
from .base import Contender, Refused

MODULE = "sageattention"


class SageAttention:
    name = SAGE
    precision = "int8"

    def available(self) -> str | None:
        try:
            importlib.import_module(MODULE)
        except Exception as error:  # its import compiles and asks the driver, and can raise anything
            return f"sageattention cannot be imported: {error}"
        return None

    def version(self) -> str:
        return f"sageattention {version_of(MODULE)}"

    def prepare(self, data: Data) -> list[Contender]:
        attention = importlib.import_module(MODULE).sageattn
        shape = data.shape
        if shape.causal and shape.seqlen_q != shape.seqlen_k:
            raise Refused("sageattention masks equal lengths only")

        def launch() -> torch.Tensor:
            # "HND" is (B, H, S, D); fewer heads of K and V are shared without being asked for.
            return attention(data.q, data.k, data.v, tensor_layout="HND", is_causal=shape.causal, sm_scale=data.scale)

        try:
            launch()
        except (ValueError, AssertionError) as error:  # how it refuses a head_dim or a card
            raise Refused(f"sageattention: {error}") from error
        return [Contender(self.name, self.precision, launch)]
