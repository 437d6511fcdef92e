"""Loads the experts a layer misses into slots, as ``slots`` does, and computes them by our grouped GEMM.

Where vLLM's kernel for a format cannot read slots, this can: experts in MXFP4, NVFP4 and INT8 by channel are kept,
moved and read as they are packed. What the host decides is as with ``slots``: policies, predictors, disks, host memory
before them, CPU experts, draft trees. On a CPU the kernel is compiled C, or its torch twin where that is missing.
"""

from __future__ import annotations

import logging
import time
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_spac.cpu_kernels._gemm import CompiledGemm
from vllm_spac.cpu_kernels._library import missing
from vllm_spac.execution.address_table import check_layer, check_shape, grouped_gemm_over, kernels_for
from vllm_spac.execution.base import ExecutionContext, LayerKernel, Rows
from vllm_spac.execution.host.slots_execution import SlotExecution

logger = logging.getLogger("vllm.spac")


class TableExecution(SlotExecution):
    """Slots of which our kernel reads each at its address."""

    _elsewhere: ClassVar[int] = 0  # no row reads these, where this process holds all experts
    keeps_bits = False  # the kernel sums in another order than vLLM's
    layout: ClassVar[Literal["plain", "kernel"]] = "plain"
    repacks: ClassVar[bool] = True
    check_layer, check_shape = staticmethod(check_layer), staticmethod(check_shape)

    def __init__(self, context: ExecutionContext) -> None:
        self.check_shape(context.shape)
        super().__init__(context)
        self._device = context.device
        self.launches = kernels_for(self._device)
        on_cpu = self._device.type == "cpu"
        self._twin = on_cpu and bool(missing())
        self._compiled_gemm = CompiledGemm() if on_cpu and not self._twin else None
        if self._compiled_gemm is not None:
            self.launches = self.launches._replace(grouped_gemm=self._compiled_gemm)
        places = [[slot.data_ptr() for slot in tensor] for tensor in context.tensors.values()]
        self._places = torch.tensor(places, device=self._device)  # int64 [names, slots]
        self._kernels: dict[tuple[int, str], TableKernel] = {}
        self._compiled: set[str] = set()  # activations

    def describe(self) -> str:
        weights = None if self.shape.packed is None else f"weights {self.shape.packed.describe()}"
        kernel = None if self._compiled_gemm is None else self._compiled_gemm.describe()
        return ", ".join(filter(None, (weights, kernel)))

    def caveat(self) -> str | None:
        if not self._twin:
            return None
        return f"plane=table runs the torch twin of the GPU's kernel, which is slow. {missing()}"

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        own = self._kernels.get((layer, kernel.activation))
        if own is None:
            own = self._kernels[layer, kernel.activation] = TableKernel(self, layer, kernel.activation)
            if kernel.activation not in self._compiled:
                own.compile(x, ids.shape[1])
                self._compiled.add(kernel.activation)
        return super().forward(layer, x, weights, ids, own, rows)

    def places(self, layer: int, slot_of: Tensor | None) -> Tensor:
        """Returns int64 [names, experts], the addresses that a layer's kernel reads; [names, slots] where it is given
        slots.

        Args:
            layer: number of the layer in ``shape.layers``.
            slot_of: int32 [experts] on the device, any slot for experts that no row uses; None: every expert has its
                slot, or slots are given.
        """
        if slot_of is not None:
            return self._places.index_select(1, slot_of)
        first = layer * self.shape.experts
        return self._places[:, first : first + self.shape.experts].contiguous() if self.holds_all else self._places


class TableKernel:
    """Our kernel of one layer as a ``LayerKernel``."""

    by_expert = False

    def __init__(self, execution: TableExecution, layer: int, activation: str) -> None:
        self._execution, self._layer, self.activation = execution, layer, activation
        self._own = execution.places(layer, None)
        self.takes_slots = self._own.device.type == "cpu"

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        if not self.takes_slots and self._execution.local_of is not None:  # our kernel skips what is -1
            ids = self._execution.own(ids) if slot_of is None else ids.masked_fill(slot_of[ids] < 0, -1)
            slot_of = None if slot_of is None else slot_of.clamp(min=0)
        places = self._own if slot_of is None else self._execution.places(self._layer, slot_of)
        return self._run(places, x, weights, ids)

    def _run(self, places: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        shape, tables = self._execution.shape, dict(zip(self._execution.tensors, places, strict=True))
        x, weights, ids = x.contiguous(), weights.float().contiguous(), ids.int().contiguous()
        return grouped_gemm_over(
            self._execution.launches, shape, tables, x, weights, ids, self.activation, torch.empty_like(x)
        )

    def compile(self, x: Tensor, top_k: int) -> None:
        """Launches each variant of the kernel that forwards of up to as many rows as ``x`` need, over padding only.

        The first forward measures vLLM's memory, with the most rows; no request should wait for compilation.
        """
        shape, held = self._execution.shape, self._execution.local_of
        whole = held is None or self.takes_slots or self._execution.holds_all
        experts = shape.experts if held is None or whole else len(held)  # in the table that is read
        sizes = self._execution.launches.rows_to_compile(len(x), top_k, experts, shape.packed)
        start = time.perf_counter()
        for rows in sizes:
            ids = torch.full((rows, top_k), -1, dtype=torch.int32, device=x.device)
            places = self._own[:, :1].expand(-1, experts).contiguous()
            self._run(places, x.new_zeros(rows, x.shape[1]), torch.zeros(ids.shape, device=x.device), ids)
        if sizes:
            logger.info("spac: kernels compiled for forwards of any size in %.1f s", time.perf_counter() - start)
