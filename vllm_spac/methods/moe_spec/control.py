"""Applies an expert budget to a layer's routing: which rows vote, which are cut, and what is dropped (MoE-Spec)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.core import RowKind, Step
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.execution.rerouting import Rerouting
from vllm_spac.methods.moe_spec.host_cut import HostCut
from vllm_spac.methods.moe_spec.launches import BudgetLaunches, RoutedLayer, SpeculationLaunches
from vllm_spac.methods.moe_spec.replay import BudgetCounters
from vllm_spac.methods.moe_spec.settings import (
    BudgetedLayer,
    BudgetSettings,
    Group,
    check_layer,
    check_mass,
    groups,
    unknown,
    voted,
)

NO_DRAFTS = (
    "the budget is of verify steps, and this engine does not speculate, so it cuts nothing; add --speculative-config, "
    "or let it cut other rows (when=decode of --spac-budget)"
)


class Speculation(Protocol):
    """Replaces the choice of routers by one that follows from predictions (``methods.speculating_experts``)."""

    def check(self, settings: BudgetSettings) -> None:
        """Refuses what cannot be speculated, by ``UnsupportedError``."""

    def apply(
        self, routed: RoutedLayer, step: Step, groups: Sequence[slice | Tensor], settings: BudgetSettings
    ) -> tuple[Tensor, Tensor]:
        """Returns weights and ids [rows, k]; see ``BudgetControl.apply``. Only rows of ``groups`` are changed."""

    @property
    def launches(self) -> SpeculationLaunches | None:
        """What takes the place of ``apply`` where the device decides."""


class BudgetControl(Rerouting):
    """The budget of one model; ``update`` may be called between any two steps.

    Layers launched by the host go through ``apply``, which selects the rows that vote. A CUDA graph holds the launches
    of ``capture`` instead, over all rows, with a mask of the voting ones in a buffer that is written between steps. So
    does a step of which the device has cut rows or knows how likely each is reached. All compute the same shortlists
    and the same coverage, in NumPy where routing is in host memory (``HostCut``), else by ``BudgetLaunches``.

    Args:
        unweighted: why votes cannot be weighted in this engine, and what helps; None if they can.
        weighed_on_device: the probabilities by which they are weighted are known on the device alone.
        speculation: runs experts by prediction, where the settings ask for that.
        drafts: the engine verifies drafts; without them a budget of verify steps cuts nothing.
    """

    def __init__(
        self,
        layers: Sequence[BudgetedLayer],
        device: torch.device | str = "cpu",
        unweighted: str | None = None,
        weighed_on_device: bool = False,
        speculation: Speculation | None = None,
        counters: BudgetCounters | None = None,
        drafts: bool = True,
    ) -> None:
        self.layers = list(layers)
        self.counters = counters or BudgetCounters()
        self.settings = BudgetSettings()
        self._device, self._drafts, self._speculation = device, drafts, speculation
        self._unweighted, self._weighed_on_device = unweighted, weighed_on_device
        self._parts: tuple[Step | None, list[Group]] = (None, [])
        self._launches = BudgetLaunches(self.layers, device, self.counters)
        self._on_host = HostCut(self.layers, self.counters) if torch.device(device).type == "cpu" else None

    # -- what is in force ----------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self.settings.active

    @property
    def idle(self) -> bool:
        """Whether a budget is set that can cut nothing: it is of verify steps, and no drafts are verified."""
        return self.active and not self._drafts and self.settings.kinds == (RowKind.VERIFY,)

    @property
    def holds_all(self) -> bool:
        """Whether the budget in force cuts nothing because it holds all experts of each layer, or all of the mass."""
        rounded = self.settings.mass is not None and self.captured  # graphs round sums
        return self.settings.holds_all(self.layers) and not rounded

    @property
    def lossy(self) -> bool:
        """Whether what is in force may cut experts that rows selected, or run others."""
        return self.active and not self.idle and not self.holds_all

    def describe(self) -> str:
        """A short description of what is in force, for the log and the metrics."""
        if self.idle:
            return f"exact ({NO_DRAFTS})"
        return "exact (the budget holds all experts)" if self.holds_all else self.settings.describe()

    @property
    def weighs(self) -> bool:
        """Whether rows count by the probability that they are reached, also while no budget is in force."""
        return self.settings.alpha is not None

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs hold the launches of a budget, whether it is in force or not."""
        return self._launches.kind is not None

    @property
    def uncut(self) -> str:
        """Why the device cannot cut drafts beside the budget in force; empty if it can, and without a budget."""
        settings = self.settings
        apart = self.active and settings.window is not None and settings.speculate == "off"
        return f"window={settings.window} ranks rows apart" if apart else ""

    def update(self, settings: BudgetSettings) -> None:
        """Applies ``settings`` from the next step on; if it raises, nothing is changed.

        Raises:
            ConfigError: the budget does not fit a layer.
            UnsupportedError: substitution for a model with its own routing function, weighted votes where no
                probabilities are known, or the captured CUDA graphs hold another kind of budget.
        """
        if settings.active and self._launches.kind is not None:
            self._launches.kind.check_settings(settings)
        ranks = settings.speculate == "off" and (settings.active or self._launches.held)
        ranking = components.find("rankings", settings.ranking)() if ranks else None
        _check(settings, self.layers, self._speculation, self._unweighted, self._weighed_on_device)
        speculation = None if settings.speculate == "off" else self._speculation
        self._launches.update(settings, ranking, None if speculation is None else speculation.launches)
        if self._on_host is not None:
            self._on_host.apply(settings, ranking)
        self.settings, self._parts = settings, (None, [])

    # -- steps ---------------------------------------------------------------------------------------------

    def begin_step(self, step: Step, cut: Tensor | None = None, reached: Tensor | None = None) -> Step:
        """Begins a forward of real requests, which may be a replay: writes the votes that it reads.

        Args:
            step: with the probabilities that rows are reached, where they are known.
            cut: bool [rows, 1] on the device: rows that run no expert, and so have no vote; None: none are.
            reached: float64 [rows] on the device, the probability that each row is reached, where the host does not
                know it.

        Returns:
            ``step`` with the rows' votes in their place, see ``voted``, and its bounds.
        """
        alpha = self.settings.alpha
        if alpha is None:
            reached = None
        elif reached is None:
            self.counters.unweighted += unknown(step)
        votes = voted(step, alpha)
        if (bounds := self.settings.bounds(self.layers, step)) is not None:
            votes = replace(votes, bounds=bounds)
        self._launches.begin_step(votes, cut, reached)
        return votes

    def end_step(self) -> None:
        """Ends a step; in replays until the next step no row votes."""
        self._launches.end_step()

    @property
    def guess(self) -> Tensor | None:
        """Scores of the layer behind the one that was routed last, float [rows, N], if they decide what it runs."""
        speculated = self._launches.speculated
        return None if speculated is None else speculated.guess

    def apply(
        self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, step: Step, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weights and ids [rows, k] of layer ``index`` within the budget; rows that are not cut keep theirs.

        Args:
            index: number of the layer in ``layers``.
            logits: [rows, N], of the router.
            weights, ids: [rows, k], the natural choice.
            hidden: float [rows, d], input of the router, for speculated execution.
        """
        if self._launches.masked:
            return self._launches.apply(RoutedLayer(index, logits, weights, ids, hidden))
        if self.settings.speculate != "off":
            assert self._speculation is not None and hidden is not None, "change has checked it"
            rows_of = [group.rows for group in self._groups(step)]
            routed = RoutedLayer(index, logits, weights, ids, hidden)
            return self._speculation.apply(routed, step, rows_of, self.settings)
        cut = (self._on_host or self._launches).cut
        natural = weights
        for rows, votes in self._groups(step):
            part = weights[rows], ids[rows]
            covered = cut(index, logits[rows], *part, votes)
            if covered is None:
                continue
            if len(part[0]) == len(weights):
                return covered
            if weights is natural:
                weights, ids = weights.clone(), ids.clone()
            weights[rows], ids[rows] = covered
        return weights, ids

    def _groups(self, step: Step) -> list[Group]:
        """Rows that vote together, computed once per step."""
        if self._parts[0] is not step:
            votes = voted(step, self.settings.alpha)
            self._parts = step, groups(votes, self.settings.kinds, self.settings.window, self._device)
        return self._parts[1]

    # -- CUDA graphs ---------------------------------------------------------------------------------------

    def prepare_graphs(self, rows: int) -> None:
        """Prepares this budget for capture in CUDA graphs of up to ``rows`` rows, also if it is switched on later."""
        self._launches.reserve(rows)
        self.update(self.settings)

    def compile(self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, hidden: Tensor | None = None) -> None:
        """Launches in a dummy forward what will be captured; see ``BudgetLaunches.compile``."""
        self._launches.compile(RoutedLayer(index, logits, weights, ids, hidden))

    def capture(
        self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``apply`` as launches that a CUDA graph can hold; see ``BudgetLaunches.capture``."""
        return self._launches.capture(RoutedLayer(index, logits, weights, ids, hidden))


def _check(
    settings: BudgetSettings,
    layers: Sequence[BudgetedLayer],
    speculation: Speculation | None,
    unweighted: str | None,
    weighed_on_device: bool,
) -> None:
    """Refuses what cannot work in this engine; arguments as of ``BudgetControl``, raises as its ``update``."""
    no_votes = "spac: votes=path (--spac-budget) cannot work here: "
    if settings.votes == "path" and unweighted is not None:
        raise UnsupportedError(f"{no_votes}{unweighted}, or use uniform votes")
    if settings.speculate != "off":
        if speculation is None:
            raise ConfigError(
                f"spac: speculate={settings.speculate} (--spac-speculate) needs a predictor that looks one layer "
                "ahead; add --spac-prefetch gate"
            )
        speculation.check(settings)
    elif settings.active:
        if weighed_on_device and settings.votes == "path" and settings.window is not None:
            raise UnsupportedError(
                f"{no_votes}window={settings.window} ranks rows apart, and only the device knows how likely rows "
                "are reached; use uniform votes"
            )
        if settings.mass is not None:
            check_mass(settings.mass)
        for layer in layers:
            check_layer(layer, settings)
