"""Hooks that vLLM's model runners share: the beginning and end of a step, and of a worker's life."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.errors import SpacError
from vllm_spac.integration.hooks import patches
from vllm_spac.integration.hooks.model_host import experts_of
from vllm_spac.recording import last_words

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_spac.runtime import Runtime

_BROKEN = "_spac_broken"  # attribute of a runner: the error that one of its steps ended in


def install_step_hooks(
    runner: str,
    prepare_name: str,
    step_of: Callable[[Any, Any, Any], Step],
    changed: Callable[[Any, Any, Any], Any] = lambda runner, scheduled, prepared: prepared,
    paths_of: Callable[[Any], Sequence[Sequence[int]] | None] = lambda runner: None,
) -> None:
    """Wraps a model runner to begin a step when a real batch is prepared and to end it when its tokens are sampled.

    Args:
        runner: ``module:Class`` of the model runner.
        prepare_name: its method that prepares the inputs of a batch.
        step_of: (runner, scheduler's output, prepared inputs) -> ``Step``.
        changed: (runner, scheduler's output, prepared inputs) -> the inputs to use instead.
        paths_of: runner -> accepted drafts of each request of a sampled step, as of ``Runtime.end_step``.
    """

    def preparing(prepare: Callable):
        def prepared(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any):
            result = prepare(self, scheduler_output, *args, **kwargs)
            if (experts := managed_experts(self)) is None:
                return result
            experts.runtime.begin_step(step_of(self, scheduler_output, result))
            return changed(self, scheduler_output, result)

        return prepared

    def executing(execute_model: Callable):
        def executed(self, *args: Any, **kwargs: Any):
            if (broken := vars(self).get(_BROKEN)) is not None:
                raise copy.copy(broken)
            try:
                return execute_model(self, *args, **kwargs)
            except Exception as error:
                _failed(self, error)
                raise
            finally:
                if (experts := managed_experts(self)) is not None:
                    experts.runtime.end_forward()

        return executed

    def sampling(sample_tokens: Callable):
        def sampled(self, *args: Any, **kwargs: Any):
            try:
                output = sample_tokens(self, *args, **kwargs)
                if (experts := managed_experts(self)) is not None:
                    runtime = experts.runtime
                    if runtime.counts_tokens:
                        runtime.end_step(tokens_of(output), paths_of(self))
                    else:
                        runtime.end_step(None)
                    _check(runtime, output)
            except Exception as error:
                _failed(self, error)
                raise
            return output

        return sampled

    patches.install(f"{runner}.{prepare_name}", preparing)
    patches.install(f"{runner}.execute_model", executing)
    patches.install(f"{runner}.sample_tokens", sampling)


def _failed(runner: Any, error: Exception) -> None:
    """Notes that a step ended in an error, for whoever waits for this process, and for the steps that would follow.

    vLLM ends an engine in a process of its own then. One in its user's process keeps the requests of the step, and
    would run steps without a row for ever. An error is kept without its traceback, whose frames hold the engine.
    """
    if isinstance(error, SpacError):
        vars(runner).setdefault(_BROKEN, copy.copy(error))
    if (experts := managed_experts(runner)) is not None:
        experts.runtime.recorder.notes.end("error")
        last_words.report(error)
        experts.ranks.end_process(error)


def _check(runtime: Runtime, output: Any) -> None:
    """Has the step's layers looked after once it has run: now, or where its tokens are still on the device, then."""
    if (get_output := getattr(output, "get_output", None)) is None:
        runtime.check_results()
        return

    def checked() -> Any:
        found = get_output()
        runtime.check_results()
        return found

    output.get_output = checked


def tokens_of(output: Any) -> list[int] | None:
    """Number of tokens that each request of a step emitted; None if V1 keeps them on the device (async scheduling).

    None as well on a pipeline stage that samples nothing. V2 copies them to the host after the forward: waits for that.
    """
    if (counts := getattr(output, "num_sampled_tokens_np", None)) is not None:
        output.copy_event.synchronize()
        return counts.tolist()
    sampled = getattr(output, "sampled_token_ids", None)
    return list(map(len, sampled)) if isinstance(sampled, list) and sampled else None


def managed_experts(runner: Any):
    """The managed experts of this runner, looked up once; None if its engine does not use the plugin."""
    if not hasattr(runner, "_spac_experts"):
        runner._spac_experts = experts_of(runner)
    return runner._spac_experts


def request_rows(
    start: int,
    stop: int,
    prefill: bool,
    drafts: int,
    weights: tuple[float, ...] | None = None,
    parents: tuple[int, ...] | None = None,
) -> RequestRows:
    kind = RowKind.PREFILL if prefill else RowKind.VERIFY if drafts else RowKind.DECODE
    return RequestRows(start, stop, kind, drafts, weights, parents)


def install() -> None:
    """Wraps a worker's warm-up, to count nothing during it, and its shutdown, to finish traces and stop threads.

    V2 warms up with batches that look real. Exit hooks of the process would not do for the shutdown, because vLLM kills
    processes. A second call does nothing.
    """
    patches.install(f"{patches.WORKER}.compile_or_warm_up_model", _warming_up)
    patches.install(f"{patches.WORKER}.shutdown", _closing)


def _warming_up(warm_up: Callable):
    def warmed(self):
        experts = managed_experts(self.model_runner)
        with experts.runtime.warming_up() if experts is not None else contextlib.nullcontext(), last_words.reporting():
            return warm_up(self)

    return warmed


def _closing(shutdown: Callable):
    def closed(self):
        runner = getattr(self, "model_runner", None)
        experts = managed_experts(runner) if runner is not None else None
        try:
            if experts is not None:
                experts.close()
        finally:
            shutdown(self)

    return closed
