"""The contract of an executor."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.errors import ConfigError
from vllm_spac.kernels.types import Mail

# (x, weights, ids, experts) -> output, as ``CpuExperts.run``.
Kernel = Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Tensor]


class MailServer(Protocol):
    """Answers requests of a device without the interpreter."""

    def wake(self) -> None:
        """A step may make requests soon."""

    def failure(self) -> BaseException | None:
        """Returns why it answers no more; None while it does."""

    def close(self) -> None:
        """Ends after the request that it computes."""


class CpuExperts(ABC):
    """Computes experts on the CPU, one layer at a time. Called by one thread, always the same.

    Attributes:
        layout: layout of the experts. ``plain`` is ``w13_weight`` [experts, 2 * intermediate, hidden] (rows as in
            ``kernels.reference.grouped_gemm.gate_up``), ``w2_weight`` [experts, hidden, intermediate], and optionally
            ``w13_bias`` [experts, 2 * intermediate], ``w2_bias`` [experts, hidden]; ``kernel`` is the layout that the
            kernel of the slots reads.
        reads_packed: ``plain`` experts may be packed, as ``shape.packed`` says, with ``w13_scale`` and ``w2_scale``.
        released: set when kernels of the layers may run again. A new event, not yet set, for each ``run``, at whose end
            it is set; a ``run`` of an exclusive executor may set it earlier, once it needs nothing of theirs any more.

    Args:
        activation: one of ``kernels.formats.ACTIVATIONS``.
        kernel: the kernel of the slots, if it runs on the CPU; callable from any thread.

    Raises:
        ConfigError: it cannot run on this machine, or cannot compute these experts; the message names an alternative.
    """

    layout: ClassVar[Literal["plain", "kernel"]] = "plain"
    reads_packed: ClassVar[bool] = False
    exclusive: ClassVar[bool] = False  # no kernel of the layers may run concurrently; loads may
    answers: ClassVar[bool] = False  # it has a ``serve``, which ``plane=pointers`` needs
    offline: ClassVar[str] = ""  # why no engine can serve with it; empty if one can

    def __init__(self, shape: MoEShape, threads: int, activation: str, kernel: Kernel | None = None) -> None:
        self.shape = shape
        self.threads = threads
        self.activation = activation
        self.released = threading.Event()

    def prepare(self, experts: Mapping[str, Tensor]) -> None:
        """Prepares for the experts of a layer; called once per layer, before the first ``run``.

        Raises:
            ConfigError: they cannot be computed on this machine.
        """

    @abstractmethod
    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        """Computes the sum over each row's experts of weight * expert(row).

        Args:
            x: [m, hidden] on the CPU, in the dtype of the weights.
            weights: [m, top_k] float32, 0 for a pair that does not count.
            ids: [m, top_k], int32 or int64: experts of the layer; one may occur twice in a row.
            experts: name -> tensors of all experts of the layer, [experts, ...], in ``layout``; the same object for
                the same layer in every call.

        Returns:
            [m, hidden] on the CPU, in float32 or the dtype of ``x``.
        """

    def serve(self, mail: Mail, layers: Sequence[Mapping[str, Tensor]]) -> MailServer:
        """Answers the requests in ``mail`` from now on; ``run`` is not called before that has ended.

        Args:
            mail: memory that a device writes too, see ``vllm_spac.kernels.mailbox``.
            layers: the experts of each layer, as ``run`` takes them.
        """
        raise NotImplementedError

    @abstractmethod
    def describe(self) -> str:
        """Returns a few words for the start-up line."""

    def close(self) -> None:
        """Releases all resources; the executor is not used afterwards."""


def check_same(actual: Tensor, expected: Tensor, dtype: torch.dtype, terms: int, where: str) -> None:
    """Checks that two executions of the same experts in ``dtype`` differ by rounding only.

    Errors are relative to the largest element of ``expected``. Values rounded to ``dtype`` (an expert's intermediate
    activations, its result, the sum) are off by units of ``eps``; float32 sums of ``terms`` products by ``terms`` units
    of float32's ``eps``. A wrong layout, a wrong expert or zeros are off by about 1.

    Raises:
        ConfigError: they differ by more; the message begins with ``where``.
    """
    size = expected.float().abs().max()
    off = float((actual.float() - expected.float()).abs().max() / size)
    allowed = 8 * torch.finfo(dtype).eps + terms * torch.finfo(torch.float32).eps
    if not off <= allowed:  # also NaN
        raise ConfigError(
            f"spac: {where}: results differ by {off:.3g} of the largest element, rounding allows {allowed:.3g}"
        )
