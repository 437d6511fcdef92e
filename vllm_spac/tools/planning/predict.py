"""What a choice would achieve: tokens per second by the simulator, time to the first token by a formula.

Assumptions where nothing was measured: a machine's costs are those of its profile, without the host's work in a layer
or vLLM's own in a step if they are 0 there; a layer waits for its loads. Where graphs run the layers, a step takes as
long as the slower of host and GPU. A prompt is read alone, in an engine's chunks. Where the device decides, a long
chunk copies what has no slot, and what the slots that it borrows had, once; a short one reads an expert in place once
for each block of its rows. Arithmetic takes time beside the loads or after them. Elsewhere, between all experts that a
chunk needs and those without a slot are loaded, and then computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import settled_experts
from vllm_spac.decisions import prompt_chunks
from vllm_spac.decisions.costs import Costs
from vllm_spac.execution.address_table import MANY_ROWS
from vllm_spac.execution.device.borrowed_slots import Loan
from vllm_spac.execution.waves import filled_experts
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
_BLOCK_ROWS = 64  # of an expert, that our kernel reads its weights for, where a forward has more rows
_MULTIPLIES_FP8 = (8, 9)  # compute capability from which GPUs do


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
        settled=int(part * choice.settled),
    )
    assert outcome.tpot, "the routing says how many tokens each step emits"
    seconds = outcome.tpot / part
    host = machine.host_step(choice.store, model, cpu=choice.cpu) * trace.steps / int(trace.step_tokens.sum())
    limit = "host" if host > seconds else _limit(outcome, costs, model.expert_bytes, choice)
    return Prediction(routing.name, 1 / max(seconds, host), outcome.hit_rate, limit)


def _limit(outcome: Outcome, costs: Costs, nbytes: int, choice: Choice) -> Limit:
    loads, near = outcome.loads + outcome.prefetches, outcome.host_loads
    on_disk = choice.store in ("disk", "tiers")
    if outcome.execution == "pointers" and on_disk:  # what is read from the disk crosses the link, too
        near = loads + outcome.streamed_bytes // nbytes
        loads = near + outcome.disk_loads
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
    left, least, most = min(PROMPT, max(1, load.context // 2)), 0.0, 0.0
    while left > 0:
        chunk = min(left, rows(model, machine, load))
        left -= chunk
        fewest, longest = _chunk(chunk, choice, model, machine)
        least, most = least + fewest, most + longest
    return least, most


def _chunk(chunk: int, choice: Choice, model: ServedModel, machine: PlannedMachine) -> tuple[float, float]:
    """Returns the least and the most seconds of a chunk of so many rows."""
    costs, checkpoint = machine.costs_of(choice.store, model), model.checkpoint
    used = checkpoint.experts * (1 - (1 - checkpoint.top_k / checkpoint.experts) ** chunk)
    each = max(1, round(chunk * checkpoint.top_k / used))
    flops = prompt_chunks.arithmetic(costs)
    per_expert = None if flops is None else flops * model.expert_bytes / _multiplied(model, machine)
    fast = costs.fast.model_copy(update={"flops_per_second": per_expert})
    computed = model.layers * used * float(fast.seconds(model.expert_bytes, each))
    computed += max(costs.other, chunk * model.read_bytes / flops if flops else 0.0)
    if choice.store == "none":
        return computed, computed
    outside = 1 - slot_bytes(model, choice.percent, choice.tokens) / model.experts_bytes
    near = min(1.0, choice.host_bytes / (outside * model.experts_bytes)) if outside > 0 else 0.0
    rate = (1 - near) / costs.load.bytes_per_second + (near / costs.host.bytes_per_second if costs.host else 0.0)
    load = model.expert_bytes * rate
    fewest, most = _loads(chunk, used, round((1 - outside) * checkpoint.total), choice.settled, model)
    if model.execution == "pointers":  # arithmetic waits for the first loads at least
        return max(computed, fewest * load), computed + most * load
    return computed + fewest * load, computed + most * load


def _multiplied(model: ServedModel, machine: PlannedMachine) -> int:
    """Returns the bytes of an expert as it is multiplied: in 16 bits, or FP8 where the GPU can."""
    fp8 = model.kind.startswith("fp8") and machine.capability is not None and machine.capability >= _MULTIPLIES_FP8
    if fp8 or not model.quantised:
        return model.expert_bytes
    return 2 * 3 * model.architecture.hidden * model.architecture.inner


def _loads(chunk: int, used: float, slots: int, settled: int, model: ServedModel) -> tuple[float, float]:
    """Returns the least and the most loads of a chunk; ``used``: experts of a layer."""
    checkpoint, layers = model.checkpoint, model.layers
    outside, most = 1 - slots / checkpoint.total, layers * used
    if model.execution != "pointers":
        return outside * most, most
    pairs = chunk * checkpoint.top_k
    if pairs < MANY_ROWS * checkpoint.experts:  # read in place, once for each block of an expert's rows
        again = pairs // _BLOCK_ROWS if chunk > _BLOCK_ROWS else 0
        return outside * most, most + layers * again
    copied = float(borrowed(layers, checkpoint.experts, slots, settled))
    return copied, copied


@lru_cache(maxsize=256)
def borrowed(layers: int, experts: int, slots: int, settled: int = 0) -> int:
    """Returns how many experts a chunk copies into slots that it borrows, if each layer has as many slots.

    ``settled``: slots that cannot be borrowed, since their experts have them for good.
    """
    slot_of, kept = np.full((layers, experts), NOWHERE), settled_experts(layers, experts, settled)
    slot_of.ravel()[kept] = np.arange(settled)
    held = np.fromiter(chain.from_iterable(filled_experts(layers, experts, slots, kept)), np.int64)
    slot_of.ravel()[held] = np.arange(settled, slots)
    return len(Loan.of(slot_of, held[np.argsort(held % experts, kind="stable")]).keys)
