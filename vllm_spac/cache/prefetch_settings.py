"""Settings of the prefetchers, and the predictors that they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from vllm_spac import components
from vllm_spac.config.rules import check_draft_arguments
from vllm_spac.config.types import PREFETCHING
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.predictors.base import DRAFTING, Guess, Predictor, PredictorInputs, Signal
from vllm_spac.errors import ConfigError, brief

if TYPE_CHECKING:
    from vllm_spac.config.config import SpacConfig

# To predictors that look at layers.
PASSED = frozenset({Signal.ROUTER_INPUT, Signal.ROUTING}) | DRAFTING


@dataclass(frozen=True, kw_only=True)
class PrefetchSettings:
    """Settings of the prefetcher.

    The ablations of the MoE-SpAc paper: ``prefetch="off"`` is "w/o SG-Prefetcher"; policy ``lru`` with
    ``prefetch="utility"`` is "w/o SG-Evictor" (policy ``utility@recycle=True`` is the paper's); of ``options``,
    ``upper=1`` is "w/o SpecUE" and ``boundaries=(3, 1)`` "w/o AdaBC"; ``threshold=2`` is "w/o HetWB".

    Attributes:
        prefetch: ``off``, or a predictor: a name of ``predictors/`` or ``package.module:Class``. The scores of one that
            counts must reach the threshold; one that looks at layers is asked in each of them (``lookahead``).
        depth: maximum number of experts that have a slot and are not read yet. The experts they replaced are evicted
            while they wait.
        options: arguments of the predictor. Without any, the scores are those of a policy with the same predictor.
        extra: share of the experts that layers need which reads ahead may add, see ``Allowance``; None: no limit.
        next_layer: in forwards with many rows, also what the next layer is expected to use is read, see ``LayerUse``.
        k: experts that a row names in each layer, of a predictor that looks at drafts; None: as many as it uses.
        cutoff: SP-MoE's cutoff layer L_c, of such a predictor: it names experts of the first L_c layers alone, and all
            of them are read while drafts are made, however many. None: it names those of all layers, and how many of
            them are read by then is learned, see ``decisions.cutoff``.
        drafts: draft tokens of a request in a speculative step, for a predictor that ``follows_drafts`` and has no
            argument ``gamma``; None: not known.

    Raises:
        ConfigError: there is no such predictor, it needs a signal that the prefetcher cannot provide or a file, or a
            number is out of range.
        ValueError: the predictor refuses its options.
    """

    prefetch: str = "off"
    threshold: int = 1  # the lowest score worth fetching (the paper's tau), where no balancer decides it
    depth: int = 16
    background: int | None = None  # maximum number of prefetch reads in flight; None is half of the I/O threads
    options: Mapping[str, Any] = field(default_factory=dict)
    built: Predictor | None = None  # the predictor, if it is not built from its name and options
    extra: float | None = None
    next_layer: bool = False
    k: int | None = None
    cutoff: int | None = None
    drafts: int | None = None

    def __post_init__(self) -> None:
        known = components.serving("predictors")
        if self.built is None and self.prefetch not in ("off", *known) and ":" not in self.prefetch:
            raise ConfigError(f"spac: prefetch={self.prefetch!r} is not known; use off or {', '.join(known)}")
        if self.threshold < 1 or self.depth < 1 or (self.background is not None and self.background < 1):
            raise ConfigError("spac: threshold, depth and background of the prefetcher must be at least 1")
        if self.extra is not None and not 0 <= self.extra <= 1:
            raise ConfigError("spac: extra of the prefetcher must be from 0 to 1")
        if self.built is not None and self.options:
            raise ConfigError(f"{self.prefetch} has no argument {brief(next(iter(self.options)))}; it has none")
        named = self.built is None and self.prefetch != "off"
        if named and components.find("predictors", self.prefetch).needs_file:
            raise ConfigError(
                f"spac: prefetch={self.prefetch!r} is trained for a model; use --spac-prefetch "
                f"{self.prefetch}@file=FILE, from `vllm-spac predictors train`"
            )
        self._check_needs()  # also refuses wrong options now, not in the first forward

    def _check_needs(self) -> None:
        if self.built is not None:
            return
        needs, counts = self.build(1).needs, not self.observes_layers
        others = needs - {Signal.COUNTS} if counts else needs - PASSED
        if others:
            raise ConfigError(
                f"spac: prefetch={self.prefetch!r} looks at {', '.join(sorted(others))}, which is not passed on to "
                f"predictors{' that count' if counts else ''}; use off or utility"
            )

    @classmethod
    def of(cls, spec: str, **more: Any) -> Self:
        """Returns the settings ``name@argument=value@...``: those of ``PREFETCHING``, and arguments of the predictor.

        Args:
            more: settings that the spec cannot have, and defaults of others.

        Raises:
            ConfigError: as the constructor, also for arguments that the predictor refuses.
        """
        name, options = components.parse(spec)
        check_draft_arguments(spec)
        own = {argument: options.pop(argument) for argument in PREFETCHING if argument in options}
        own.pop(components.FILE, None)  # ``built`` is from there
        if own.get("cutoff") is not None:
            own = {"depth": PREFETCHING["depth"].values[1]} | own  # the cutoff bounds what waits
        try:
            return cls(prefetch=name, options=options, **(more | own))
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"spac: prefetch={brief(spec)} cannot be built: {error}") from error

    @classmethod
    def configured(cls, config: SpacConfig, spec: str, built: Predictor | None, **more: Any) -> Self:
        """Returns the settings ``spec``, as in ``of``, as an engine uses them, with ``more``; raises as ``of``."""
        return cls.of(spec, built=built, extra=config.prefetch_share, next_layer=True, **more)

    @cached_property
    def observes_layers(self) -> bool:
        """Whether the predictor looks at layers; else it counts, or nothing is prefetched."""
        kind = None if self.built is None else type(self.built)
        if kind is None and self.prefetch != "off":
            kind = components.find("predictors", self.prefetch)
        return kind is not None and kind.observes_layers()

    def build(self, experts: int) -> Predictor:
        """Returns a predictor of ``experts`` experts."""
        if self.built is not None:
            return self.built
        return self._build("utility" if self.prefetch == "off" else self.prefetch, experts, self.options)

    def predictor_beside(self, policy: Policy, experts: int) -> Predictor:
        """Returns the predictor whose scores the prefetcher reads, or a balancer even if nothing is prefetched.

        It reads the scores of ``policy`` if that runs the same predictor.
        """
        name = "utility" if self.observes_layers or self.prefetch == "off" else self.prefetch
        options: Mapping[str, Any] = {} if self.observes_layers else self.options
        if policy.predictor == name and not options:
            return _Lent(policy)
        return self._build(name, experts, options)

    def _build(self, name: str, experts: int, options: Mapping[str, Any]) -> Predictor:
        follows = self.drafts is not None and components.find("predictors", name).follows_drafts(options)
        given = {"gamma": self.drafts} if follows else {}
        return components.build("predictors", name, num_experts=experts, **given | dict(options))


class _Lent(Predictor):
    """The scores of the eviction policy, which must have observed a step before this predictor does."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.scores = policy.scores

    def guesses(self, inputs: PredictorInputs) -> Iterable[Guess]:
        return ()  # the prefetcher reads the scores

    def observe_step(self, counts: np.ndarray) -> None:
        self.scores = self._policy.scores
