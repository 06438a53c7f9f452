"""Decode by FlashInfer over pages: its FA2 and FA3 kernels and XQA, with queries in bf16.

What a launch needs beside K, V and queries is planned before. V's descale is left out of the launch where it would be
one more: the output is compared after it was multiplied.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any, cast

import torch

from ..decode import DESCALE, DecodeData, Refused, Way
from ..machine import version_of
from ..steps import PAGE

WORKSPACE_BYTES = 256 << 20


@lru_cache(maxsize=1)
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def indices(data: DecodeData, table: torch.Tensor) -> torch.Tensor:
    """The pages of all sequences, one after the other."""
    used = (-(-n // PAGE) for n in data.step.lengths)
    return torch.cat([row[:n] for row, n in zip(table, used, strict=True)])


class _FlashInfer:
    def __init__(self, name: str, precision: str) -> None:
        self.name, self.precision = name, precision

    def available(self) -> str | None:
        try:
            importlib.import_module("flashinfer")
        except Exception as error:  # it looks for compilers, drivers and other packages
            return f"flashinfer cannot be imported: {error}"
        return None

    def version(self) -> str:
        return f"flashinfer-python {version_of('flashinfer-python')}"

    def _caches(self, data: DecodeData) -> tuple[torch.Tensor, torch.Tensor]:
        return (data.k8, data.v8) if self.precision == "fp8" else (data.k, data.v)

    def _way(self, launch: Any, out_descale: float = 1.0) -> Way:
        return Way(self.name, self.precision, launch, 1 if self.precision == "fp8" else 2, out_descale=out_descale)


class FlashInfer(_FlashInfer):
    """``BatchPrefillWithPagedKVCacheWrapper``, whose kernels the decode wrapper runs where it uses tensor cores."""

    def __init__(self, backend: str, precision: str) -> None:
        kernels = "flashinfer" if backend == "fa2" else f"flashinfer_{backend}"
        super().__init__(f"{kernels}_{precision}", precision)
        self._backend = backend

    def __call__(self, data: DecodeData) -> list[Way]:
        if self._backend == "fa3" and self.precision == "fp8":
            raise Refused("FlashInfer's FA3 takes no scales with FP8 pages")
        step, device = data.step, data.q.device
        wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            _workspace(device), "NHD", backend=self._backend
        )
        caches, fp8 = self._caches(data), self.precision == "fp8"
        used = torch.tensor([-(-n // PAGE) for n in step.lengths])
        ends = torch.cat([torch.zeros(1), used.cumsum(0)]).to(device, torch.int32)
        by_table = {table.data_ptr(): indices(data, table) for table in data.tables}
        wrapper.plan(
            data.cu_q, ends, indices(data, data.tables[0]), (data.lengths - 1) % PAGE + 1, step.heads, step.kv_heads,
            step.head_dim, PAGE, causal=step.queries > 1, sm_scale=data.scale, q_data_type=torch.bfloat16,
            kv_data_type=caches[0].dtype,
        )  # fmt: skip
        if not hasattr(wrapper, "_paged_kv_indices_buf"):
            raise Refused("this version keeps its page numbers elsewhere, so one plan cannot serve several tables")
        scales = {"k_scale": DESCALE} if fp8 else {}

        def launch(table: torch.Tensor) -> torch.Tensor:
            wrapper._paged_kv_indices_buf = by_table[table.data_ptr()]  # the plan depends on lengths alone
            return cast(torch.Tensor, wrapper.run(data.q, caches, **scales))

        launch(data.tables[0])  # what is not compiled is refused here
        return [self._way(launch, DESCALE if fp8 else 1.0)]


class Xqa(_FlashInfer):
    """XQA through FlashInfer, one query a sequence."""

    def __init__(self, precision: str) -> None:
        super().__init__(f"xqa_{precision}", precision)

    def __call__(self, data: DecodeData) -> list[Way]:
        step = data.step
        if step.queries > 1:
            raise Refused("FlashInfer's XQA takes one query a sequence")
        attend = importlib.import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
        caches, workspace = self._caches(data), _xqa_workspace(data.q.device)
        descale = DESCALE if self.precision == "fp8" else 1.0
        scales = {"bmm1_scale": data.scale * descale, "bmm2_scale": descale}
        lengths = data.lengths.view(torch.uint32)

        def launch(table: torch.Tensor) -> torch.Tensor:
            most = table.shape[1] * PAGE
            return cast(torch.Tensor, attend(data.q, caches, workspace, table, lengths, most, **scales))

        launch(data.tables[0])  # what is not compiled is refused here
        return [self._way(launch)]


@lru_cache(maxsize=1)
def _xqa_workspace(device: torch.device) -> torch.Tensor:
    """One of its own: it begins with counters that are zero between launches."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
