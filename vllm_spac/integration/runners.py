"""What a forward is for: adapters from vLLM's two model runners to ``Step``. No vLLM object goes further in."""

from __future__ import annotations

import contextlib
import functools

from vllm_spac.core import RequestRows, RowKind, Step


def install(vllm_config) -> None:
    """Hook the runner class that serves this engine; a second call does nothing."""
    if plans_drafts(vllm_config):
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        _hook(GPUModelRunner, "prepare_inputs", lambda runner, scheduled, prepared: step_v2(prepared))
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        _hook(
            GPUModelRunner,
            "_prepare_inputs",
            lambda runner, scheduled, prepared: _step_v1(runner, scheduled),
            sampled_plainly,
        )
        _hook_drafts(GPUModelRunner)
    _hook_worker()


def unguarded(vllm_config) -> str | None:
    """Why the guard cannot change draft lengths, and what helps; None where it can."""
    if plans_drafts(vllm_config):
        if vllm_config.parallel_config.distributed_executor_backend != "uni":
            return "V2's scheduler plans drafts in another process; add --distributed-executor-backend uni"
    elif vllm_config.scheduler_config.async_scheduling:
        return "V1 plans the drafts of a step before the last one is over; add --no-async-scheduling"
    return None


def plans_drafts(vllm_config) -> bool:
    """Whether the scheduler says how many tokens are drafted (V2, see ``planning``), and not the runner."""
    return getattr(vllm_config, "use_v2_model_runner", False)


def _hook(runner_class: type, prepare_name: str, step_of, changed=lambda runner, scheduled, prepared: prepared) -> None:
    """Begin a step when the inputs of a real batch are prepared, end it when its tokens are sampled.

    ``step_of`` and ``changed`` get the runner, the scheduler's output and what was prepared; what the latter returns
    goes on instead.
    """
    if getattr(runner_class.execute_model, "_spac", False):
        return
    prepare, execute_model = getattr(runner_class, prepare_name), runner_class.execute_model
    sample_tokens = runner_class.sample_tokens

    @functools.wraps(prepare)
    def prepared(self, scheduler_output, *args, **kwargs):
        result = prepare(self, scheduler_output, *args, **kwargs)
        if (experts := _experts(self)) is None:
            return result
        experts.runtime.begin_step(step_of(self, scheduler_output, result))
        return changed(self, scheduler_output, result)

    @functools.wraps(execute_model)
    def executed(self, *args, **kwargs):
        try:
            return execute_model(self, *args, **kwargs)
        finally:
            if (experts := _experts(self)) is not None:
                experts.runtime.end_forward()

    @functools.wraps(sample_tokens)
    def sampled(self, *args, **kwargs):
        output = sample_tokens(self, *args, **kwargs)
        if (experts := _experts(self)) is not None:
            experts.runtime.end_step(tokens_of(output) if experts.runtime.counts_tokens else None)
        return output

    executed._spac = True
    setattr(runner_class, prepare_name, prepared)
    runner_class.execute_model = executed
    runner_class.sample_tokens = sampled


def _hook_worker() -> None:
    """Count nothing while vLLM warms up: V2 does it with batches that look real. Finish what is recorded at the end.

    A worker's exit hooks are no place for the latter: vLLM kills processes.
    """
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker.shutdown, "_spac", False):
        return
    shutdown, warm_up = Worker.shutdown, Worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def warmed(self):
        experts = _experts(self.model_runner)
        with experts.runtime.warming_up() if experts is not None else contextlib.nullcontext():
            return warm_up(self)

    @functools.wraps(shutdown)
    def closed(self):
        runner = getattr(self, "model_runner", None)
        experts = _experts(runner) if runner is not None else None
        try:
            if experts is not None:
                experts.close()
        finally:
            shutdown(self)

    closed._spac = True
    Worker.shutdown = closed
    Worker.compile_or_warm_up_model = warmed


def _hook_drafts(runner_class: type) -> None:
    """Let the guard say how many tokens are drafted. Without drafts the drafter does not run, but for prompts."""
    if getattr(runner_class.propose_draft_token_ids, "_spac", False):
        return
    propose = runner_class.propose_draft_token_ids

    @functools.wraps(propose)
    def proposed(self, scheduler_output, *args, **kwargs):
        experts = _experts(self)
        length = experts.runtime.draft_length() if experts is not None else None
        if length is None:
            return propose(self, scheduler_output, *args, **kwargs)
        if length == 0 and not experts.runtime.in_prompt:
            return [[] for _ in self.input_batch.req_ids]
        planned = scheduler_output.num_spec_tokens_to_schedule
        scheduler_output.num_spec_tokens_to_schedule = min(length, planned) or 1
        drafts = propose(self, scheduler_output, *args, **kwargs)
        return [ids[:length] for ids in (drafts if isinstance(drafts, list) else drafts.tolist())]

    proposed._spac = True
    runner_class.propose_draft_token_ids = proposed


def sampled_plainly(runner, scheduled, prepared):
    """What V1 prepared, but a step that the guard left without drafts is sampled as vLLM does without speculation.

    It would go through the rejection sampler with nothing to reject: the same token of the same logits, for more work.
    Hybrid models keep it, whose recurrent layers count a step's drafts by it.
    """
    logits_indices, drafts, *others = prepared
    guarded = _experts(runner).runtime.guard is not None
    if guarded and not scheduled.scheduled_spec_decode_tokens and not runner.model_config.is_hybrid:
        drafts = None
    return logits_indices, drafts, *others


def tokens_of(output) -> list[int] | None:
    """How many tokens each request of a step emitted; None where V1 keeps them on the device (async scheduling).

    V2 copies them to the host behind the forward: waits for that copy.
    """
    if (counts := getattr(output, "num_sampled_tokens_np", None)) is not None:
        output.copy_event.synchronize()
        return counts.tolist()
    sampled = getattr(output, "sampled_token_ids", None)
    return list(map(len, sampled)) if isinstance(sampled, list) else None


def _experts(runner):
    """The managed experts of this runner, looked up once; None when its engine did not ask for the plugin."""
    if not hasattr(runner, "_spac_experts"):
        from vllm_spac.integration.loading import experts_of

        runner._spac_experts = experts_of(runner)
    return runner._spac_experts


def _step_v1(runner, scheduled) -> Step:
    batch, start, requests = runner.input_batch, 0, []
    for index, request in enumerate(batch.req_ids):
        stop = start + scheduled.num_scheduled_tokens[request]
        drafts = len(scheduled.scheduled_spec_decode_tokens.get(request, ()))
        prefill = batch.num_computed_tokens_cpu[index] < batch.num_prompt_tokens[index]
        requests.append(_rows(start, stop, bool(prefill), drafts))
        start = stop
    return Step(tuple(requests))


def step_v2(batch) -> Step:
    """The requests of V2's ``InputBatch``; rows from ``num_tokens`` on, which pad a CUDA graph, are nobody's."""
    starts, drafts = batch.query_start_loc_np, batch.num_draft_tokens_per_req
    return Step(
        tuple(
            _rows(
                int(starts[i]),
                int(starts[i + 1]),
                bool(batch.is_prefilling_np[i]),
                0 if drafts is None else int(drafts[i]),
            )
            for i in range(batch.num_reqs)
        )
    )


def _rows(start: int, stop: int, prefill: bool, drafts: int) -> RequestRows:
    kind = RowKind.PREFILL if prefill else RowKind.VERIFY if drafts else RowKind.DECODE
    return RequestRows(start, stop, kind, drafts)
