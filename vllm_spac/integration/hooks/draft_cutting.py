"""Cuts drafts of a step on the device, in V2's runner: rows that are not worth their experts. Weighs the others' votes.

V2 keeps a drafter's probabilities no longer than it draws from them. Here they are kept until the step that verifies
the drafts. Before its forward a few launches apply the rule of ``cut_rule`` to them: numbers come from the host, and
nothing comes back that is waited for. Of a cut draft, the row stays in the forward and runs no expert
(``Rerouter.cut_rows``), and it is verified as one that a grammar excludes. So vLLM's own sampler ends the path before
it, and draws the next token from the target's logits alone, as behind the last draft. For a budget with weighted votes,
the probability that each row is reached (``Rerouter.reached``) follows from the same numbers.

Greedy tokens are those of any other number of drafts. Sampled ones are distributed like the target's: a draft is cut by
how sure the drafter was of its best token, a function of the tokens before it, and not by the one that it drew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_spac.decisions.guard.chooser import Drafted
from vllm_spac.decisions.guard.cut_rule import CutNumbers, along, kept
from vllm_spac.decisions.guard.device_chooser import DeviceChooser, StepDrafts
from vllm_spac.execution.exchange import Exchange, Sent
from vllm_spac.runtime import Runtime

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from vllm_spac.methods.trees.tensors import TreeTensors

_IN_FLIGHT = 2  # steps that have been launched and have not ended, with async scheduling
CUT = "spac_cut"  # attribute of a SchedulerOutput: what its step verifies


@dataclass
class CutReport:
    """What a step verifies, on its way to the host.

    Attributes:
        requests, drafts: of the batch, and how many each has.
    """

    requests: Sequence[str]
    drafts: Sequence[int]
    cuts: bool  # whether some may have been cut
    sent: Sent  # tokens and chances [R, n]; with ``cuts``, how many are kept [R]; of trees, what each follows [R, n]
    before: int  # experts missed before the step, and after it, once the next one has begun
    after: int | None = None

    def arrived(self, missed: int) -> StepDrafts:
        """What was sent, once it has arrived; ``missed``: experts missed so far."""
        tokens, chances, *more = (tensor.tolist() for tensor in self.sent.tensors)
        count = more.pop(0) if self.cuts else self.drafts
        parents = more[0] if more else None
        drafted: dict[str, Drafted] = {}
        left: dict[str, int] = {}
        for place, (request, drafts) in enumerate(zip(self.requests, self.drafts, strict=True)):
            if drafts:
                along = None if parents is None else parents[place][:drafts]
                real = drafts if along is None else next((i for i, p in enumerate(along) if p < 0), drafts)
                along = None if along is None else along[:real]
                drafted[request] = Drafted(tokens[place][:real], chances[place][:real], along)
                left[request] = min(count[place], real)
        return StepDrafts(drafted, left, (missed if self.after is None else self.after) - self.before)


class CutSampler:
    """In place of the runner's ``RejectionSampler``, which it encloses: what was cut is not accepted."""

    def __init__(self, plain: Any, cutter: DraftCutter) -> None:
        self._plain, self._cutter = plain, cutter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """As of vLLM's; ``invalid_drafts``: bool [rows that are sampled]."""
        cut = self._cutter.cut_of(input_batch)
        if cut is not None:
            invalid_drafts = cut if invalid_drafts is None else cut | invalid_drafts
        return self._plain(logits, input_batch, draft_logits, invalid_drafts)


class DraftCutter:
    """The drafts of one V2 model runner, between its drafter and its sampler.

    Args:
        runner: V2's, before CUDA graphs are captured: launches that keep probabilities become part of a drafter's.
        chooser: has the numbers; None: none is cut.
        runtime: of the target model; its rerouter gets ``cut_rows`` and ``reached``.
        trees: of the runner, if it drafts trees.
        weighs: the rows' votes may be weighted.
    """

    def __init__(
        self,
        runner: GPUModelRunner,
        chooser: DeviceChooser | None,
        runtime: Runtime,
        trees: Any = None,
        weighs: bool = False,
    ) -> None:
        self._runner, self._chooser, self._runtime, self._trees = runner, chooser, runtime, trees
        speculator, device = runner.speculator, runner.device
        shape = runner.max_num_reqs, runner.num_speculative_steps
        self._drafted = torch.full(shape, torch.nan, device=device)  # by place in the drafter's batch
        self._chances = self._drafted.clone()  # by request state
        self._kept = torch.zeros(shape[0], dtype=torch.int64, device=device)  # by request state
        self._cut: tuple[InputBatch, Tensor] | None = None
        self._marked = False  # whether ``cut_rows`` has rows
        self._exchange = _reserved(device, *shape)
        self._report: CutReport | None = None
        self._step: Tensor | None = None  # that is being drafted
        rows = len(runner.input_buffers.input_ids)
        if weighs:
            self._reached = torch.ones(shape[0], 1 + shape[1], dtype=torch.float64, device=device)  # by request state
            runtime.rerouter.reached = torch.ones(rows, dtype=torch.float64, device=device)
        if chooser is not None:
            runtime.rerouter.cut_rows = torch.zeros(rows, 1, dtype=torch.bool, device=device)
            runner.rejection_sampler = CutSampler(runner.rejection_sampler, self)
        if trees is not None:
            trees.drafter.chances = self.save
            return
        self._propose, speculator.propose = speculator.propose, self.propose
        self._sample, speculator.sample_draft = speculator.sample_draft, self.sample_draft
        self._logits, speculator.compute_draft_logits = speculator.compute_draft_logits, self.compute_draft_logits

    # -- while drafts are made -------------------------------------------------------------------------------

    def sample_draft(
        self,
        hidden_states: Tensor,
        sample_src_positions: Tensor,
        idx_mapping: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        draft_step: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Around the speculator's; ``draft_step``: int [], of the draft, on the device."""
        self._step = draft_step
        try:
            given = hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step
            return self._sample(*given, *args, **kwargs)
        finally:
            self._step = None

    def compute_draft_logits(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Around the speculator's: notes how sure it is of its best token."""
        logits = self._logits(hidden_states, *args, **kwargs)
        if self._step is not None:
            self._drafted[: len(logits)].index_copy_(1, self._step.view(1), surest(logits)[:, None])
        return logits

    def propose(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Tensor:
        """Around the speculator's."""
        drafts = self._propose(input_batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            self.save(input_batch.idx_mapping, self._drafted[: input_batch.num_reqs])
        return drafts

    def save(self, requests: Tensor, chances: Tensor) -> None:
        """Keeps the drafter's probabilities, [R, n] given their parents, of requests of the runner's state, int [R]."""
        self._chances[requests] = chances

    # -- in the step that verifies them ------------------------------------------------------------------------

    def begin(self, scheduled: SchedulerOutput, batch: InputBatch) -> None:
        """A batch has been prepared, and its forward has not been launched. Cuts what is not worth its experts."""
        runtime = self._runtime
        if self._report is not None:
            self._report.after, self._report = runtime.drafts.missed(), None
        self._cut, runtime.rerouter.cutting, runtime.rerouter.weighed = None, False, False
        drafted = bool(batch.num_draft_tokens)
        trees = None if self._trees is None or not drafted else self._trees.trees(batch)
        if drafted and runtime.rerouter.reached is not None and runtime.budget.weighs:
            self._weigh(batch, trees, runtime.rerouter.reached)
            runtime.rerouter.weighed = True
        if self._chooser is None:
            return
        if runtime.warms_up:
            if drafted:
                self._warm_up(self._chooser, batch, trees)
            return
        self._chooser.remove(scheduled.finished_req_ids)
        self._choose(self._chooser, scheduled, batch, drafted, trees)

    def _warm_up(self, chooser: DeviceChooser, batch: InputBatch, trees: TreeTensors | None) -> None:
        """Launches all of a step that is made up, which cuts nothing: so no launch is a served step's first one.

        A kernel that is loaded may wait for the device, and memory that is pinned too.
        """
        assert batch.num_draft_tokens_per_req is not None
        numbers = chooser.cutting_none(batch.req_ids, batch.num_draft_tokens_per_req.tolist())
        sent, _ = self._launch(batch, trees, numbers)
        sent.arrived.wait()
        self._exchange.read(sent)
        rows = self._runtime.rerouter.cut_rows
        assert rows is not None
        rows.zero_()

    def _weigh(self, batch: InputBatch, trees: TreeTensors | None, rows: Tensor) -> None:
        """Writes the probability that each row of the step is reached: float64 [rows], 1 where no draft is.

        A draft that the drafter gave no probability counts as certain.
        """
        states = batch.idx_mapping
        own, parents, levels = self._chances[states].double().nan_to_num(1.0), None, 0
        if trees is not None:
            parents, levels = trees.parents[:, 1:], trees.lineage.shape[2] - 1
        self._reached[states, 1:] = along(own, parents, levels)
        rows.fill_(1.0)
        rows[batch.logits_indices] = self._reached[batch.expanded_idx_mapping, batch.expanded_local_pos]

    def _choose(
        self,
        chooser: DeviceChooser,
        scheduled: SchedulerOutput,
        batch: InputBatch,
        drafted: bool,
        trees: TreeTensors | None,
    ) -> None:
        """Cuts what is not worth its experts, and has the host hear of it."""
        runtime, rows = self._runtime, self._runtime.rerouter.cut_rows
        assert rows is not None
        if self._marked:
            rows.zero_()
            self._marked = False
        drafts = batch.num_draft_tokens_per_req
        if drafts is None or not drafted:
            return
        packed = None if runtime.budget.uncut else chooser.numbers(batch.req_ids, drafts.tolist())
        sent, cut = self._launch(batch, trees, packed)
        if cut is not None:
            self._cut, self._marked, runtime.rerouter.cutting = (batch, cut), True, True
        self._report = CutReport(batch.req_ids, drafts.tolist(), cut is not None, sent, runtime.drafts.missed())
        vars(scheduled)[CUT] = self._report

    def _launch(
        self, batch: InputBatch, trees: TreeTensors | None, packed: np.ndarray | None
    ) -> tuple[Sent, Tensor | None]:
        """What a step with drafts launches before its forward; ``packed``: as of ``DeviceChooser.numbers``.

        Returns:
            What ``CutReport`` has, and which of the rows that are sampled are cut, bool [rows].
        """
        rows, states = self._runtime.rerouter.cut_rows, batch.idx_mapping
        assert rows is not None
        tree = None if trees is None else (trees.parents[:, 1:], trees.depths[:, 1:] - 1)  # as ``cut_rule.kept`` has it
        chances, cut = self._chances[states], None
        told = [self._runner.req_states.draft_tokens[states].long(), chances]
        if packed is not None:
            numbers = CutNumbers.unpacked(self._exchange.to_device(torch.from_numpy(packed)), batch.num_reqs)
            count = kept(numbers, chances, tree)
            self._kept[states] = count
            cut = batch.expanded_local_pos > self._kept[batch.expanded_idx_mapping]
            rows[batch.logits_indices, 0] = cut
            told.append(count)
        if tree is not None:
            told.append(tree[0])
        return self._exchange.send(told), cut

    def cut_of(self, batch: InputBatch) -> Tensor | None:
        """Which rows of those that are sampled were cut, bool [rows]; None: none is."""
        if self._cut is None:
            return None
        (begun, cut), self._cut = self._cut, None
        assert begun is batch, "a step is sampled before the next one is prepared"
        return cut

    # -- when it has ended -----------------------------------------------------------------------------------

    def end_step(self, plan: SchedulerOutput, emitted: Mapping[str, Sequence[int]], seconds: float) -> None:
        """The step of ``plan`` has ended; arguments as of ``DeviceChooser.end_step``."""
        report: CutReport | None = vars(plan).get(CUT)
        if report is None or self._chooser is None:
            return
        if report.sent.arrived.done():
            found = report.arrived(self._runtime.drafts.missed())
            self._chooser.end_step(found, emitted, len(report.requests), seconds)
        self._exchange.read(report.sent)


def _reserved(device: torch.device, requests: int, drafts: int) -> Exchange:
    """An exchange with the memory of all that steps of so many requests send: pinning it may wait for the device."""
    exchange = Exchange(device)
    told = requests * (20 * drafts + 8) + 64  # tokens, chances, what each draft follows; how many are kept
    exchange.reserve(_IN_FLIGHT, max(told, 8 * (3 + drafts + 2 * requests)))
    return exchange


def surest(logits: Tensor) -> Tensor:
    """The probability of the likeliest token of each row, float32 [R]; ``logits``: [R, V], with -inf for no token."""
    best = logits.amax(1, keepdim=True)
    return 1 / (logits - best).exp().sum(1, dtype=torch.float32)
