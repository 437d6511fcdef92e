"""Immutable types that all parts of the package share; they import no vLLM, touch no device and have no effects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import torch

from vllm_spac.kernels.formats import Format

NO_EXPERT = -1  # in place of the experts of a row that runs none
NOT_RUN = -1  # in counts per expert: its layer did not run in this step
PROMPT_ROWS = 32  # the last ones of a prompt, of which policies learn what its answer selects


class RowKind(StrEnum):
    """What the rows of one request are computed for in a forward."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows ``[start, stop)`` of one request; the last ``drafts`` of them are draft tokens.

    Attributes:
        weights: probability that each row is reached, the request's first row first: 1 for a row that is certain, for
            a draft row the product of the draft's probabilities along its path. None: 1 for all, or not known.
        parents: what each draft follows: 0 the row before the drafts, i the i-th of them. None: a chain.
    """

    start: int
    stop: int
    kind: RowKind
    drafts: int = 0
    weights: tuple[float, ...] | None = None
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.parents is None or len(self.parents) == self.drafts, "a parent for each draft"
        assert self.weights is None or len(self.weights) == self.stop - self.start, "a weight for each row"

    def windows(self, rows: int) -> list[RequestRows]:
        """Returns consecutive parts of at most ``rows`` rows each, without their drafts."""
        parts = []
        for start in range(self.start, self.stop, rows):
            stop, first = min(start + rows, self.stop), start - self.start
            weights = None if self.weights is None else self.weights[first : first + stop - start]
            parts.append(RequestRows(start, stop, self.kind, weights=weights))
        return parts


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of the target model over the flattened rows of a batch.

    Attributes:
        draft: [rows, layers, k] on the device that runs the layers, what was chosen when the draft model read the token
            of each row (``PredictorInputs.draft_ids``); None where nothing looks at it.
        bounds: most experts that all rows together run, of each layer of the model; None: as many as they choose.
    """

    requests: tuple[RequestRows, ...] = ()  # empty for dummy and profile runs, whose rows belong to no request
    draft: torch.Tensor | None = field(default=None, compare=False)
    bounds: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def rows(self) -> int:
        """Number of rows that belong to requests; further rows of a forward are padding."""
        return max((request.stop for request in self.requests), default=0)

    @property
    def prompts(self) -> bool:
        """Whether the step contains prefill rows."""
        return any(request.kind == RowKind.PREFILL for request in self.requests)

    @property
    def prompt_end(self) -> slice | None:
        """The last rows, at most ``PROMPT_ROWS``, of a step that has prompts alone; None of others."""
        if not self.requests or any(request.kind != RowKind.PREFILL for request in self.requests):
            return None
        return slice(max(0, self.rows - PROMPT_ROWS), self.rows)

    @property
    def leading(self) -> int:
        """Number of rows before the first prefill row: all that generate, where a runner puts those first."""
        return min((request.start for request in self.requests if request.kind == RowKind.PREFILL), default=self.rows)

    @property
    def generating(self) -> list[slice]:
        """The rows of requests that decode or verify, in as few slices as possible; prefill rows are left out."""
        parts: list[slice] = []
        for request in self.requests:
            if request.kind == RowKind.PREFILL:
                continue
            if parts and parts[-1].stop == request.start:
                parts[-1] = slice(parts[-1].start, request.stop)
            else:
                parts.append(slice(request.start, request.stop))
        return parts

    @property
    def generating_weights(self) -> list[float] | None:
        """Weights of the rows of ``generating``, in their order; None if all are 1."""
        return weights_of([request for request in self.requests if request.kind != RowKind.PREFILL])

    @property
    def kind(self) -> str:
        """``prefill``, ``decode`` or ``verify``; ``mixed`` for several of them; ``dummy`` for none."""
        kinds = {str(request.kind) for request in self.requests}
        return kinds.pop() if len(kinds) == 1 else ("mixed" if kinds else "dummy")


def selected(chosen: Iterable[tuple[int, np.ndarray]], layers: int, experts: int) -> np.ndarray | None:
    """Returns bool [rows, layers * experts], the experts that each row selected; None if no layer ran.

    Args:
        chosen: layers, and what the rows selected there: int [rows, top_k], below 0 for nothing.
    """
    found: np.ndarray | None = None
    for layer, ids in chosen:
        if found is None:
            found = np.zeros((len(ids), layers, experts + 1), dtype=bool)
        np.put_along_axis(found[:, layer], ids.astype(np.int64).clip(min=-1), True, axis=1)  # nothing: the last column
    return None if found is None else found[:, :, :-1].reshape(len(found), -1)


def settled_experts(layers: int, experts: int, count: int) -> list[int]:
    """Returns the keys of ``count`` experts that have slots for good: the last ones of each layer, in equal shares."""
    shares = [count // layers + (layer < count % layers) for layer in range(layers)]
    ends = range(experts, (layers + 1) * experts, experts)
    return [key for end, share in zip(ends, shares, strict=True) for key in range(end - share, end)]


def weights_of(requests: Sequence[RequestRows]) -> list[float] | None:
    """Weights of the rows of ``requests``, in their order; None if no request has any."""
    if all(request.weights is None for request in requests):
        return None
    ones = ((1.0,) * (request.stop - request.start) for request in requests)
    return [weight for request, one in zip(requests, ones, strict=True) for weight in request.weights or one]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor of one expert, in the layout its kernel reads."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class MoEShape:
    """A group of MoE layers whose experts are interchangeable in memory: the same tensors, the same kernel layout."""

    layers: tuple[str, ...]  # names of the MoE layers, in the order of execution
    experts: int  # routed experts per layer (N)
    top_k: int  # experts per token (k)
    tensors: dict[str, TensorSpec] = field(hash=False)  # name -> spec of each tensor of one expert
    # how quantised weights are stored for ``vllm_spac.kernels``; None: plain, or as vLLM's kernel reads them
    packed: Format | None = None

    @property
    def total(self) -> int:
        """Number of experts in all layers together."""
        return len(self.layers) * self.experts

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert (W_e)."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def key(self, layer: int, expert: int) -> int:
        """The integer that identifies expert ``expert`` of layer number ``layer``."""
        return layer * self.experts + expert

    def split(self, key: int) -> tuple[int, int]:
        """(layer number, expert) of a key."""
        return divmod(key, self.experts)


@dataclass(frozen=True, slots=True)
class Rates:
    """Costs in seconds, measured on this machine or taken from a profile; never literals."""

    fast: float  # computing one expert in fast memory (t_gpu), also for several rows
    stream: float  # copying one expert into fast memory (t_io)
    cpu: float  # computing one expert on the CPU for one row (t_cpu): its weights are read once
    # time per row of an expert on the CPU when arithmetic is the limit: an expert takes max(cpu, rows * cpu_row)
    cpu_row: float = 0.0
    draft: float = 0.0  # computing one draft token (t_draft)
    # per expert while link and CPU read at once, both counted: they share host memory; 0: neither slows the other
    memory: float = 0.0
