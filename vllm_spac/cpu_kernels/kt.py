"""KTransformers' CPU kernels (``pip install --no-deps kt-kernel``). NEVER RUN: they need pinned memory, hence a GPU.

Written against the interface of kt-kernel's ``KTMoEWrapper``; only its refusals are tested. One trial of a quantised
method gave zeros, hence every layer is compared with torch at the start, on random rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels.base import CpuExperts, Kernel, check_same
from vllm_spac.cpu_kernels.torch import Torch
from vllm_spac.errors import ConfigError

_METHOD = "BF16"
_INSTEAD = "use --spac-cpu-kernel torch"
_CHUNK = 512  # rows per call
_ROWS = 4


class KTransformers(CpuExperts):
    """One ``KTMoEWrapper`` per layer, which keeps a copy of the layer's experts."""

    def __init__(self, shape: MoEShape, threads: int, activation: str, kernel: Kernel | None = None) -> None:
        super().__init__(shape, threads, activation, kernel)
        if not torch.cuda.is_available():
            raise ConfigError(f"spac: cpu_kernel=kt needs pinned memory, hence a GPU in this machine; {_INSTEAD}")
        if activation != "silu" or "w13_bias" in shape.tensors:
            raise ConfigError(f"spac: cpu_kernel=kt computes SiLU experts without biases only; {_INSTEAD}")
        dtype = shape.tensors["w13_weight"].dtype
        if dtype != torch.bfloat16:
            raise ConfigError(f"spac: cpu_kernel=kt computes bfloat16 experts only, not {dtype}; {_INSTEAD}")
        try:
            self._wrapper = importlib.import_module("kt_kernel").KTMoEWrapper
        except (ImportError, AttributeError, OSError) as error:
            raise ConfigError(
                f"spac: cpu_kernel=kt: kt_kernel cannot be imported ({error}); install it with "
                f"`pip install --no-deps kt-kernel`, or {_INSTEAD}"
            ) from error
        self._reference = Torch(shape, threads, activation)
        self._layers: dict[int, Any] = {}

    def prepare(self, experts: Mapping[str, Tensor]) -> None:
        layer = self._load(len(self._layers), experts)
        self._compare(layer, experts)
        self._layers[id(experts)] = layer

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        layer = self._layers[id(experts)]
        parts = zip(x.split(_CHUNK), weights.split(_CHUNK), ids.split(_CHUNK), strict=True)
        return torch.cat([self._run(layer, *part) for part in parts])

    def describe(self) -> str:
        return f"kt-kernel ({_METHOD})"

    def close(self) -> None:
        self._layers.clear()

    def _load(self, number: int, experts: Mapping[str, Tensor]) -> Any:
        w13, w2 = experts["w13_weight"], experts["w2_weight"]
        count, hidden, intermediate = w2.shape
        layer = self._wrapper(
            layer_idx=number,
            num_experts=count,
            num_experts_per_tok=self.shape.top_k,
            hidden_size=hidden,
            moe_intermediate_size=intermediate,
            num_gpu_experts=0,
            cpuinfer_threads=self.threads,
            threadpool_count=1,
            weight_path="",
            chunked_prefill_size=_CHUNK,
            method=_METHOD,
        )
        gate, up = w13[:, :intermediate].contiguous(), w13[:, intermediate:].contiguous()
        layer.load_weights_from_tensors(gate, up, w2, torch.arange(count))
        return layer

    def _run(self, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        stream = torch.cuda.current_stream()
        out = layer.forward(x.cuda(), ids.long().cuda(), weights.float().cuda(), stream.cuda_stream)
        return out.cpu()

    def _compare(self, layer: Any, experts: Mapping[str, Tensor]) -> None:
        count, hidden = len(experts["w2_weight"]), experts["w2_weight"].shape[1]
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(_ROWS, hidden, generator=rng).bfloat16()
        ids = torch.stack([torch.randperm(count, generator=rng)[: self.shape.top_k] for _ in range(_ROWS)])
        weights = torch.full(ids.shape, 1 / self.shape.top_k, dtype=torch.float32)
        found, expected = self._run(layer, x, weights, ids), self._reference.run(x, weights, ids, experts)
        check_same(found, expected, x.dtype, hidden, f"cpu_kernel=kt compared with torch ({_INSTEAD})")
