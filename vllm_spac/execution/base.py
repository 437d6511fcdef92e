"""The contract of an execution: how the rows of a layer run over experts of which only some have a slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.cache.sizing import resolve
from vllm_spac.core import MoEShape, Step
from vllm_spac.errors import UnsupportedError
from vllm_spac.metrics import Counters
from vllm_spac.policies.base import Policy
from vllm_spac.tiers.base import ExpertStore

if TYPE_CHECKING:
    from vllm_spac.balancers.base import Balancer
    from vllm_spac.config import Slots, SpacConfig
    from vllm_spac.execution._exchange import Exchange
    from vllm_spac.executors._thread import ExecutorThread


class LayerKernel(Protocol):
    """vLLM's kernel of one layer, over what its parameters hold: the slots, or the layer's own experts if all have one.

    Attributes:
        activation: name of the layer's activation.
        takes_slots: it takes slots in place of experts, as a CPU's does. A GPU's sorts rows by the experts of a layer,
            and there may be more slots: it takes the layer's own ids and a map from these to slots.
    """

    activation: str
    takes_slots: bool

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        """The sum over each row's experts of weight * expert(row).

        Args:
            x: [rows, hidden].
            weights: [rows, top_k].
            ids: [rows, top_k], experts of the layer, or slots if ``takes_slots`` and not every expert has its slot.
            slot_of: int32 [experts] on the device, the slot of each expert that ``ids`` names.
            rows: with ``slot_of``, rows of the forward that these are a part of: tiles are chosen as for all of them.
        """


@dataclass(frozen=True)
class LayerFacts:
    """What a layer computes, as far as an execution may have to refuse it.

    Attributes:
        limit, alpha: of the activation, where it has any.
        weighs_input: router weights multiply the input of an expert and not its output.
        quantised: name of vLLM's method of quantisation, None for plain weights.
    """

    name: str
    activation: str
    limit: float | None = None
    alpha: float | None = None
    weighs_input: bool = False
    quantised: str | None = None


class Rows(NamedTuple):
    """What is known of the rows of a forward.

    Attributes:
        real: rows that belong to requests, the first ones; all of them in a dummy run.
        as_routed: each row is a request's and runs what its router chose: no expert is -1.
        record: called with (layer, ids, weights) of the real rows, both [real, top_k], before they run; may be None.
    """

    real: int
    as_routed: bool = False
    record: Callable[[int, Tensor, Tensor], None] | None = None


class Room(NamedTuple):
    """Fast memory of the experts of one shape: slots, whether prompts are staged beside them, and bytes of both."""

    slots: int
    staged: bool
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """What an execution is built from.

    Attributes:
        policy, store: owned by the execution.
        tensors: name -> slots of shape [room.slots, ...] on the device that computes.
        path: name of the store in the counters.
        rows: of the largest forward.
        exchange: brings small tensors from the device to the host and back; None on a CPU.
    """

    shape: MoEShape
    room: Room
    policy: Policy
    store: ExpertStore
    tensors: Mapping[str, Tensor]
    path: str
    rows: int
    config: SpacConfig
    exchange: Exchange | None = None


class Execution(ABC):
    """Runs all layers of one shape; owns their slots, its policy and its store. Called by one thread.

    ``begin_step``, then ``forward`` for each layer, then ``end_forward``. What runs outside of a step (profiling,
    warm-up) is not counted.

    Attributes:
        needs_host: layers wait for the host unless every expert has its slot: the CPU may compute some of the experts,
            policies are told which layer asks, and no CUDA graph can hold a layer.
        needs_addressable_store: missing experts are read where they are stored.
        keeps_bits: vLLM's own kernel computes every expert; else results are exact up to rounding. An instance may know
            better than its class.
        layout: of experts in slots and in the store: ``kernel``, what vLLM's kernel reads, or ``plain``, the
            checkpoint's.
        knobs: names of the knobs that mean something with this execution, and nothing with those that do not name them.
        offline: why no engine can serve with it; empty if it can.
        tensors: name -> slots of shape [slots, ...] on the device that computes.
        holds_all: each expert has its slot, so that nothing is ever decided or moved.
    """

    needs_host: ClassVar[bool] = True
    needs_addressable_store: ClassVar[bool] = False
    keeps_bits: bool = True
    layout: ClassVar[Literal["plain", "kernel"]] = "kernel"
    knobs: ClassVar[frozenset[str]] = frozenset()
    offline: ClassVar[str] = ""

    shape: MoEShape
    store: ExpertStore
    tensors: Mapping[str, Tensor]
    counters: Counters
    holds_all: bool

    @classmethod
    @abstractmethod
    def of(cls, context: ExecutionContext) -> Self:
        """An instance with empty slots; ``fill`` comes next."""

    # -- before anything is loaded -------------------------------------------------------------------------

    @classmethod
    def check_layer(cls, layer: LayerFacts) -> None:
        """Refuse a layer that it cannot compute.

        Raises:
            UnsupportedError: names what does not fit and the execution that takes it.
        """

    @classmethod
    def check_shape(cls, shape: MoEShape) -> None:
        """Refuse experts that it cannot read; raises as ``check_layer``."""

    @classmethod
    def divide(cls, slots: Slots, staging: str, shape: MoEShape, free_bytes: int) -> Room:
        """What the layers of ``shape`` take of ``free_bytes`` of fast memory, by the knobs ``slots`` and ``staging``.

        Raises:
            ConfigError: as ``sizing.resolve``.
        """
        count = resolve(slots, shape, free_bytes)
        return Room(count, False, count * shape.expert_bytes)

    # -- serving -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def residency(self) -> Residency:
        """Which expert has which slot, as far as the host knows."""

    @abstractmethod
    def fill(self) -> Iterator[int]:
        """Load experts into the free slots, an equal share of each layer; yields how many were loaded.

        With a slot for each expert, slot and key are the same number.
        """

    def waits_for_host(self, kernel: LayerKernel) -> bool:
        """Whether layers wait for the host, so that no CUDA graph can hold them."""
        return self.needs_host

    @abstractmethod
    def begin_step(self, step: Step) -> None:
        """A forward of the target model starts for real requests."""

    @abstractmethod
    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        """Routed experts of one layer, [rows, hidden] like ``x``.

        Args:
            layer: number of the layer in ``shape.layers``.
            x: [rows, hidden].
            weights: [rows, top_k].
            ids: [rows, top_k], experts; -1, or anything in the rows that are not real, for none.

        Raises:
            SpacError: the layer could not be computed; the cause is attached.
        """

    @abstractmethod
    def end_forward(self) -> None:
        """The layers are done, or failed; what comes until the next step is not counted."""

    @abstractmethod
    def snapshot(self) -> dict:
        """The counters as plain data, up to the last step."""

    def resident(self, layer: int) -> Tensor:
        """bool [experts] on the CPU: which experts of a layer have a slot."""
        first = layer * self.shape.experts
        return torch.from_numpy(self.residency.slot_of[first : first + self.shape.experts] != NOWHERE)

    def balance(self, balancer: Balancer, thread: ExecutorThread) -> None:
        """From now on ``balancer`` gives some of the missing experts to ``thread``, which is owned then.

        Raises:
            UnsupportedError: no layer asks the host.
        """
        raise UnsupportedError(f"spac: {type(self).__name__} computes no experts on the CPU")

    def describe(self) -> str:
        """A few words for the start-up line beside its name, or nothing."""
        return ""

    def caveat(self) -> str | None:
        """What whoever serves with it on this device should know, if anything."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop what runs in the background and give back the store."""


def refusal(name: str, reason: str) -> UnsupportedError:
    """The error of an execution ``name`` that cannot run ``reason``; names the one that takes every layer."""
    return UnsupportedError(
        f"spac: execution={name} cannot run {reason}; use --spac-execution slots, which loads missing experts "
        "into slots and runs vLLM's own kernel"
    )
