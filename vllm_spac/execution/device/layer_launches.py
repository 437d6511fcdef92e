"""What a layer launches: the admission before its kernel, the kernel over a table of addresses, and the CPU's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.execution.address_table import AddressTable, Kernels, fills_from, grouped_gemm_over
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.device.cpu_share import CpuShare
from vllm_spac.execution.row_shares import localised_on_device
from vllm_spac.kernels.types import Early, Fills, Pieces


class LayerRows(NamedTuple):
    """The rows of a layer's forward, as the kernels read them."""

    x: Tensor  # [T, d], contiguous
    ids: Tensor  # int32 [T, k], experts as this process numbers them; -1 for others and for padding
    of_model: Tensor  # int32 [T, k], the same as the model numbers them; whatever else it contains is padding
    weights: Tensor  # float32 [T, k]
    live: Tensor  # int32 [1] on the device, the pairs of requests; those behind them are padding
    guess: Tensor | None = None  # as in ``Rows``
    captured: bool = False  # the launches are captured into a CUDA graph

    @classmethod
    def of(
        cls,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        live: Tensor,
        guess: Tensor | None,
        captured: bool,
        numbers: Tensor | None,
    ) -> LayerRows:
        """Returns what a router chose, ``ids`` of the model; ``numbers``: as of ``local_numbers``, if some are held."""
        of_model = ids.int().contiguous()
        own = of_model if numbers is None else localised_on_device(of_model, numbers)
        return cls(x.contiguous(), own, of_model, weights.float().contiguous(), live, guess, captured)


class LayerLaunches:
    """Called by the thread that launches.

    Attributes:
        counts: int32 [layers, experts] on the device, see ``Admission.counts``.
        cpu: the CPU's share, if it has one.
        early: of each layer, what may be read ahead; None: nothing is. As of ``grouped_gemm``.
    """

    def __init__(self, shape: MoEShape, admission: Admission, memory: AddressTable, kernels: Kernels) -> None:
        self._shape, self._admission, self.kernels = shape, admission, kernels
        self._tables = _by_layer(memory.table, shape)
        # What the launch of each layer copies into slots: all that ``begin_layer`` has admitted, or nothing, if that
        # did not run. None where each expert has its slot: other kernels, which have no code for it.
        self._fills: list[tuple[Fills, Fills]] | None = None
        if admission.residency.slots < shape.total:
            nothing = torch.zeros(shape.experts, dtype=torch.int32, device=memory.device)
            admitted, hosts = admission.reports.sources.view(-1, shape.experts), _by_layer(memory.host_table, shape)
            self._fills = [
                (fills_from(nothing, table), fills_from(sources, table))
                for sources, table in zip(admitted, hosts, strict=True)
            ]
        self.counts = admission.counts.view(-1, shape.experts)
        self.cpu: CpuShare | None = None
        self.early: Sequence[tuple[int, Early]] | None = None

    def tables_of(self, layer: int) -> Mapping[str, Tensor]:
        """Returns name -> int64 [experts], where the experts of a layer are: in slots or in host memory."""
        return self._tables[layer]

    def _share(self, rows: LayerRows) -> CpuShare | None:
        return None if self.cpu is None or len(rows.x) > self.cpu.rows else self.cpu

    def begin_layer(self, layer: int, rows: LayerRows) -> None:
        """Launches what precedes a layer's kernel: missed experts get slots, or are asked of the CPU."""
        cpu = self._share(rows)
        request = None if cpu is None else cpu.request(rows.x, rows.live, self._admission.counts)
        self._admission.begin_layer(layer, rows.ids, rows.weights, request)

    def compute(
        self,
        layer: int,
        rows: LayerRows,
        activation: str,
        out: Tensor,
        *,
        whole: bool = False,
        pieces: Pieces | None = None,
    ) -> Tensor:
        """Launches what computes a layer; returns ``out``, [T, d].

        Args:
            whole: nothing precedes the launch: the CPU has no share, and no expert was admitted.
            pieces: the rows select some of the layer's experts only; what the launch before has counted is kept.
        """
        tables, fills = self.tables_of(layer), None if self._fills is None else self._fills[layer][not whole]
        early = None if self.early is None else self.early[layer]

        def gemm(weights: Tensor, live: Tensor, counts: Tensor, pieces: Pieces | None = pieces) -> Tensor:
            return grouped_gemm_over(
                self.kernels,
                self._shape,
                tables,
                rows.x,
                weights,
                rows.ids,
                activation,
                out,
                counts=counts,
                live=live,
                pieces=pieces,
                fills=fills,
                early=early,
            )

        if pieces is not None:
            mine = torch.empty_like(self.counts[layer])
            gemm(rows.weights, rows.live, mine)
            self.counts[layer].add_(mine)
            return out
        cpu = None if whole else self._share(rows)
        wait = partial(self._wait_for_experts, layer, rows.ids)
        if cpu is None:
            if not whole:
                wait(rows.weights, rows.live)
            return gemm(rows.weights, rows.live, self.counts[layer])
        sources = self._admission.reports.sources
        return cpu.finish(layer, rows.ids, rows.weights, rows.live, sources, gemm, out, wait)

    def _wait_for_experts(self, layer: int, ids: Tensor, weights: Tensor, live: Tensor) -> None:
        """Launches what waits for the experts of these pairs that the device cannot address, if there are any."""
        if (delivery := self._admission.delivery) is not None:
            where = self._admission.experts, self._admission.reports.sources
            self.kernels.wait_for_experts(ids, weights, layer * self._shape.experts, *where, *delivery.mail, live)

    def compile(
        self,
        layer: int,
        x: Tensor,
        activation: str,
        sizes: Sequence[int],
        live: Tensor,
        ahead: Callable[[int, LayerRows], None],
    ) -> None:
        """Launches each kernel variant that forwards like ``x`` need, over padding only; decides and moves nothing.

        Writes to the counts of ``layer`` and the next one, whose own launches come next and overwrite them.

        Args:
            sizes: of a forward of each variant.
            live: as in ``LayerRows``.
            ahead: launches what reads ahead after such rows.
        """
        if self.cpu is not None:
            self.cpu.prepare(x)
        for size in sizes:
            ids = torch.full((size, self._shape.top_k), -1, dtype=torch.int32, device=x.device)
            rows = LayerRows(x.new_zeros(size, x.shape[1]), ids, ids, torch.zeros(ids.shape, device=x.device), live)
            self.begin_layer(layer, rows)
            ahead(layer, rows)
            out = torch.empty_like(rows.x)
            self.compute(layer, rows, activation, out)
            if self.cpu is not None:  # other forwards of the same variant may have too many rows for it
                self.compute(layer, rows, activation, out, whole=True)


def _by_layer(tables: Mapping[str, Tensor], shape: MoEShape) -> list[dict[str, Tensor]]:
    """Returns of each layer name -> int64 [experts], from name -> int64 [keys]."""
    views = {name: table.view(-1, shape.experts) for name, table in tables.items()}
    return [{name: view[layer] for name, view in views.items()} for layer in range(len(shape.layers))]
