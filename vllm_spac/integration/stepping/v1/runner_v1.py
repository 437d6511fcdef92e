"""Hooks of vLLM's V1 model runner, which its CPU build uses.

Steps are made from its batches, and a chooser limits its drafts. While it drafts, what its drafter computes and does
not return is kept: the probabilities of greedy drafts, for the chooser and for a budget whose votes they weight,
and states or routing, for a predictor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vllm_spac.core import Step
from vllm_spac.decisions.guard.chooser import Chooser, Drafted
from vllm_spac.integration.hooks import patches
from vllm_spac.integration.hooks.draft_reading import DraftReading
from vllm_spac.integration.hooks.drafts import shows_logits
from vllm_spac.integration.hooks.runner_hooks import install_step_hooks, managed_experts, request_rows
from vllm_spac.integration.stepping.tree_install import trees_of
from vllm_spac.integration.stepping.v1 import draft_loading_v1, self_drafting
from vllm_spac.integration.stepping.v1.text_lookup_v1 import StepLookups, find_drafts
from vllm_spac.recording.timeline_recorder import Kind, now

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_spac.runtime import Runtime


class DraftLogits:
    """Probabilities of the best token in each row of a draft model's logits, one forward after another.

    Attributes:
        best: float32 [requests] of each forward.
    """

    def __init__(self, drafter: SpecDecodeBaseProposer) -> None:
        self._drafter = drafter
        self.best: list[Tensor] = []

    def add(self, states: Tensor, logits: Tensor) -> None:
        """Adds the logits of one forward, float [requests, V]."""
        self.best.append(logits.softmax(-1, dtype=torch.float32).amax(-1))

    def of(self, drafts: Tensor) -> Tensor | None:
        """Returns the draft's probability of each token of ``drafts``, int [requests, drafts], as float32.

        None if these drafts did not come one from each forward.
        """
        sampled = self._drafter.take_last_draft_probs()  # [requests, drafts, V]; None of greedy drafts
        if sampled is not None:
            return sampled.gather(2, drafts[:, :, None].long())[:, :, 0]
        if not self.best or len(self.best) != drafts.shape[1] or any(len(best) != len(drafts) for best in self.best):
            return None
        return torch.stack(self.best, 1)


@contextlib.contextmanager
def observed(drafter: SpecDecodeBaseProposer, observers: Sequence[Callable[[Tensor, Tensor], None]]) -> Iterator[None]:
    """Context in which ``observers`` are called for each forward of ``drafter`` that it drafts a token from.

    They are passed its last hidden states, float [requests, D], and its logits, float [requests, V].
    """
    model: Any = drafter.model
    compute = model.compute_logits

    def computed(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits = compute(hidden_states, *args, **kwargs)
        for observe in observers:
            observe(hidden_states, logits)  # before a drafter divides the logits by the temperature, in place
        return logits

    model.compute_logits = computed
    try:
        yield
    finally:
        del model.compute_logits  # from this object; its class has it


def install() -> None:
    """Wraps the methods of V1's runner; a second call does nothing."""
    install_step_hooks(
        patches.RUNNER_V1,
        "_prepare_inputs",
        lambda runner, scheduled, prepared: _step(runner, scheduled),
        sampled_plainly,
        _paths,
    )
    patches.install(f"{patches.RUNNER_V1}._calc_spec_decode_metadata", unless_plain)
    patches.install(f"{patches.RUNNER_V1}.propose_draft_token_ids", _proposing)


class _Enough(Exception):  # noqa: N818 - control flow through vLLM's loop over forwards, no error
    """No more drafts are worth making; ``drafts``: int64 [requests, drafts] that there are."""

    def __init__(self, drafts: Tensor) -> None:
        self.drafts = drafts


def _proposing(propose: Callable):
    """Limits drafts to what is worth making and verifying.

    At length 0 the drafter does not run, except in steps with prompts.
    """

    def proposed(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any):
        experts, trees = managed_experts(self), trees_of(self)
        if trees is not None:
            sampled, _, hidden, _, auxiliary = args[:5]
            trees.apply_accepted(sampled, [hidden, *(auxiliary or ())])
        if experts is None:
            return propose(self, scheduler_output, *args, **kwargs)
        runtime, chooser, requests = experts.runtime, experts.runtime.drafts.chooser, self.input_batch.req_ids
        emitted = [] if chooser is None else _emitted(args[0])
        if chooser is not None:
            for request, tokens in zip(requests, emitted, strict=True):
                chooser.observe_tokens(request, tokens)
        length, start = runtime.drafts.length(), now()
        if length == 0 and not runtime.drafts.in_prompt:
            return [[] for _ in requests]
        if length is not None:
            planned = scheduler_output.num_spec_tokens_to_schedule
            scheduler_output.num_spec_tokens_to_schedule = min(length, planned) or 1
        drafts, chances, lookups = _observed(propose, self, scheduler_output, *args, emitted=emitted, **kwargs)
        if length is not None:
            drafts = [ids[:length] for ids in (drafts if isinstance(drafts, list) else drafts.tolist())]
        most, seconds = max(map(len, drafts), default=0), (now() - start) / 1e9
        if chooser is not None and trees is None:
            drafts = _kept(chooser, requests, drafts, chances, lookups)
        runtime.end_drafts(most, seconds, None if trees is None else trees.drafting.forwards)
        if runtime.recorder.timeline is not None:
            runtime.recorder.timeline.add(Kind.DRAFT, start, sum(map(len, drafts)), len(drafts))
        return drafts

    return proposed


def _emitted(sampled: Tensor | list[list[int]]) -> list[list[int]]:
    """Tokens that each request emitted; arguments as of ``last_tokens``."""
    if isinstance(sampled, list):
        return sampled
    return [[token for token in row if token >= 0] for row in sampled.tolist()]


def _kept(
    chooser: Chooser,
    requests: Sequence[str],
    drafts: list[list[int]],
    chances: Tensor | None,
    lookups: StepLookups | None,
) -> list[list[int]]:
    """The drafts of each request that are worth verifying; ``chances`` and ``lookups`` as of ``_observed``."""
    known = None if chances is None else chances.tolist()
    kept, looked_up = list[list[int]](), {} if lookups is None else lookups.taken
    for number, (request, tokens) in enumerate(zip(requests, drafts, strict=True)):
        if (found := looked_up.get(request)) is not None:
            kept.append([*found[: chooser.keep(request, Drafted.unknown(found), looked=True)]])
            continue
        drafted = Drafted.unknown(tokens) if known is None else Drafted(tokens, known[number][: len(tokens)])
        kept.append(tokens[: chooser.keep(request, drafted)])
    return kept


def _observed(
    propose: Callable,
    self: GPUModelRunner,
    scheduler_output: SchedulerOutput,
    *args: Any,
    emitted: Sequence[list[int]] = (),
    **kwargs: Any,
):
    """Drafts, and keeps what the drafter computes and does not return, for votes, for a predictor and for the chooser.

    Returns what vLLM's own method returns; the drafter's probability of each draft given those before it, float32
    [requests, drafts], None where it has none or nothing asks for it; and n-grams beside them, None where none are
    looked up. ``emitted``: tokens of each request, where there is a chooser.
    """
    experts, logits, lookups = managed_experts(self), None, None
    routing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    chooser = experts.runtime.drafts.chooser
    observers: list[Callable[[Tensor, Tensor], None]] = []
    if trees_of(self) is None:
        if experts.runtime.budget.weighs or (chooser is not None and shows_logits(self.speculative_config)):
            logits = DraftLogits(self.drafter)
            observers.append(logits.add)
        if experts.runtime.observes_drafts:
            observers.append(_reading(self, experts, sampled=args[0]))
            routing = draft_loading_v1.reading(experts.draft_routing, self.drafter)
        if chooser is not None and logits is not None:
            if chooser.lookups is not None and _takes_ngrams(self, experts.runtime):
                found = find_drafts(self, args[0], emitted)
                lookups = StepLookups(chooser.lookups, self.input_batch.req_ids, found)
            observers.append(_stopping(self, chooser, logits, scheduler_output.num_spec_tokens_to_schedule, lookups))
    try:
        seen = observed(self.drafter, observers) if observers else contextlib.nullcontext()
        with self_drafting.drafting(self.drafter), routing, seen:
            drafts = propose(self, scheduler_output, *args, **kwargs)
    except _Enough as stopped:
        drafts = stopped.drafts
    chances = None if logits is None else logits.of(drafts)
    if chances is not None and experts.runtime.budget.weighs:
        experts.drafted.save(self.input_batch.req_ids, drafts.tolist(), chances.tolist())
    return drafts, chances, lookups


def _takes_ngrams(runner: GPUModelRunner, runtime: Runtime) -> bool:
    """Whether n-grams can be drafts of this step, in place of the drafter's.

    Not where a budget or a predictor goes by what the drafter computes for each draft, and not where drafts are
    sampled, which are verified by their probabilities.
    """
    reads = runtime.budget.weighs or runtime.observes_drafts
    return not (reads or runtime.drafts.in_prompt) and runner.input_batch.sampling_metadata.all_greedy


def _stopping(
    runner: GPUModelRunner, chooser: Chooser, logits: DraftLogits, most: int, lookups: StepLookups | None
) -> Callable[[Tensor, Tensor], None]:
    """Returns what ends drafting, by raising ``_Enough``, when no further draft is worth making.

    vLLM's loop over ``most`` forwards cannot be shortened from outside. It keeps nothing that is not set anew.
    """
    inputs, read = runner.drafter.input_ids, list[Tensor]()

    def checked(states: Tensor, computed: Tensor) -> None:
        if logits.best[1:]:  # this forward has read the last one's draft
            read.append(inputs[: len(states)].clone())
        requests = runner.input_batch.req_ids
        if lookups is not None and not logits.best[1:]:
            lookups.observe_first(requests, computed)
        if len(logits.best) == most or not runner.input_batch.sampling_metadata.all_greedy:
            return
        so_far = torch.stack(logits.best, 1).tolist()
        places = [*range(len(requests))] if lookups is None else lookups.others(requests)
        if not places or not chooser.goes_on((requests[place], so_far[place]) for place in places):
            raise _Enough(torch.stack([*(ids.long() for ids in read), computed.argmax(-1)], 1))

    return checked


def _reading(runner: GPUModelRunner, experts: Any, sampled: Any) -> Callable[[Tensor, Tensor], None]:
    """Returns what keeps the experts that are chosen in each forward of the drafter, and tells a predictor."""
    found, inputs = DraftReading(experts), runner.drafter.input_ids
    found.begin(runner.input_batch.req_ids)

    def read(states: Tensor, logits: Tensor) -> None:
        tokens = inputs[: len(states)] if found.forwards else last_tokens(sampled)
        found.read(tokens, experts.draft_routing.take(len(states)))

    return read


def last_tokens(sampled: Tensor | list[list[int]]) -> Tensor:
    """Returns int [requests], the last token of each; -1 of a request without one.

    Args:
        sampled: token ids of each request; as a tensor [requests, most], with -1 for those that were rejected.
    """
    if isinstance(sampled, list):
        return torch.tensor([ids[-1] if ids else -1 for ids in sampled])
    last = (sampled >= 0).sum(1).sub(1).clamp(min=0)
    return sampled.gather(1, last[:, None])[:, 0]


class PlainSampling(NamedTuple):
    """In place of the metadata of drafts, for a step that is sampled as without speculation."""

    logits_indices: Tensor  # int32 [requests], the rows whose logits are sampled


def unless_plain(calculate: Callable):
    """Calculates no metadata of drafts for a step that the chooser left without any: two dozen small operations.

    Hybrid models keep the metadata, because their recurrent layers count a step's drafts with it.
    """

    def calculated(self, num_draft_tokens: np.ndarray, *args: Any, **kwargs: Any):
        experts = managed_experts(self)
        unguarded = experts is None or experts.runtime.drafts.chooser is None
        if unguarded or num_draft_tokens.any() or self.model_config.is_hybrid:
            return calculate(self, num_draft_tokens, *args, **kwargs)
        return PlainSampling(self.query_start_loc.gpu[1 : 1 + len(num_draft_tokens)] - 1)

    return calculated


def sampled_plainly(runner: GPUModelRunner, scheduled: SchedulerOutput, prepared: tuple):
    """Removes ``PlainSampling`` from V1's inputs of a step: vLLM then samples it as it does without speculation.

    Otherwise the step would go through the rejection sampler with nothing to reject: the same tokens from the same
    logits, for more work.
    """
    logits_indices, drafts, *others = prepared
    return logits_indices, None if isinstance(drafts, PlainSampling) else drafts, *others


def _step(runner: GPUModelRunner, scheduled: SchedulerOutput) -> Step:
    trees = trees_of(runner)
    if trees is not None:
        trees.begin(scheduled)
    batch, start, requests = runner.input_batch, 0, []
    experts = managed_experts(runner)
    drafted = experts.drafted if experts.runtime.budget.weighs else None
    experts.drafted.remove(scheduled.finished_req_ids)
    if experts.runtime.drafts.chooser is not None:
        experts.runtime.drafts.chooser.remove(scheduled.finished_req_ids)
    for index, request in enumerate(batch.req_ids):
        stop = start + scheduled.num_scheduled_tokens[request]
        drafts = scheduled.scheduled_spec_decode_tokens.get(request, ())
        prefill = batch.num_computed_tokens_cpu[index] < batch.num_prompt_tokens[index]
        weights = None
        if drafted is not None:
            known = drafted if trees is None else trees
            weights = known.weights(request, drafts, stop - start)
        parents = None if trees is None else trees.parents(request)
        requests.append(request_rows(start, stop, bool(prefill), len(drafts), weights, parents))
        start = stop
    draft = None
    if experts.runtime.observes_drafts:
        rows = [(id, slice(r.start, r.stop), r.drafts) for id, r in zip(batch.req_ids, requests, strict=True)]
        draft = experts.serving.draft_states.take(rows, runner.input_ids.gpu[:start].long())
    return Step(tuple(requests), draft)


def _paths(runner: GPUModelRunner) -> list[list[int]] | None:
    trees = trees_of(runner)
    return None if trees is None else trees.accepted
