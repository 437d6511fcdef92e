"""The plan: the sensible ways to serve a model on a machine, what each would achieve, and the best. A value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_spac.decisions.core_rates import CORE_RATES, READ
from vllm_spac.decisions.costs import Attained, HostWork, VllmStep
from vllm_spac.decisions.prompt_chunks import ATTAINED
from vllm_spac.errors import ConfigError
from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.published import NamedModel
from vllm_spac.storage.checkpoint.quantisation import IN_SLOTS
from vllm_spac.system.host_memory import SYSTEM_RESERVE, gib
from vllm_spac.tools.planning.planned_machine import (
    HERE,
    HIT_SHARE,
    USABLE,
    UTILIZATION,
    PlannedMachine,
    Store,
)
from vllm_spac.tools.planning.planned_memory import (
    DRAFTS,
    Choice,
    Load,
    Split,
    command,
    kv_blocks,
    largest_slots,
    settled,
    slot_bytes,
    slot_shapes,
    split,
    staged,
)
from vllm_spac.tools.planning.planned_model import Plane, ServedModel
from vllm_spac.tools.planning.planned_routing import Routing, routings
from vllm_spac.tools.planning.planned_stages import Stage, describe
from vllm_spac.tools.planning.predict import Prediction, first_token, predict

CONTEXT = 4096  # tokens of a request, unless the model was made for fewer
_FEWER = (50, 25, 10)  # further shares of slots
_TIER_STEP = 1 << 28  # bytes: host memory between slots and disk is a multiple of it


def _speed(prediction: Prediction) -> float:
    return prediction.tokens_per_second


@dataclass(frozen=True)
class Row:
    """A choice with what it would achieve."""

    choice: Choice
    load: Load
    command: str  # the line that serves so
    predictions: tuple[Prediction, ...]  # one for each routing that was assumed
    first_token: tuple[float, float]  # least and most seconds to the first token of a prompt

    @property
    def low(self) -> Prediction:
        """The prediction at the low end of the range: mostly ``even``, where nothing was recorded."""
        return min(self.predictions, key=_speed)

    @property
    def compared(self) -> Prediction:
        """The slowest with any locality, by which choices are compared: without any, a model would be the first."""
        return min((each for each in self.predictions if each.routing != "even"), key=_speed)

    @property
    def high(self) -> Prediction:
        """The prediction at the high end of the range."""
        return max(self.predictions, key=_speed)

    @property
    def even(self) -> Prediction | None:
        """The prediction without any locality; None with a trace."""
        return next((each for each in self.predictions if each.routing == "even"), None)


@dataclass(frozen=True)
class ServingPlan:
    """A plan, with all that is printed of it."""

    model: ServedModel
    machine: PlannedMachine
    load: Load
    split: Split  # of fast memory for ``best``
    rows: tuple[Row, ...]  # every choice, ``best`` first
    # problems, assumptions: what does not fit, and what is taken for granted, in sentences
    problems: tuple[str, ...]
    assumptions: tuple[str, ...] = ()
    beside: ServingPlan | None = None  # the plan with the other execution, if that was compared

    @property
    def best(self) -> Row:
        return self.rows[0]

    @property
    def stock(self) -> bool:
        """Whether all experts fit, so that stock vLLM serves the model, where it has a kernel for them."""
        return self.best.choice.store == "none" and self.model.stock

    @property
    def plane(self) -> str:
        """How layers reach their experts, as the knob says it."""
        return f"plane={self.model.execution}"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What each of several GPUs has; empty: there is one, or none."""
        return staged(self.model, self.machine, self.best.load) if self.machine.cards else ()

    def memory(self) -> Iterator[tuple[str, str, str]]:
        """Yields (what, how much of it, of which memory) of ``best``."""
        choice, model, parts, fast = self.best.choice, self.model, self.split, "fast memory"
        shape, checkpoint = model.architecture, model.checkpoint
        slots = slot_shapes(model, choice.percent, choice.tokens)
        count, held = sum(count for count, _ in slots), sum(count * size for count, size in slots)
        layers = len(shape.windows)
        part = f" of {layers} of {layers + shape.recurrent} layers" if shape.recurrent else ""
        yield "weights that are no experts", gib(parts.weights), fast
        yield f"KV cache{part}, {self.load.concurrency} x {self.load.context:,} tokens", gib(parts.kv), fast
        yield "run-time buffers", gib(parts.working), fast
        if checkpoint.quantisation:
            method = quant_config.method(checkpoint.quantisation)
            yield f"one expert in a slot ({method}, {self.plane})", f"{model.expert_bytes:,} B", ""
        every, some = f"all {count:,} experts", f"slots: {count:,} of {checkpoint.total:,} experts"
        yield every if self.stock else some, gib(held), fast
        yield from (describe(number, stage) for number, stage in enumerate(self.stages))
        yield "left", gib(parts.room - held), f"of {gib(parts.fast)} of fast memory"
        if choice.store == "host":
            beside = (
                f"all experts but {choice.settled:,}, which have slots for good" if choice.settled else "all experts"
            )
            yield beside, gib(model.experts_bytes - choice.settled * model.expert_bytes), "host memory"
        if checkpoint.table_bytes:
            yield "n-gram tables, pinned by vLLM", gib(checkpoint.table_bytes), "host memory"
        if choice.host_bytes:
            yield "experts between slots and disk", gib(choice.host_bytes), "host memory"
        if choice.store in ("disk", "tiers"):
            yield "all experts", gib(model.experts_bytes), "disk"

    def content(self) -> dict[str, Any]:
        """Returns what ``--json`` prints."""
        model, checkpoint = self.model, self.model.checkpoint
        named = {"name": model.name, "source": model.source, "execution": model.execution}
        return {
            "calculated": True,
            "model": named | asdict(checkpoint) | {"dtypes": sorted(checkpoint.dtypes)},
            "architecture": asdict(model.architecture),
            "machine": self.machine.costs.model_dump(mode="json") | {"name": self.machine.name},
            "fast_memory": asdict(self.split) | {"room": self.split.room},
            "stages": [asdict(stage) | {"slots": stage.slots} for stage in self.stages],
            "kv_bytes_per_request": kv_blocks(model, self.machine, self.best.load).request_bytes,
            "does_not_fit": list(self.problems),
            "assumptions": list(self.assumptions),
            "choices": [asdict(row) for row in self.rows],
            "command": self.best.command,
        }


def plan_model(
    named: NamedModel,
    machine: PlannedMachine,
    *,
    context: int | None = None,
    concurrency: int = 1,
    plane: Plane = "auto",
    trace: Path | None = None,
) -> ServingPlan:
    """Plans how to serve a model with the execution that serves it fastest, of those that the knobs leave open.

    Args:
        context: tokens per request; None: ``CONTEXT``, or the model's if that is fewer.
        trace: routing of this model; None: the assumptions of ``planned_routing``.

    Raises:
        ConfigError: as ``make_plan``, of the first execution, if none can be served.
        UnsupportedError: as ``ServedModel.ways``.
    """
    on_cpu = not machine.gpu
    ways = list(ServedModel.ways(named, plane, on_cpu=on_cpu, capability=machine.capability, amx=machine.amx))
    context = context or min(CONTEXT, ways[0].architecture.longest or CONTEXT)
    return best_plan(ways, machine, Load(context, concurrency), routings(trace, ways[0]))


def make_plan(model: ServedModel, machine: PlannedMachine, load: Load, routings: Sequence[Routing]) -> ServingPlan:
    """Plans how to serve ``model`` on ``machine``.

    The best choice is the one with the most tokens per second with little locality (``Row.compared``). All stores, CPU
    experts and drafts are compared with as many slots as fit, and the best of them with fewer slots.

    Raises:
        ConfigError: nothing fits, or the context is longer than the model's.
    """
    longest, machine = model.architecture.longest, with_tables(machine, model)
    if model.execution == "pointers" and not machine.gpu:
        raise ConfigError(
            f"plane=pointers serves on a GPU, and {machine.name} has none; name a machine with one"
            + ("" if model.checkpoint.quantisation else ", or use --plane slots")
        )
    if longest and load.context > longest:
        raise ConfigError(f"--context {load.context} is more than the {longest} tokens that the model was made for")
    rows = [row_of(choice, model, machine, load, routings) for choice in choices(model, machine, load)]
    if not rows:
        raise ConfigError(_no_store(model, machine))
    plain = [row for row in rows if row.choice.store != "none" or not row.choice.drafts]  # stock as it is
    best = max(plain, key=lambda row: row.compared.tokens_per_second)
    fewer = [percent for percent in _FEWER if model.checkpoint.smallest_percent() <= percent < best.choice.percent]
    if best.choice.store != "none":
        for percent in fewer[:2]:
            choice = _with_host_memory(replace(best.choice, percent=percent), model, machine)
            rows.append(row_of(choice, model, machine, load, routings))
    rows.sort(key=lambda row: (row is not best, -row.compared.tokens_per_second))
    plan = ServingPlan(
        model,
        machine,
        load,
        split(model, machine, best.load),
        tuple(rows),
        tuple(problems(model, machine, load, best.choice)),
    )
    return replace(plan, assumptions=tuple(_assumptions(plan)))


def with_tables(machine: PlannedMachine, model: ServedModel) -> PlannedMachine:
    """Returns the machine with the n-gram tables of ``model`` in its host memory.

    Raises:
        ConfigError: there is no room for them.
    """
    taken = replace(machine, taken=model.checkpoint.table_bytes)
    if machine.gpu and taken.spare < 0:
        raise ConfigError(
            f"nothing fits: vLLM keeps {gib(taken.taken)} of n-gram tables in host memory, of which "
            f"{gib(machine.spare)} are to spare; name a machine with more, or --host-memory"
        )
    return taken


def best_plan(
    models: Sequence[ServedModel], machine: PlannedMachine, load: Load, routings: Sequence[Routing]
) -> ServingPlan:
    """Plans each of ``models``, which differ in their execution, and returns the plan that serves fastest.

    Raises:
        ConfigError: as ``make_plan``, of the first, if none can be served.
    """
    plans: list[ServingPlan] = []
    errors: list[ConfigError] = []
    for model in models:
        try:
            plans.append(make_plan(model, machine, load, routings))
        except ConfigError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    first, *others = sorted(plans, key=lambda plan: -plan.best.compared.tokens_per_second)
    return replace(first, beside=others[0] if others else None)


def choices(model: ServedModel, machine: PlannedMachine, load: Load) -> Iterator[Choice]:
    """Yields each store, with and without CPU experts and drafts, with as many slots as fit.

    Without a GPU nothing is drafted: vLLM's CPU build samples chains of drafts wrongly at temperature > 0. Nor is
    anything in pipeline stages, of which stock vLLM fails with drafts.

    Raises:
        ConfigError: no kernel computes experts that are not all in GPU memory.
    """
    # Beside a GPU, some experts: of packed ones, where our kernels read them.
    on_the_cpu = bool(machine.gpu) and (model.execution != "slots" or not model.quantised)
    for drafts in (0, DRAFTS) if machine.gpu and not machine.cards else (0,):
        percent, tokens = largest_slots(model, split(model, machine, Load(load.context, load.concurrency, drafts)))
        if model.uncomputed and percent < 100:
            if drafts:
                return
            raise ConfigError(f"{model.name} has {model.uncomputed}; {IN_SLOTS}, or name a GPU that holds all of it")
        for store in stores(model, machine, percent, tokens):
            choice = _with_host_memory(Choice(percent, store, drafts=drafts, tokens=tokens), model, machine)
            yield choice
            if on_the_cpu and (store == "host" or (store == "tiers" and model.execution == "pointers")):
                yield replace(choice, cpu=True)


def stores(model: ServedModel, machine: PlannedMachine, percent: int, tokens: int = 0) -> Iterator[Store]:
    """Yields the stores that this machine has room for; three tiers only where host memory cannot hold all experts."""
    if percent == 100:
        yield "none"
        return
    fits = model.experts_bytes <= machine.spare or settled(model, machine, percent, tokens) > 0
    if machine.gpu and machine.link is not None and fits:
        yield "host"
    in_place = model.execution == "pointers"
    if in_place and fits:
        return
    if machine.disk is not None and (machine.disk_free is None or model.experts_bytes <= machine.disk_free):
        if not in_place:
            yield "disk"
        if machine.link is not None and _TIER_STEP <= machine.spare < model.experts_bytes:
            yield "tiers"


def problems(model: ServedModel, machine: PlannedMachine, load: Load, best: Choice) -> Iterator[str]:
    """Yields what does not fit, in sentences; ``best``: the choice that is made."""
    parts = split(model, machine, load)
    everything = parts.fast - parts.room + model.experts_bytes
    memory = "GPU memory" if machine.gpu else "memory"
    if everything > parts.fast:
        yield f"stock vLLM would need {gib(everything)} of {memory}, and {gib(parts.fast)} may be used"
    if machine.gpu and model.experts_bytes > machine.spare and not best.settled:
        yield f"store=host needs {gib(model.experts_bytes)} of host memory, and {gib(machine.spare)} are to spare"
    if machine.disk_free is not None and model.experts_bytes > machine.disk_free:
        yield f"store=disk needs {gib(model.experts_bytes)} on the disk, and {gib(machine.disk_free)} are free"


def _assumptions(plan: ServingPlan) -> Iterator[str]:
    """Yields what the plan takes for granted."""
    model, machine, costs = plan.model, plan.machine, plan.machine.costs
    if model.remark:
        yield model.remark
    yield f"costs of {machine.name}: {costs.provenance.how} ({costs.provenance.source})"
    stock = plan.stock
    yield from costs.provenance.assumes[:2] if costs.attained is None else _attained(costs.attained, stock, model.kind)
    yield from machine.memory
    if model.architecture.recurrent and model.architecture.state is None:
        count = model.architecture.recurrent
        yield f"the states of its {count} recurrent layers take no memory; vLLM is left to size the KV cache"
    if model.halved:
        yield "weights in float32 are served as 16 bits, half of their size"
    yield f"vLLM may use {UTILIZATION:.0%} of fast memory (--gpu-memory-utilization), and KV cache has 16 bits"
    if machine.gpu and not stock:
        nominal = "" if machine.name == HERE else f", of which {USABLE:.1%} are usable"
        yield f"{gib(SYSTEM_RESERVE)} of host memory are left to the system and to vLLM{nominal}"
    if machine.gpu and not stock and model.execution != "slots" and model.kind in HIT_SHARE:
        timed = "" if model.kind.startswith("int4") else ", as it does of INT4: this format was not timed"
        share = f"{HIT_SHARE[model.kind]:.0%} of the rate of GPU memory"
        yield f"our kernel reads experts in slots at {share} (13 to 21 % on an H100){timed}"
    if model.execution == "table" and not stock:
        yield "our kernel takes as long as vLLM's, as on an H100"
    if model.execution == "pointers" and not stock:
        yield "plane=pointers was timed on one H100, and no other GPU"
    if not machine.gpu and model.quantised and machine.name != HERE:
        yield "a CPU with AMX, without which vLLM has no kernel for quantised experts"
    if not model.stock:
        yield "stock vLLM has no kernel for these experts on this CPU; ours takes what CPU experts do"
    if not machine.gpu:
        yield "no drafts: vLLM's CPU build samples chains of them wrongly at temperature > 0"
    if machine.cards:
        yield (
            f"{len(machine.cards)} pipeline stages with the rates and the link of one GPU each: no time passes between "
            "them, as many batches as there are requests for run at once and evict none of each other's experts, and "
            "KV cache and weights beside experts are spread evenly over layers"
        )
        yield "drafts do not go with stages; for one request tensor parallelism, which is not planned, is faster"
    unknown = ["the plugin's own work"] if costs.host_work == HostWork() else []
    own = costs.vllm != VllmStep()
    unknown += [] if own else ["vLLM's own work in a step", "kernel launches"]
    unknown += ["attention's launches in graphs"] if own and machine.gpu and costs.attained else []
    if unknown:
        yield f"taken to take no time: {', '.join(unknown)}; real speeds are lower"


def _attained(assumed: Attained, stock: bool, kind: str) -> Iterator[str]:
    """Yields what a machine of data sheets is assumed to attain; see ``Attained``.

    Args:
        stock: without the plugin.
        kind: of the experts, in ``CORE_RATES``.
    """
    work, vllm = assumed.host_work, assumed.vllm
    step, ours = (f"{1e3 * seconds:.2f} ms" for seconds in (vllm.step, work.step))
    yield f"long prompts attain {ATTAINED:.0%} of the arithmetic of the GPU"
    if stock:
        yield f"a step takes {step} of vLLM's host while the GPU computes, as on the host of an H100"
        return
    yield (
        f"PCIe attains {assumed.link:.0%} of its peak, host memory {assumed.memory:.0%}, GPU memory and disks all of "
        f"theirs; {assumed.cores} cores compute {CORE_RATES[kind].one / 1e9:.1f} GB/s of experts each, as on another "
        f"machine, together {READ:.0%} of what host memory attains, and with the link no more than all of it"
    )
    layer, load, divide = (f"{1e3 * seconds:.2f} ms" for seconds in (work.layer, work.load, work.divide))
    yield (
        f"a step takes {step} of vLLM's host, and {ours} more where the device decides; a layer over slots {layer}, "
        f"{load} more if it loads and {divide} if the CPU takes part; launches of its experts {1e6 * vllm.layer:.0f} "
        "µs: measured on the host of an H100, and less on a faster processor"
    )


def row_of(choice: Choice, model: ServedModel, machine: PlannedMachine, load: Load, routings: Sequence[Routing]) -> Row:
    """Predicts one choice, for each of ``routings``."""
    drafting = replace(load, drafts=choice.drafts)
    batches = min(max(1, len(machine.cards)), load.concurrency)  # each in another stage
    batch = replace(drafting, concurrency=load.concurrency // batches)
    found = (predict(choice, model, machine, batch, routing) for routing in routings)
    predictions = tuple(replace(each, tokens_per_second=batches * each.tokens_per_second) for each in found)
    line = command(choice, model, machine, drafting)
    return Row(choice, drafting, line, predictions, first_token(choice, model, machine, drafting))


def _with_host_memory(choice: Choice, model: ServedModel, machine: PlannedMachine) -> Choice:
    """Returns the choice with what host memory holds: of ``tiers`` what is of use, as ``host_tier.useful_rows``."""
    if choice.store == "host":
        return replace(choice, settled=settled(model, machine, choice.percent, choice.tokens))
    if choice.store != "tiers":
        return choice
    outside, layer = (
        model.experts_bytes - slot_bytes(model, choice.percent, choice.tokens),
        max(model.checkpoint.layer_bytes.values()),
    )
    useful, spare = min(model.experts_bytes, outside + layer), machine.spare
    if model.execution == "pointers":  # what has a slot has a row, too, and a layer's experts pass through others
        useful, spare = model.experts_bytes, max(_TIER_STEP, spare - layer)
    steps = min(spare // _TIER_STEP, -(-useful // _TIER_STEP))
    return replace(choice, host_bytes=steps * _TIER_STEP)


def _no_store(model: ServedModel, machine: PlannedMachine) -> str:
    where = f"{gib(machine.spare)} of host memory" if machine.gpu else "fast memory"
    if model.execution == "pointers":
        return (
            f"nothing fits: the experts take {gib(model.experts_bytes)}, and plane=pointers reads them from host "
            f"memory, of which {gib(machine.spare)} are to spare; name a machine with more, or --host-memory"
        )
    disk = "" if machine.disk_free is None else f" and {gib(machine.disk_free)} of disk"
    return (
        f"nothing fits: the experts take {gib(model.experts_bytes)}, and {where}{disk} have no room for them; free "
        "some, or measure a disk: run vllm-spac check --measure --store disk there"
    )
