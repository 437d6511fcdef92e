"""The contract of a predictor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

START = -1  # in place of a layer's number: the step has not begun


class Signal(StrEnum):
    """Input that a predictor may need."""

    COUNTS = "counts"  # rows that selected each expert, after a step: ``Predictor.observe_step``
    ROUTER_INPUT = "router_input"  # what a layer's router reads, before the layer's experts are loaded
    ROUTING = "routing"  # what that router chose
    DRAFT_ROUTING = "draft_routing"  # what a draft model's routers chose for the token of a row; from before the step
    DRAFT_GATES = "draft_gates"  # what the model's routers score highest of the drafter's layers; from before the step
    FUTURE = "future"  # what all routers of the step will choose; offline only


# ``PredictorInputs.draft_ids``, known while drafts are made; a predictor needs at most one.
DRAFTING = frozenset({Signal.DRAFT_ROUTING, Signal.DRAFT_GATES})


@dataclass(frozen=True, eq=False)
class PredictorInputs:
    """What is known of the rows of a step when a predictor is asked; inputs that it does not need are None.

    Attributes:
        layer: ``START`` before the first layer, else the layer whose router has just chosen, before its experts are
            loaded.
        ids, weights: int and float [rows, k], the layer's experts and their routing weights.
        draft_ids: int [rows, layers, k], the experts that the drafter's routers, or the model's own on what the
            drafter computed, chose for the token of a row, the one with the greatest weight first; -1 for a row whose
            token the drafter has not read, such as the last draft.
    """

    layer: int
    hidden: Tensor | None = None  # float [rows, d], input of the layer's router, without padding
    ids: Tensor | None = None
    weights: Tensor | None = None
    future: Tensor | None = None  # int [layers, rows, k], the experts of all layers
    draft_ids: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Guess:
    """Scores of the experts of one layer, or of several consecutive ones.

    Attributes:
        first: key of the first expert that is scored; layer number times experts per layer. A layer that has run
            already is scored for the next step.
        scores: [rows, n], or [1, n] if all rows have the same; n is a multiple of the experts per layer. The greater,
            the likelier; comparable between experts of one row and layer only. -inf: the row does not name this
            expert, even if it then names fewer than it will use.
    """

    first: int
    scores: Tensor
    logits: bool = False  # their softmax is the router's distribution, as far as the predictor knows it

    @classmethod
    def of_chosen(cls, ids: Tensor, keys: int) -> Self:
        """Returns a guess about all layers by which a row names its experts alone, the first one as the likeliest.

        Args:
            ids: as ``PredictorInputs.draft_ids``; a row with -1 names none.
        """
        rows, layers, names = ids.shape
        experts, ids = keys // layers, ids.long()
        places = ids.new_ones(names).cumsum(0).flip(0).float().expand(ids.shape)  # waits for no device
        scores = places.new_full((rows, layers, experts + 1), -math.inf)  # the last column is for -1
        scores.scatter_(2, ids.where(ids >= 0, experts), places)
        return cls(0, scores[:, :, :experts].reshape(rows, -1))


class Predictor(ABC):
    """Scores experts by how likely they will be needed. Moves nothing, and is deterministic.

    ``guesses`` is called once at the start of a step and, if ``reach`` is not 0, in each layer as soon as its router
    has chosen; a predictor that needs a signal of ``DRAFTING`` also while a drafter drafts, as at the start of a step,
    about the rows that are known by then. The caller ranks experts over layers, and decides what to read or to keep
    because of a guess. What it is passed is on the device that runs the layers, and so are its scores; nothing that it
    does there may wait for that device.

    Built with ``num_experts``, the number of keys (the experts of all layers together), or from a file of
    ``vllm-spac predictors train``.

    Attributes:
        needs: the signals that it must be passed; a prefetcher refuses a predictor that needs a signal it lacks.
        reach: layers that it sees ahead of a router; 0: it is asked at the start of a step only, for all of its layers.
        on_device: it can look ahead without the host, also in CUDA graphs: see ``Trained.of_next``.
        needs_file: it is built from a file of ``vllm-spac predictors train``, which an engine must be given.
        from_checkpoint: without a file an engine computes it from the checkpoint, see ``Trained.computed``.
        scores: int64 [keys], of a predictor that needs counts: its scores after the last step; 0 for an expert that is
            not worth fetching. Updates replace the array, none writes to it.
    """

    needs: frozenset[Signal] = frozenset({Signal.COUNTS})
    reach: int = 0
    offline: ClassVar[str] = ""  # why no engine can serve with it; empty if one can
    on_device: ClassVar[bool] = False
    needs_file: ClassVar[bool] = False
    from_checkpoint: ClassVar[bool] = False
    scores: np.ndarray

    @classmethod
    def observes_layers(cls) -> bool:
        """Whether it is asked in steps and layers, rather than told counts after each step."""
        return cls.needs_file or Signal.COUNTS not in cls.needs

    @classmethod
    def names_ahead(cls) -> bool:
        """Whether it may be asked in each layer for the next one."""
        return Signal.ROUTER_INPUT in cls.needs

    @classmethod
    def follows_drafts(cls, options: Mapping[str, Any]) -> bool:
        """Whether it takes ``gamma``, the draft tokens of a step, with these arguments, if that is not one of them."""
        return False

    @abstractmethod
    def guesses(self, inputs: PredictorInputs) -> Iterable[Guess]:
        """Returns scores of layers that have not run, from what is known now; nothing if it knows nothing about them.

        Args:
            inputs: the step at its start, or one of its layers; its tensors are not modified.
        """

    def observe_step(self, counts: np.ndarray) -> None:
        """Updates the scores after a step (``Signal.COUNTS``).

        Args:
            counts: int [keys], rows that selected each expert, or float, the sum of their votes if these are weighted;
                ``NOT_RUN`` (-1) for the experts of a layer that did not run.
        """
