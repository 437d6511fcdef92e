"""Applies an expert budget to a layer's routing: which rows vote, which are cut, and what is dropped (MoE-Spec)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.core import RowKind, Step
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.methods.moe_spec import host_cut, replay
from vllm_spac.methods.moe_spec.calibration import Calibration
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, router_mass, selected_mass
from vllm_spac.methods.moe_spec.replay import BudgetCounters, BudgetKernels, Launches, ReplayBuffers, members
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
    "or let it cut other rows (--spac-budget-when decode)"
)


def _apart(settings: BudgetSettings, ranking: Ranking) -> str:
    """Why a step's rows cannot have votes that the device knows alone; empty if they can."""
    if settings.window is not None:
        return f"window={settings.window} ranks rows apart"
    named = f"ranking={settings.ranking} (--spac-budget-ranking)"
    return "" if ranking.replayable else f"{named} ranks on the host, which cannot leave rows out"


class Speculation(Protocol):
    """Replaces the choice of routers by one that follows from predictions (``methods.speculating_experts``)."""

    def check(self, settings: BudgetSettings) -> None:
        """Refuses what cannot be speculated, by ``UnsupportedError``."""

    def apply(
        self,
        index: int,
        hidden: Tensor,
        logits: Tensor,
        natural: tuple[Tensor, Tensor],
        step: Step,
        groups: Sequence[slice | Tensor],
        settings: BudgetSettings,
    ) -> tuple[Tensor, Tensor]:
        """Returns weights and ids [rows, k]; see ``BudgetControl.apply``. Only rows of ``groups`` are changed."""

    @property
    def launches(self) -> SpeculationLaunches | None:
        """What takes the place of ``apply`` where the device decides."""


class SpeculationLaunches(Protocol):
    """A ``Speculation`` over all rows of a forward, as launches that a CUDA graph can hold.

    Attributes:
        rows, captured: most rows of a forward, and of one that a graph holds.
        guess: float [rows, N], scores of the layer behind the one that was launched last, if there are any.
    """

    rows: int
    captured: int
    guess: Tensor | None

    def end(self) -> None:
        """Called when they have run, or failed."""

    def apply(
        self,
        index: int,
        hidden: Tensor,
        logits: Tensor,
        natural: tuple[Tensor, Tensor],
        votes: Tensor,
        settings: BudgetSettings,
        counted: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns weights and ids [rows, k]; rows without a vote keep theirs. Adds to ``counted`` what it changed."""


class BudgetControl:
    """The budget of one model; ``change`` may be called between any two steps.

    Steps launched by the host go through ``apply``, which selects the rows that vote. A CUDA graph holds the launches
    of ``capture`` instead: over all rows, with a mask of the voting rows in a buffer that is written between steps. So
    does a step of which the device has cut rows or knows how likely each is reached (``draft_cutting``), which the host
    does not know.
    Both compute the same shortlists and the same coverage with the same operations.

    Args:
        offline: allow rankings that run all experts.
        unweighted: why votes cannot be weighted in this engine, and what helps; None if they can.
        weighed_there: the probabilities by which they are weighted are known on the device alone.
        ranks_differ: several processes compute the model, and each has other experts in fast memory.
        speculation: runs experts by prediction, where the settings ask for that.
        drafts: the engine verifies drafts; without them a budget of verify steps cuts nothing.
    """

    def __init__(
        self,
        layers: Sequence[BudgetedLayer],
        calibration: Calibration | None = None,
        offline: bool = False,
        device: torch.device | str = "cpu",
        unweighted: str | None = None,
        weighed_there: bool = False,
        ranks_differ: bool = False,
        speculation: Speculation | None = None,
        counters: BudgetCounters | None = None,
        drafts: bool = True,
    ) -> None:
        self.layers = list(layers)
        self.counters = counters or BudgetCounters()
        self.settings = BudgetSettings()
        self._calibration = calibration
        self._offline = offline
        self._device = device
        self._unweighted, self._weighed_there = unweighted, weighed_there
        self._ranks_differ = ranks_differ
        self._drafts = drafts
        self._speculation = speculation
        self._ranking: Ranking | None = None
        self._parts: tuple[Step | None, list[Group]] = (None, [])
        self._mass = torch.ones((), dtype=torch.float64, device=device)
        self._graphs: ReplayBuffers | None = None  # what CUDA graphs read
        self._compiled: set[int] = set()  # layers
        self._on_host = torch.device(device).type == "cpu"
        self._captured: Launches | None = None
        self._own: ReplayBuffers | None = None  # what steps with rows cut on the device read, without a graph
        self._masked: ReplayBuffers | None = None  # of this step, if it is one

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
        settings = self.settings
        if settings.mass is not None:  # of weighted votes, a row that counts nothing has no mass; graphs round sums
            return settings.mass == 1.0 and settings.alpha is None and not self.captured
        return settings.budget is not None and all((self._bound(layer) or 0) >= layer.experts for layer in self.layers)

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
        return self._captured is not None

    @property
    def uncut(self) -> str:
        """Why the device cannot cut drafts beside the budget in force; empty if it can, and without a budget."""
        if not self.active or self.settings.speculate != "off":
            return ""
        return _apart(self.settings, self._used_ranking)

    def change(self, settings: BudgetSettings) -> None:
        """Applies ``settings`` from the next step on; if it raises, nothing is changed.

        Raises:
            ConfigError: the budget does not fit a layer, or the ranking cannot serve or lacks its calibration.
            UnsupportedError: substitution or a rescue for a model with its own routing function, weighted votes where
                no probabilities are known, a ranking by residency for several ranks, or the captured CUDA graphs hold
                another kind of budget.
        """
        if settings.votes == "path" and self._unweighted is not None:
            raise UnsupportedError(
                f"spac: votes=path (--spac-budget-votes) cannot work here: {self._unweighted}, or use uniform votes"
            )
        ranking = None
        if settings.active and self._captured is not None:
            self._captured.check_settings(settings)
        if settings.speculate != "off":
            if self._speculation is None:
                raise ConfigError(
                    f"spac: speculate={settings.speculate} (--spac-speculate) needs a predictor that looks one layer "
                    "ahead; add --spac-prefetch gate"
                )
            self._speculation.check(settings)
        elif settings.active:
            ranking = self._ranking_of(settings)
            if ranking.needs_resident and self._ranks_differ:
                raise UnsupportedError(
                    f"spac: ranking={settings.ranking} (--spac-budget-ranking) cannot work with several ranks, each of "
                    "which has other experts in fast memory and would cut others; use selected"
                )
            weighed_there = self._weighed_there and settings.votes == "path"
            if weighed_there and (problem := _apart(settings, ranking)):
                raise UnsupportedError(
                    f"spac: votes=path (--spac-budget-votes) cannot work here: {problem}, and only the device knows "
                    "how likely rows are reached; use uniform votes"
                )
            if settings.mass is not None:
                check_mass(settings.mass)
            for layer in self.layers:
                check_layer(layer, settings)
        if self._captured is None:  # otherwise the graphs read the tensors of the present ranking
            self._ranking = ranking
            self._compiled.clear()
        self.settings, self._parts = settings, (None, [])
        self._mass.fill_(1.0 if settings.mass is None else settings.mass)
        for buffers in (self._graphs, self._own):
            if buffers is not None:
                buffers.bound(self._experts())

    def _ranking_of(self, settings: BudgetSettings) -> Ranking:
        return _ranking(settings.ranking, self._calibration, self._offline).to(self._device)

    def _bound(self, layer: BudgetedLayer) -> int | None:
        budget = self.settings.budget
        return budget[layer.name] if isinstance(budget, dict) else budget

    def _experts(self) -> list[int]:
        """Returns how many experts each layer may run."""
        return [self._bound(layer) or layer.experts for layer in self.layers]

    def _bounds(self, step: Step) -> tuple[int, ...] | None:
        """Returns how many experts of each layer all rows of ``step`` together may run, if a number bounds them all."""
        settings = self.settings
        if settings.budget is None or settings.window is not None or settings.speculate != "off":
            return None
        if any(request.kind not in settings.kinds for request in step.requests):
            return None
        return tuple(self._experts())

    def apply(
        self,
        index: int,
        logits: Tensor,
        weights: Tensor,
        ids: Tensor,
        step: Step,
        outputs: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weights and ids [rows, k] of layer ``index`` within the budget; rows that are not cut keep theirs.

        Args:
            index: number of the layer in ``layers``.
            logits: [rows, N], of the router.
            weights, ids: [rows, k], the natural choice.
            outputs: float [rows, N, d] for the oracle.
            hidden: float [rows, d], input of the router, for speculated execution.
        """
        if self._masked is not None:
            return self._launch(self._masked, index, logits, weights, ids, hidden)
        if self.settings.speculate != "off":
            assert self._speculation is not None and hidden is not None, "change has checked it"
            rows_of = [group.rows for group in self._groups(step)]
            return self._speculation.apply(index, hidden, logits, (weights, ids), step, rows_of, self.settings)
        natural = weights
        for rows, votes in self._groups(step):
            part = weights[rows], ids[rows]
            covered = self._cut(index, logits[rows], *part, outputs if outputs is None else outputs[rows], votes)
            if covered is None:
                continue
            if len(part[0]) == len(weights):
                return covered
            if weights is natural:
                weights, ids = weights.clone(), ids.clone()
            weights[rows], ids[rows] = covered
        return weights, ids

    # -- in a CUDA graph -----------------------------------------------------------------------------------

    def hold_in_graphs(self, rows: int) -> None:
        """Prepares this budget for capture in CUDA graphs of up to ``rows`` rows, also if it is switched on later."""
        self._graphs = ReplayBuffers(rows, len(self.layers), self._device)
        self.counters.count_on(self._device)
        self.change(self.settings)

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
        if (bounds := self._bounds(step)) is not None:
            votes = replace(votes, bounds=bounds)
        buffers, self._masked = self._graphs if self.captured and self.active else None, None
        there, launches = cut if cut is not None else reached, self._launches
        if launches is not None and any(request.kind in self.settings.kinds for request in step.requests):
            buffers = self._masked = buffers or self._launched(launches.rows)
        elif there is not None and self.active and self.settings.speculate == "off":
            buffers = self._masked = buffers or self._launched(len(there))
        if buffers is not None:
            buffers.begin_step(votes, self.settings.kinds)
            if reached is not None and alpha is not None:
                buffers.weigh(reached, alpha)
            if cut is not None:
                buffers.silence(cut[:, 0])
        return votes

    def _launched(self, rows: int) -> ReplayBuffers:
        """Returns the buffers of steps of up to ``rows`` rows that the host launches, with rows cut on the device."""
        if self._own is None:
            self._own = ReplayBuffers(rows, len(self.layers), self._device)
            self._own.bound(self._experts())
            if self.counters.on_device is None:
                self.counters.count_on(self._device)
        return self._own

    def end_step(self) -> None:
        """Ends a step; in replays until the next step no row votes."""
        self._masked = None
        if (launches := self._launches) is not None:
            launches.end()
        if self._graphs is not None and self.captured:
            self._graphs.end_step()

    @property
    def _launches(self) -> SpeculationLaunches | None:
        """What speculates in launches, if experts are speculated so."""
        speculation = None if self.settings.speculate == "off" else self._speculation
        return None if speculation is None else speculation.launches

    @property
    def guess(self) -> Tensor | None:
        """Scores of the layer behind the one that was routed last, float [rows, N], if they decide what it runs."""
        launches = self._launches
        return None if launches is None else launches.guess

    def capture(
        self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``apply`` as launches that a CUDA graph can hold: fixed shapes, no read and no decision on the host.

        Sums over rows have a term of 0 for each row that does not vote, so the order of additions may differ. They are
        float64 sums of float32, exact where the terms are within a factor of 2**29 / rows; with weighted votes, of
        2**17 / rows. When a GPU kernel sums the
        weights to renormalise a row, its order of additions differs as well.

        Returns:
            Weights and ids, [rows, k]. A row that does not vote keeps its own, whatever its values.
        """
        if self._graphs is None:
            return weights, ids
        assert index in self._compiled, "a forward must run before one is captured"
        self._captured = self._captured or Launches.of(self.settings)
        assert self._captured == Launches.of(self.settings), "captured again, under another budget"
        return self._launch(self._graphs, index, logits, weights, ids, hidden)

    def compile(self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, hidden: Tensor | None = None) -> None:
        """Launches in a dummy forward what will be captured, once per layer: no row votes, and nothing is changed.

        This compiles the kernels, which is not possible while a graph is captured.
        """
        if self._graphs is None or index in self._compiled:
            return
        if (launches := self._launches) is not None and len(ids) > launches.captured:
            return  # a smaller forward runs before one is captured
        self._ranking = self._ranking or self._ranking_of(self.settings)
        self._launch(self._graphs, index, logits, weights, ids, hidden)
        self._compiled.add(index)

    # -- parts ---------------------------------------------------------------------------------------------

    def _launch(
        self,
        buffers: ReplayBuffers,
        index: int,
        logits: Tensor,
        weights: Tensor,
        ids: Tensor,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if (launches := self._launches) is not None:
            assert hidden is not None and self.counters.on_device is not None
            given = index, hidden, logits, (weights, ids), buffers.votes[: len(ids)]
            return launches.apply(*given, self.settings, self.counters.on_device)
        kernels, layer, votes = self._kernels, self.layers[index], buffers.votes[: len(ids)]
        silent, counts, experts = (votes == 0)[:, None], votes[:, None], layer.experts
        probs = layer.rule.probs(logits).masked_fill_(silent, 0)
        weighted, heard = probs * counts, ids.masked_fill(silent, experts).long()
        selected = members(heard, experts + 1)[:experts]
        chosen = heard.clamp_(max=experts - 1)  # rows that do not vote have no weight there
        scores = self._used_ranking.scores(weighted, self._context(index, ids=chosen))
        if self.settings.mass is None:
            inside, best = kernels.shortlist(scores, selected, buffers.bounds[index])
        else:
            if self.settings.mass_of == "selected":
                held = selected_mass(weights.masked_fill(silent, 0) * counts, chosen, experts)
            else:
                held = router_mass(weighted)
            inside, best = kernels.shortlist(scores, selected, None, held, self._mass, self._least(layer))
        natural, coverage = (weights.float().contiguous(), ids.contiguous()), self.settings.coverage
        how = layer.rule, coverage == "substitution", coverage == "rescue"
        covered = kernels.covered(probs, natural, votes, inside, best, *how)
        kernels.tally(self.counters.on_device, votes, natural, inside, covered)
        return covered

    @cached_property
    def _kernels(self) -> BudgetKernels:
        return BudgetKernels.on(torch.device(self._device))

    @property
    def _used_ranking(self) -> Ranking:
        assert self._ranking is not None, "no budget is in force, nor held in graphs"
        return self._ranking

    def _cut(
        self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, outputs: Tensor | None, votes: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """(weights, ids) of rows that vote together, within their shortlist; None if they already are."""
        layer = self.layers[index]
        bound = self._bound(layer)
        if self._spares_all(layer, bound, ids):
            self.counters.add(weights, torch.ones_like(ids, dtype=torch.bool), weights, ids)
            return None
        probs = layer.rule.probs(logits)
        order = self._order(index, probs, (weights, ids), outputs, votes)
        settings = self.settings
        options: dict[str, Any] = {
            "bound": bound,
            "mass_of": settings.mass_of,
            "least": self._least(layer),
            "substitute": settings.coverage == "substitution",
            "rescue": settings.coverage == "rescue",
        }
        if self._on_host:
            covered = host_cut.cut(probs, order, (weights, ids), votes, layer.rule, mass=settings.mass, **options)
        else:
            mass = None if settings.mass is None else self._mass
            covered = replay.cut(self._kernels, probs, order, (weights, ids), votes, layer.rule, mass=mass, **options)
        self.counters.add(weights, covered[2], covered[0], covered[1])
        return None if covered[0] is weights else covered[:2]

    def _spares_all(self, layer: BudgetedLayer, bound: int | None, ids: Tensor) -> bool:
        """Whether all that rows selected may run, as far as the host knows without waiting."""
        if bound == layer.experts or self.settings.mass == 1.0:
            return True
        return self._on_host and bound is not None and int(host_cut.selected(ids.numpy(), layer.experts).sum()) <= bound

    def _groups(self, step: Step) -> list[Group]:
        """Rows that vote together, computed once per step."""
        if self._parts[0] is not step:
            votes = voted(step, self.settings.alpha)
            self._parts = step, groups(votes, self.settings.kinds, self.settings.window, self._device)
        return self._parts[1]

    def _order(
        self,
        index: int,
        probs: Tensor,
        natural: tuple[Tensor, Tensor],
        outputs: Tensor | None,
        votes: Tensor | None,
    ) -> Tensor:
        """int64 [N]: all experts as rows that all vote rank them, the best first."""
        mixing, ids = None, natural[1].long()
        if self._used_ranking.needs_mixing:
            mixing = torch.zeros_like(probs).scatter(1, ids, natural[0].float())
        context = self._context(index, mixing=mixing, ids=ids, outputs=outputs)
        return self._used_ranking.rank(probs, votes, probs.shape[1], context)

    def _context(self, index: int, **known: Tensor | None) -> LayerContext:
        resident = self.layers[index].resident if self._used_ranking.needs_resident else None
        return LayerContext(layer=index, resident=None if resident is None else resident(), **known)

    def _least(self, layer: BudgetedLayer) -> int:
        """The smallest shortlist that the layer can run with."""
        return layer.top_k if self.settings.coverage == "substitution" else 1


def _ranking(name: str, calibration: Calibration | None, offline: bool) -> Ranking:
    found = components.find("rankings", name)
    if found.offline and not offline:
        raise ConfigError(
            f"spac: budget_ranking={name} (--spac-budget-ranking) runs every expert and is for evaluation only "
            f"(vllm-spac quality sweep); use one of {', '.join(components.serving('rankings'))}"
        )
    return found.of(calibration)
