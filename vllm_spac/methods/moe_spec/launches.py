"""Applies a budget on a device: launches over all rows, of which those without a vote keep their routing.

Nothing is read on the host, so a CUDA graph can hold them. A graph reads who votes and how many experts may run from
``ReplayBuffers``. So does a step of which the device has cut rows or knows how likely each is reached, which the host
does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_spac.core import Step
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, router_mass, selected_mass
from vllm_spac.methods.moe_spec.replay import BudgetCounters, BudgetKernels, Launches, ReplayBuffers, members
from vllm_spac.methods.moe_spec.settings import BudgetedLayer, BudgetSettings


class RoutedLayer(NamedTuple):
    """What a router makes of the rows of a layer."""

    layer: int  # its number; a step runs all layers in their order
    logits: Tensor  # [rows, N], of the router
    # weights, ids: [rows, k], its choice
    weights: Tensor
    ids: Tensor
    hidden: Tensor | None = None  # [rows, d], its input; None where nothing is speculated

    @property
    def natural(self) -> tuple[Tensor, Tensor]:
        return self.weights, self.ids


class SpeculationLaunches(Protocol):
    """A ``Speculation`` over all rows of a forward, as launches that a CUDA graph can hold."""

    rows: int  # most of a forward
    captured: int  # most of one that a graph holds
    guess: Tensor | None  # float [rows, N], scores of the layer behind the one that was launched last

    def end(self) -> None:
        """Called when they have run, or failed."""

    def apply(
        self, routed: RoutedLayer, votes: Tensor, settings: BudgetSettings, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns weights and ids [rows, k]; rows without a vote keep theirs. Adds to ``counted`` what it changed."""


class BudgetLaunches:
    """The launches of a budget."""

    def __init__(self, layers: Sequence[BudgetedLayer], device: torch.device | str, counters: BudgetCounters) -> None:
        self.kind: Launches | None = None  # that CUDA graphs hold, once one is captured
        self.speculated: SpeculationLaunches | None = None  # in place of the budget
        self._layers, self._device, self._counters = layers, torch.device(device), counters
        self._kernels: BudgetKernels | None = None
        self._settings = BudgetSettings()
        self._ranking: Ranking | None = None
        self._mass = torch.ones((), dtype=torch.float64, device=device)
        self._graphs: ReplayBuffers | None = None  # what CUDA graphs read
        self._own: ReplayBuffers | None = None  # what steps read without a graph
        self._masked: ReplayBuffers | None = None  # of this step, if it is one
        self._compiled: set[int] = set()  # layers

    @property
    def held(self) -> bool:
        """Whether CUDA graphs hold these launches, or will."""
        return self._graphs is not None

    @property
    def masked(self) -> bool:
        """Whether rows of this step are cut or weighed on the device, so that its layers read ``ReplayBuffers``."""
        return self._masked is not None

    def update(self, settings: BudgetSettings, ranking: Ranking | None, speculated: SpeculationLaunches | None) -> None:
        """Launches under ``settings`` from now on; captured graphs go on reading the tensors of their ranking."""
        if self.kind is None:
            self._ranking = ranking
            self._compiled.clear()
        self._settings, self.speculated = settings, speculated
        self._mass.fill_(1.0 if settings.mass is None else settings.mass)
        for buffers in (self._graphs, self._own):
            if buffers is not None:
                buffers.write_budgets(self._bounds())

    def _bounds(self) -> list[int]:
        return [self._settings.budget or layer.experts for layer in self._layers]

    # -- steps ---------------------------------------------------------------------------------------------

    def begin_step(self, step: Step, cut: Tensor | None, reached: Tensor | None) -> None:
        """Writes the votes of a step; arguments as of ``BudgetControl.begin_step``, ``step`` with its votes."""
        settings = self._settings
        buffers, self._masked = self._graphs if self.kind is not None and settings.active else None, None
        known_here = cut if cut is not None else reached
        if self.speculated is not None and any(request.kind in settings.kinds for request in step.requests):
            buffers = self._masked = buffers or self._without_graphs(self.speculated.rows)
        elif known_here is not None and settings.active and settings.speculate == "off":
            buffers = self._masked = buffers or self._without_graphs(len(known_here))
        if buffers is None:
            return
        buffers.begin_step(step, settings.kinds)
        if reached is not None and settings.alpha is not None:
            buffers.apply_reached(reached, settings.alpha)
        if cut is not None:
            buffers.reset_votes(cut[:, 0])

    def _without_graphs(self, rows: int) -> ReplayBuffers:
        """Returns the buffers of steps of up to ``rows`` rows."""
        if self._own is None:
            self._own = ReplayBuffers(rows, len(self._layers), self._device)
            self._own.write_budgets(self._bounds())
        return self._own

    def end_step(self) -> None:
        """Ends a step; in replays until the next step no row votes."""
        self._masked = None
        if self.speculated is not None:
            self.speculated.end()
        if self._graphs is not None and self.kind is not None:
            self._graphs.end_step()

    def apply(self, routed: RoutedLayer) -> tuple[Tensor, Tensor]:
        """Weights and ids [rows, k] of a layer in a ``masked`` step."""
        assert self._masked is not None
        return self._from(self._masked, routed)

    def cut(
        self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, votes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As ``HostCut.cut``: weights and ids of rows that all vote, by ``votes`` or each by 1."""
        votes = torch.ones(len(ids), dtype=torch.float64, device=ids.device) if votes is None else votes
        bound = self._settings.budget
        limit = None if bound is None else torch.full((), bound, dtype=torch.int64, device=ids.device)
        return self._launch(RoutedLayer(index, logits, weights, ids), votes, limit)

    # -- CUDA graphs ---------------------------------------------------------------------------------------

    def reserve(self, rows: int) -> None:
        """Allocates what CUDA graphs of up to ``rows`` rows read."""
        self._graphs = ReplayBuffers(rows, len(self._layers), self._device)
        self._counters.on(self._device)

    def compile(self, routed: RoutedLayer) -> None:
        """Launches in a dummy forward what will be captured, once per layer: no row votes, and nothing is changed.

        This compiles the kernels, which is not possible while a graph is captured.
        """
        if self._graphs is None or routed.layer in self._compiled:
            return
        if self.speculated is not None and len(routed.ids) > self.speculated.captured:
            return  # a smaller forward runs before one is captured
        self._from(self._graphs, routed)
        self._compiled.add(routed.layer)

    def capture(self, routed: RoutedLayer) -> tuple[Tensor, Tensor]:
        """A layer's launches as a CUDA graph can hold them: fixed shapes, no read and no decision on the host.

        Sums over rows have a term of 0 for each row that does not vote, so the order of additions may differ. They are
        float64 sums of float32, exact where the terms are within a factor of 2**29 / rows; with weighted votes, of
        2**17 / rows. When a GPU kernel sums the weights to renormalise a row, its order of additions differs as well.

        Returns:
            Weights and ids, [rows, k]. A row that does not vote keeps its own, whatever its values.
        """
        if self._graphs is None:
            return routed.natural
        assert routed.layer in self._compiled, "a forward must run before one is captured"
        self.kind = self.kind or Launches.of(self._settings)
        assert self.kind == Launches.of(self._settings), "captured again, under another budget"
        return self._from(self._graphs, routed)

    # -- parts ---------------------------------------------------------------------------------------------

    def _from(self, buffers: ReplayBuffers, routed: RoutedLayer) -> tuple[Tensor, Tensor]:
        votes = buffers.votes[: len(routed.ids)]
        if self.speculated is not None:
            return self.speculated.apply(routed, votes, self._settings, self._counters.on(self._device))
        return self._launch(routed, votes, buffers.bounds[routed.layer] if self._settings.mass is None else None)

    def _launch(self, routed: RoutedLayer, votes: Tensor, limit: Tensor | None) -> tuple[Tensor, Tensor]:
        """``limit``: int64 [], of the shortlist; None: it is by mass."""
        assert self._ranking is not None, "no budget is in force, nor held in graphs"
        self._kernels = kernels = self._kernels or BudgetKernels.on(self._device)
        layer, settings = self._layers[routed.layer], self._settings
        weights, ids = routed.natural
        silent, counts, experts = (votes == 0)[:, None], votes[:, None], layer.experts
        probs = layer.rule.probs(routed.logits).masked_fill_(silent, 0)
        weighted, voted = probs * counts, ids.masked_fill(silent, experts).long()
        selected = members(voted, experts + 1)[:experts]
        chosen = voted.clamp_(max=experts - 1)  # rows that do not vote have no weight there
        scores = self._ranking.scores(weighted, LayerContext(routed.layer, chosen))
        if limit is not None:
            inside, best = kernels.shortlist(scores, selected, limit)
        else:
            if settings.mass_of == "selected":
                held = selected_mass(weights.masked_fill(silent, 0) * counts, chosen, experts)
            else:
                held = router_mass(weighted)
            inside, best = kernels.shortlist(scores, selected, None, held, self._mass, settings.least(layer))
        natural = weights.float().contiguous(), ids.contiguous()
        covered = kernels.cover(
            probs, *natural, votes, inside, best, settings.coverage == "substitution", **layer.rule.weighing
        )
        kernels.tally(self._counters.on(self._device), votes, natural, inside, covered)
        return covered
