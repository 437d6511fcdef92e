"""The layers of a shape over a table of pointers: a hit is read in its slot, a miss where it lies, in one launch.

No layer waits for the host. Between steps the host reads what a step did that is over, and sees to it that experts get
slots (``admissions``: it moves them itself, or offers slots to the layers that miss them). Long prompts take their
misses from buffers that are filled a layer ahead (``staging``). On a CPU the launches are the torch twins of the
kernels: the same addresses and the same rounding, made to be compared with and not to be fast.

So a step may also be one CUDA graph. A replay runs launches and no line of this module, and what differs from step to
step lies in memory that stays where it is: the table, the offers, the rows that are padding, the counts. Some is
written before the replay and some read behind it, on the stream that it runs on, by ``begin_step`` and ``end_step``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from vllm_spac import admissions, components
from vllm_spac.admissions.base import Admission, Kernels, Parts
from vllm_spac.core import MoEShape, Step
from vllm_spac.errors import UnsupportedError
from vllm_spac.metrics import Counters
from vllm_spac.moves import ALIGNMENT, ExpertMemory
from vllm_spac.pointers import STEP_BYTES
from vllm_spac.policies.base import Policy
from vllm_spac.residency import NOWHERE, Residency
from vllm_spac.staging import ROWS, ExpertBuffers, Staging
from vllm_spac.streams import capturing, streams
from vllm_spac.tiers.base import ExpertStore

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")  # what the kernels compute
MAX_EXPERTS = 1024  # of a layer; what the kernels' routing takes
_TENSORS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
_FILL_BATCH = 16


def check(shape: MoEShape) -> None:
    """Refuse experts that the kernels cannot read; possible before anything is loaded.

    Raises:
        UnsupportedError: names what does not fit and the execution that takes it.
    """
    d, ff = shape.tensors["w2_weight"].shape
    odd = [name for name, spec in shape.tensors.items() if spec.nbytes % ALIGNMENT]
    reason = None
    if set(shape.tensors) not in ({*_TENSORS[:2]}, {*_TENSORS}):
        reason = f"experts of {', '.join(sorted(shape.tensors))}"
    elif shape.tensors["w13_weight"].shape != (2 * ff, d):
        reason = f"experts whose activation has no gate (w13 is {list(shape.tensors['w13_weight'].shape)})"
    elif odd:
        reason = f"experts whose {odd[0]} is no multiple of {ALIGNMENT} bytes"
    elif shape.experts > MAX_EXPERTS:
        reason = f"layers of more than {MAX_EXPERTS} experts"
    elif 2 * ff * d >= 2**31:
        reason = "experts of 2**31 weights and more"
    if reason is not None:
        raise UnsupportedError(
            f"spac: execution=pointers cannot run {reason}; use --spac-execution slots, which loads missing experts "
            "into slots and runs vLLM's own kernel"
        )


class StreamedPool:
    """Slots shared by all layers of one shape, the table of their experts, and the launches that read it.

    Args:
        shape: the layers, experts and tensors: ``w13_weight`` [2 ff, d], ``w2_weight`` [d, ff], and both biases or
            none, as in the checkpoint.
        slots: number of slots, from ``shape.top_k`` to ``shape.total``.
        policy: says who makes room; owned.
        store: holds every expert in memory that the device can address; owned.
        tensors: name -> slots of shape [slots, ...], on the device that computes.
        path: name of the store in the counters.
        rows: the most of a forward that is padded.
        admission: how missed experts get slots, a name of ``admissions``.
        step_bytes: of ``step``: bytes that are on their way into slots at once, at most, but one expert at least; 0:
            none moves.
        staged: forwards of many rows read what has no slot from buffers of ``staging_bytes``, else in place.
        poison: fill slots with NaN before they are written; for tests.
    """

    def __init__(
        self,
        shape: MoEShape,
        slots: int,
        policy: Policy,
        store: ExpertStore,
        tensors: Mapping[str, Tensor],
        *,
        path: str,
        rows: int,
        admission: str = admissions.DEFAULT,
        step_bytes: int = STEP_BYTES,
        staged: bool = False,
        poison: bool = False,
    ) -> None:
        assert shape.top_k <= slots <= shape.total
        check(shape)
        self.shape = shape
        self.counters = Counters()
        self.tensors = tensors
        self.store = store
        self._path = path
        device = next(iter(tensors.values())).device
        self._compute, copy = streams(device)
        self._kernels = _kernels(device)
        memory = ExpertMemory(store, tensors, shape.total, poison)
        parts = Parts(shape, slots, policy, memory, self.counters, self._compute, copy, self._kernels, path, step_bytes)
        self.admission: Admission = components.build("admissions", admission, parts=parts)
        self._buffers = self._staging = None
        if staged and slots < shape.total:
            self._buffers = ExpertBuffers(store, memory, tensors, poison)
            self._staging = Staging(self._buffers, len(shape.layers), self._compute, copy)
        self._tables = {name: table.view(-1, shape.experts) for name, table in memory.table.items()}
        self._counts = self.admission.counts.view(-1, shape.experts)
        # int32 [rows, 1]: 0 in the rows of requests, -1 in those behind them.
        self._padding = torch.zeros(rows, 1, dtype=torch.int32, device=device)
        self._rows = rows  # that are 0
        self._step: Step | None = None
        self._staged = False  # some layer of the step

    keeps_bits = False  # the kernels sum in another order than vLLM's

    @property
    def residency(self) -> Residency:
        return self.admission.residency

    @property
    def staged(self) -> bool:
        """Whether forwards of many rows read what has no slot from buffers."""
        return self._staging is not None

    @property
    def holds_all(self) -> bool:
        """Whether every expert has its slot, so that nothing is ever decided or moved."""
        return self.residency.slots == self.shape.total

    # -- between steps -------------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """A forward of the target model starts for real requests: see to slots, as its admission has it."""
        self._step, self._staged = step, False
        self._pad_from(step.rows)
        if self._staging is not None:
            self._staging.begin()
        self.counters.steps[step.kind] = self.counters.steps.get(step.kind, 0) + 1
        self.admission.begin(step)

    def _pad_from(self, rows: int) -> None:
        """Rows from ``rows`` on are padding, in this step and until the next; one launch if that is new."""
        if rows < self._rows:
            self._compute.submit(self._padding[rows : self._rows].fill_, -1)
        elif rows > self._rows:
            self._compute.submit(self._padding[self._rows : rows].fill_, 0)
        self._rows = rows

    def end_step(self) -> None:
        """The layers were launched; what comes until the next step (profiling, warm-up) is not counted."""
        step, self._step = self._step, None
        if step is not None:
            self.admission.end(step, staged=self._staged)

    def observe(self, layer: int, ids: Tensor) -> None:
        """The launches count what is routed; nothing is to be remembered."""

    def snapshot(self) -> dict:
        """The counters as plain data, up to the last step whose counts have come."""
        self.admission.take()
        return self.counters.snapshot()

    # -- a layer -------------------------------------------------------------------------------------------

    def run(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, activation: str, out: Tensor) -> Tensor:
        """Routed experts of one layer. No host synchronisation: may be captured in a CUDA graph, which is never staged.

        Rows behind those of the step are padding and run nothing: in a graph, behind those of the step that replays it.

        Args:
            layer: number of the layer in ``shape.layers``.
            x: [T, d] of the experts' dtype.
            weights: [T, k] float32; a pair with weight 0 is left out.
            ids: [T, k] int32 or int64; ids outside 0 ... experts - 1 are padding and left out.
            activation: one of ``ACTIVATIONS``.
            out: [T, d] like x, is overwritten.
        """
        ff = self.shape.tensors["w2_weight"].shape[1]
        captured = capturing(ids)
        if captured or (self._step is not None and self._rows < len(ids)):
            assert len(ids) <= len(self._padding), "a forward of more rows than was said"
            ids = ids | self._padding[: len(ids)]
        weights, ids = weights.float().contiguous(), ids.contiguous()
        with self._reading(layer, ids, weights, captured) as tables:
            w13, w2, b13, b2 = map(tables.get, _TENSORS)
            return self._kernels.grouped_gemm(
                x.contiguous(), w13, w2, weights, ids, ff, b13, b2, activation, out=out, counts=self._counts[layer]
            )

    @contextlib.contextmanager
    def _reading(self, layer: int, ids: Tensor, weights: Tensor, captured: bool) -> Iterator[Mapping[str, Tensor]]:
        """The tables that the launch of a layer reads, name -> int64 [experts]."""
        if self._staging is None or captured or ids.numel() < ROWS * self.shape.experts:
            self.admission.enter(layer, ids, weights)
            yield {name: table[layer] for name, table in self._tables.items()}
            return
        slots = self.admission.slots().reshape(len(self.shape.layers), -1)  # does not change within a staged step
        with self._staging.layer(layer, slots) as buffer:
            yield self._buffers.tables[buffer]
        if self._step is not None:
            self._staged = True
            missing = int((slots[layer] == NOWHERE).sum())
            self.counters.moved(f"{self._path} staged", missing * self.shape.expert_bytes)

    # -- start and end -------------------------------------------------------------------------------------

    def fill(self) -> Iterator[int]:
        """Copy experts into the free slots, an equal share of each layer, before anything runs; yields how many.

        With a slot for each expert, slot and key are the same number.
        """
        layers, slots = len(self.shape.layers), self.residency.slots
        for layer in range(layers):
            share = slots // layers + (layer < slots % layers)
            for start in range(0, share, _FILL_BATCH):
                batch = range(start, min(start + _FILL_BATCH, share))
                keys = [self.shape.key(layer, expert) for expert in batch]
                for key in keys:
                    slot = self.admission.seat(key)
                    self.store.read(key, {name: tensor[slot] for name, tensor in self.tensors.items()})
                self.admission.seated(keys)
                yield len(keys)

    def close(self) -> None:
        """Finish the copies in flight and give back the store."""
        self.admission.close()
        self.store.close()


def _kernels(device: torch.device) -> Kernels:
    """What is launched on ``device``."""
    if device.type == "cpu":
        from vllm_spac.kernels.reference import admit, fetch, grouped_gemm
    else:
        from vllm_spac.kernels.admit import admit
        from vllm_spac.kernels.fetch import fetch
        from vllm_spac.kernels.grouped_gemm import grouped_gemm
    return Kernels(grouped_gemm, admit, fetch)
