"""cuDNN's FP8 attention through ``nvidia-cudnn-frontend``: one descale a tensor, operands (B, H, S, D).

On Hopper it writes FP8 only, so its output is half as many bytes as everybody else's.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fp8cutlass import quantize
from fp8cutlass.quant.quantize import FP8_MAX

from ..data import Data
from ..machine import version_of
from .base import Contender, Refused

E4M3_MAX = FP8_MAX[torch.float8_e4m3fn]  # also what probabilities in [0, 1] are scaled by
SCALARS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def _cudnn() -> Any:
    return importlib.import_module("cudnn")


class CudnnFp8:
    name = "cudnn_fp8"
    precision = "fp8"

    def __init__(self) -> None:
        self._handle: Any = None

    def available(self) -> str | None:
        try:
            _cudnn()
        except (ImportError, OSError) as error:
            return f"nvidia-cudnn-frontend cannot be imported: {error}"
        return None

    def version(self) -> str:
        cudnn = _cudnn()
        return f"cuDNN {cudnn.backend_version_string()}, nvidia-cudnn-frontend {version_of('nvidia-cudnn-frontend')}"

    def prepare(self, data: Data) -> list[Contender]:
        cudnn = _cudnn()
        if self._handle is None:
            self._handle = cudnn.create_handle()
        handle = self._handle
        (q8, q_descale), (k8, k_descale), (v8, v_descale) = self._quantise(data)
        out = torch.empty_like(q8)
        # No output exceeds the largest |v|, so this scale never saturates.
        scale_o = E4M3_MAX / float(data.v.abs().amax())
        ones = torch.ones(1, device=q8.device)
        scalars = dict(
            zip(
                SCALARS,
                (q_descale, k_descale, v_descale, ones / E4M3_MAX, ones * E4M3_MAX, ones * scale_o),
                strict=True,
            )
        )
        amax = torch.empty(2, 1, 1, 1, 1, device=q8.device)
        graph, ports = self._plan(data, q8, k8, v8, out)
        pack = {"q": q8, "k": k8, "v": v8, "o": out, "amax_s": amax[0], "amax_o": amax[1]}
        pack |= {name: value.reshape(1, 1, 1, 1) for name, value in scalars.items()}
        bound = {port: pack[name] for name, port in ports.items()}
        workspace = torch.empty(max(1, graph.get_workspace_size()), device=q8.device, dtype=torch.uint8)

        def launch() -> torch.Tensor:
            # The handle does not follow torch's stream, and a capture runs on one of its own.
            cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
            graph.execute(bound, workspace, handle=handle)
            return out

        return [Contender(self.name, self.precision, launch, lambda: self._quantise(data), out_descale=1 / scale_o)]

    @staticmethod
    def _quantise(data: Data) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [quantize(x, granularity="tensor") for x in (data.q, data.k, data.v)]

    def _plan(
        self, data: Data, q8: torch.Tensor, k8: torch.Tensor, v8: torch.Tensor, out: torch.Tensor
    ) -> tuple[Any, dict[str, Any]]:
        """Build the graph; older backends want the amax of the probabilities as an output, newer ones do not."""
        cudnn = _cudnn()
        shape = data.shape
        refusals = []
        for with_amax_s in (False, True):
            graph, ports = describe(self._handle, shape.causal, data.scale, q8, k8, v8, out, with_amax_s=with_amax_s)
            try:
                graph.validate()
                graph.build_operation_graph()
                graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
                graph.check_support()
                graph.build_plans()
            except cudnn.cudnnGraphNotSupportedError as error:
                refusals.append(str(error).splitlines()[0])
                continue
            return graph, ports
        raise Refused("; ".join(dict.fromkeys(refusals)))


def describe(
    handle: Any, causal: bool, scale: float, q: Any, k: Any, v: Any, out: Any, *, with_amax_s: bool
) -> tuple[Any, dict[str, Any]]:
    """The graph of one forward product of tensors (B, H, S, D) with ``shape`` and ``stride()``, and its ports by
    name."""
    cudnn = _cudnn()
    fp8, float32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=float32, compute_data_type=float32, handle=handle)
    ports = {
        name: graph.tensor(dim=tuple(x.shape), stride=tuple(x.stride()), data_type=fp8, name=name)
        for name, x in (("q", q), ("k", k), ("v", v))
    }
    for name in SCALARS:
        ports[name] = graph.tensor(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=float32, name=name)
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        **ports,
        generate_stats=False,
        attn_scale=scale,
        diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
        right_bound=0 if causal else None,
        name="attention",
    )
    o.set_output(True).set_dim(tuple(out.shape)).set_stride(tuple(out.stride())).set_data_type(fp8)
    ports["o"] = o
    for name, port in (("amax_s", amax_s), ("amax_o", amax_o)):
        if name == "amax_o" or with_amax_s:
            port.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(float32)
            ports[name] = port
    return graph, ports
