"""What a choice would achieve: tokens per second by the simulator, time to the first token by a formula.

Assumptions where nothing was measured: a machine's costs are those of its profile, without the host's work in a layer
or vLLM's own in a step if they are 0 there; a layer waits for its loads. Where graphs run the layers, a step takes as
long as the slower of host and GPU. A prompt is read alone, in an engine's chunks, in which nearly every expert is
needed: between all of them and those without a slot are loaded per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import TraceFacts
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Choice, Load, rows, slot_bytes
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_routing import Routing, routed
from vllm_spac.tools.traces.replayed import Outcome
from vllm_spac.tools.traces.simulation import simulate

# Reading weights in fast memory, loads over the link to the GPU, from disk, experts on the CPU, work between steps.
Limit = Literal["compute", "link", "disk", "CPU", "host"]
PROMPT = 1024  # tokens of the prompt whose time is calculated


@dataclass(frozen=True)
class Prediction:
    """Calculated, not measured."""

    routing: str
    tokens_per_second: float  # of all requests together
    hit_rate: float  # share of the experts that were in a slot
    limit: Limit  # what takes most of the time


def predict(choice: Choice, model: ServedModel, machine: PlannedMachine, load: Load, routing: Routing) -> Prediction:
    """Simulates the steps of ``load`` with a few of the model's layers; slots, host memory and costs in proportion."""
    checkpoint = model.checkpoint
    facts = TraceFacts(model.layers, checkpoint.experts, checkpoint.top_k, model.expert_bytes)
    trace = routed(routing, facts, load.concurrency, choice.drafts)
    part = trace.facts.layers / model.layers
    costs = machine.costs_of(choice.store, model, cpu=choice.cpu)
    costs = costs.model_copy(update={"other": part * costs.other})
    slots = slot_bytes(model, choice.percent, choice.tokens) * trace.facts.total // model.experts_bytes
    outcome = simulate(
        trace,
        min(trace.facts.total, max(trace.facts.top_k, slots)),
        costs,
        execution="pointers" if choice.store != "none" and model.execution == "pointers" else "slots",
        policy="reuse",
        balancer="waterfill" if choice.cpu else "none",
        expert_bytes=model.expert_bytes,
        host_bytes=max(model.expert_bytes, int(part * choice.host_bytes)) if choice.host_bytes else 0,
    )
    assert outcome.tpot, "the routing says how many tokens each step emits"
    seconds = outcome.tpot / part
    host = machine.host_step(choice.store, model, cpu=choice.cpu) * trace.steps / int(trace.step_tokens.sum())
    limit = "host" if host > seconds else _limit(outcome, costs, model.expert_bytes, choice)
    return Prediction(routing.name, 1 / max(seconds, host), outcome.hit_rate, limit)


def _limit(outcome: Outcome, costs: Costs, nbytes: int, choice: Choice) -> Limit:
    loads, near = outcome.loads + outcome.prefetches, outcome.host_loads
    on_disk = choice.store in ("disk", "tiers")
    busy: dict[Limit, float] = {
        "compute": outcome.seconds - outcome.stall_seconds,
        "disk": (loads - near) * nbytes / costs.load.bytes_per_second if on_disk else 0.0,
        "link": near * nbytes / costs.host.bytes_per_second if costs.host else 0.0,
        "CPU": outcome.cpu * float(costs.cpu.seconds(nbytes)),
    }
    if not on_disk:
        busy["link"] = (loads * nbytes + outcome.streamed_bytes) / costs.load.bytes_per_second
    return max(busy, key=lambda name: busy[name])


def first_token(choice: Choice, model: ServedModel, machine: PlannedMachine, load: Load) -> tuple[float, float]:
    """Returns the least and the most seconds from a prompt to its first token, while no other request runs."""
    costs, checkpoint = machine.costs_of(choice.store, model), model.checkpoint
    left, seconds, loaded = min(PROMPT, max(1, load.context // 2)), 0.0, 0.0
    while left > 0:
        chunk = min(left, rows(model, machine, load))
        left -= chunk
        used = checkpoint.experts * (1 - (1 - checkpoint.top_k / checkpoint.experts) ** chunk)
        each = chunk * checkpoint.top_k / used
        seconds += model.layers * used * float(costs.fast.seconds(model.expert_bytes, max(1, round(each))))
        flops = costs.fast.flops_per_second
        seconds += max(costs.other, chunk * model.read_bytes / flops if flops else 0.0)
        loaded += model.layers * used
    if choice.store == "none":
        return seconds, seconds
    outside = 1 - slot_bytes(model, choice.percent, choice.tokens) / model.experts_bytes
    near = min(1.0, choice.host_bytes / (outside * model.experts_bytes)) if outside > 0 else 0.0
    each = (1 - near) / costs.load.bytes_per_second + (near / costs.host.bytes_per_second if costs.host else 0.0)
    most = loaded * model.expert_bytes * each
    return seconds + outside * most, seconds + most
