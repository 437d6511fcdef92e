"""The contract of an execution: how a layer's rows are computed when only some of its experts have a slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE, SlotOwners
from vllm_spac.cache.sizing import resolve
from vllm_spac.core import MoEShape, Step
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.errors import UnsupportedError
from vllm_spac.recording.metrics import Counters
from vllm_spac.storage.base import ExpertStore

if TYPE_CHECKING:
    from vllm_spac.cache.transfers import HostRows
    from vllm_spac.config.types import SlotCount
    from vllm_spac.cpu_kernels._thread import ExecutorThread
    from vllm_spac.decisions.balancers.base import Balancer
    from vllm_spac.decisions.predictors.base import Signal
    from vllm_spac.execution.exchange import Exchange
    from vllm_spac.recording.timeline_recorder import Timeline


class LayerKernel(Protocol):
    """vLLM's kernel of one layer. Its parameters are the slots, or the layer's own experts if all have a slot.

    Attributes:
        takes_slots: the kernel takes slot numbers in place of expert ids, as on a CPU. On a GPU the kernel sorts rows
            by the experts of a layer, and there may be more slots than these: it takes expert ids and a map to slots.
        by_expert: what a row gets from an expert may depend on that expert's other rows, and on nothing else; it is
            rounded, and a row's results are added in float32 in the order of its ids. Then experts may be computed one
            after another, each with all of its rows. Otherwise rows may be, each with all of its experts.
    """

    activation: str  # name of the layer's activation
    takes_slots: bool
    by_expert: bool

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        """Computes the sum over each row's experts of weight * expert(row).

        Args:
            x: [rows, hidden].
            weights: [rows, top_k].
            ids: [rows, top_k], experts of the layer, or slots if ``takes_slots`` and not every expert has its slot.
                With a process that holds some of the model's experts: those of the model, unless ``takes_slots``.
            slot_of: int32 [experts] on the device, the slot of each expert that occurs in ``ids``; experts of another
                process have none (-1) and add nothing.
            rows: with ``slot_of``, number of rows of the whole forward that ``x`` is a part of; tiles are chosen for
                that number.
        """


@dataclass(frozen=True)
class LayerFacts:
    """Properties of a layer because of which an execution may refuse it.

    Attributes:
        limit, alpha, beta: parameters of the activation, if it has any.
    """

    name: str  # name of the layer
    activation: str  # name of its activation
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None
    weighs_input: bool = False  # router weights multiply the input of an expert and not its output
    quantised: str | None = None  # name of vLLM's quantisation method, None for plain weights
    packed: bool = False  # whether ``checkpoint.repacking`` can pack its quantised weights for ``vllm_spac.kernels``


class Rows(NamedTuple):
    """Facts about the rows of a forward.

    Attributes:
        record: called with (layer, ids, weights) of the real rows, both [real, top_k], before they run; may be None.
        cut: some of them may run no expert: all their ids are -1, and their result is not used. The first row runs.
        guess: float [rows, N], scores of the experts of the next layer, where they decide what it will run; may be
            None.
    """

    real: int  # number of leading rows that belong to requests; all rows in a dummy run
    as_routed: bool = False  # every row belongs to a request and runs what its router chose: no expert is -1
    record: Callable[[int, Tensor, Tensor], None] | None = None
    cut: bool = False
    guess: Tensor | None = None


class Room(NamedTuple):
    """Fast memory of the experts of one shape."""

    slots: int  # number of slots
    nbytes: int  # of them


@dataclass(frozen=True)
class ExecutionContext:
    """What an execution is built from.

    Attributes:
        policy, store: owned by the execution.
    """

    shape: MoEShape
    slots: int  # number of slots, from ``shape.top_k`` to ``shape.total``
    policy: Policy
    store: ExpertStore
    tensors: Mapping[str, Tensor]  # name -> slots of shape [slots, ...] on the device that computes
    _: KW_ONLY
    path: str  # name of the store in the counters
    rows: int = 1  # number of rows of the largest forward
    io_threads: int = 1  # maximum number of reads in flight
    ahead: PrefetchSettings = field(default_factory=PrefetchSettings)  # what is read ahead of need
    host: HostRows | None = None  # host memory between the slots and the store, if any; owned by the execution
    exchange: Exchange | None = None  # copies small tensors between device and host; None on a CPU
    local_of: Tensor | None = None  # as in ``Execution``
    failed: Tensor | None = None  # as of ``ExpertDelivery``, where there are several ranks

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return next(iter(self.tensors.values())).device


class Execution(ABC):
    """Runs all layers of one shape; owns their slots, policy and store. Called by one thread.

    Call order: ``begin_step``, then ``forward`` for each layer, then ``end_forward``. What runs outside of a step
    (profiling, warm-up) is not counted.

    Attributes:
        needs_host: layers wait for the host unless every expert has its slot. Then ``Policy.begin_layer`` is called,
            any balancer may divide them, and layers cannot be captured into a CUDA graph.
        keeps_bits: vLLM's own kernel computes every expert; else results are exact up to rounding. An instance may
            override its class.
        counts_votes: policies and predictors observe selections weighted by the rows' votes; else each row counts 1.
        layout: layout of experts in slots and in the store: ``kernel``, what vLLM's kernel reads, or ``plain``, that of
            the checkpoint.
        repacks: quantised experts are as ``checkpoint.repacking`` packs them for our kernels, whatever ``layout`` is.
        knobs: names of the knobs that have a meaning with this execution; with executions that do not list them they
            have none.
        residency: which expert has which slot; with decisions on the device, the latest state reported to the host.
        policy: what is evicted; with decisions on the device, by its formula.
        local_of: int64 [experts of the model], the number of each in ``shape``, -1 if another rank holds it; None: this
            process holds all of them.
    """

    needs_host: ClassVar[bool] = True
    reads_in_place: ClassVar[bool] = False  # kernels read missing experts in host memory
    keeps_bits: bool = True
    counts_votes: ClassVar[bool] = False
    layout: ClassVar[Literal["plain", "kernel"]] = "kernel"
    repacks: ClassVar[bool] = False
    knobs: ClassVar[frozenset[str]] = frozenset()
    offline: ClassVar[str] = ""  # why no engine can serve with it; empty if one can

    shape: MoEShape
    store: ExpertStore
    tensors: Mapping[str, Tensor]  # name -> slots of shape [slots, ...] on the device that computes
    counters: Counters
    residency: SlotOwners
    policy: Policy
    holds_all: bool  # each expert has its slot, so that nothing is ever decided or moved
    host: HostRows | None = None  # host memory between the slots and the store, if any
    local_of: Tensor | None = None
    balancer: Balancer | None = None  # decides which missing experts the CPU computes; None: it computes none
    signals: frozenset[Signal] = frozenset()  # what a predictor is passed of steps and layers

    @classmethod
    def of(cls, context: ExecutionContext) -> Self:
        """Returns an instance with empty slots, to be filled by ``fill``."""
        return cls(context)

    def __init__(self, context: ExecutionContext) -> None:
        self.shape, self.store, self.tensors = context.shape, context.store, context.tensors
        self.holds_all = context.slots == context.shape.total
        self.host, self.local_of, self.policy = context.host, context.local_of, context.policy
        self.counters = Counters()

    # -- before anything is loaded -------------------------------------------------------------------------

    @classmethod
    def check_layer(cls, layer: LayerFacts) -> None:
        """Refuses a layer that the execution cannot compute.

        Raises:
            UnsupportedError: the message names what is not supported and the execution that supports it.
        """

    @classmethod
    def check_shape(cls, shape: MoEShape) -> None:
        """Refuses experts that the execution cannot read; raises as ``check_layer``."""

    @classmethod
    def divide(cls, slots: SlotCount, shape: MoEShape, free_bytes: int) -> Room:
        """Returns the share of ``free_bytes`` of fast memory that the layers of ``shape`` take, by the knobs given.

        Raises:
            ConfigError: as ``sizing.resolve``.
        """
        count = resolve(slots, shape, free_bytes)
        return Room(count, count * shape.expert_bytes)

    @classmethod
    def ahead_bytes(cls, shape: MoEShape, ahead: PrefetchSettings) -> int:
        """Returns the bytes of fast memory, beside slots, for what is read ahead of need."""
        return 0

    # -- serving -------------------------------------------------------------------------------------------

    @abstractmethod
    def fill(self) -> Iterator[int]:
        """Loads the policy's ``first`` experts and an equal share of each layer into the free slots; yields how many.

        With a slot for each expert, slot and key are the same number.
        """

    def waits_for_host(self, kernel: LayerKernel) -> bool:
        """Whether layers wait for the host, so that they cannot be captured into a CUDA graph."""
        return self.needs_host

    def draft(self, read: Tensor) -> None:
        """As ``Runtime.observe_draft``; called if ``signals`` has a signal of ``DRAFTING``."""

    @abstractmethod
    def begin_step(self, step: Step) -> None:
        """Starts a forward of the target model for real requests."""

    @abstractmethod
    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        """Computes the routed experts of one layer; returns [rows, hidden] like ``x``.

        Args:
            layer: number of the layer in ``shape.layers``.
            x: [rows, hidden].
            weights: [rows, top_k].
            ids: [rows, top_k], experts of the model; -1 for none. Rows that are not real may contain any value.

        Raises:
            SpacError: the layer could not be computed; the cause is attached.
        """

    @abstractmethod
    def end_forward(self) -> None:
        """Called when the layers have finished or failed; what runs until the next step is not counted."""

    def cpu_layers(self) -> Sequence[Mapping[str, Tensor]]:
        """Returns what the CPU computes from, by layers; before a disk all rows of host memory as one.

        Raises:
            StoreError: as ``ExpertStore.layer``: nothing is in memory.
        """
        if self.host is not None and not self.store.addressable:
            return [self.host.tensors]
        return [self.store.layer(number) for number in range(len(self.shape.layers))]

    def check_results(self) -> None:
        """Called after a step has run on the device, before its tokens are given to anyone.

        Raises:
            SpacError: some layer did not have its experts, so that they are wrong.
        """

    @abstractmethod
    def snapshot(self) -> dict:
        """Returns the counters as plain data, up to the last step."""

    def resident(self, layer: int) -> Tensor:
        """Returns bool [experts] on the CPU: which experts of a layer have a slot."""
        first = layer * self.shape.experts
        return torch.from_numpy(self.residency.slot_of[first : first + self.shape.experts] != NOWHERE)

    def attach_balancer(self, balancer: Balancer, thread: ExecutorThread, checked: bool = False) -> None:
        """Lets ``balancer`` assign some of the missing experts to ``thread`` from now on; owns ``thread`` afterwards.

        Args:
            checked: only while steps are shorter with it.

        Raises:
            UnsupportedError: this execution gives the CPU none, or not as this balancer or executor needs it.
        """
        raise UnsupportedError(f"spac: {type(self).__name__} computes no experts on the CPU")

    @property
    def queued(self) -> int:
        """Number of reads ahead of need that are queued or in flight."""
        return 0

    def watch(self, timeline: Timeline | None, first: int) -> None:
        """Records loads and CPU experts in ``timeline`` from now on; None ends that. By default there are none.

        Args:
            first: number of experts of the executions before this one, from which its experts are numbered.
        """

    def describe(self) -> str:
        """Returns a few words for the start-up line in addition to the name, or an empty string."""
        return ""

    def caveat(self) -> str | None:
        """Returns a warning to log when an engine serves with it on this device, or None."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stops background work and closes the store."""
