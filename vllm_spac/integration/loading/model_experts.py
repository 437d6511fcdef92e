"""The experts of the target model, from the first layer that is built to the executions that serve them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import SlotCount
from vllm_spac.core import MoEShape
from vllm_spac.decisions.guard.chooser import Chooser
from vllm_spac.decisions.guard.device_chooser import DeviceChooser
from vllm_spac.decisions.guard.draft_states import DraftProbabilities, DraftStates
from vllm_spac.decisions.guard.lengths import LengthChooser
from vllm_spac.decisions.predictors.base import Signal
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution.base import Execution
from vllm_spac.integration.hooks import device, graphs, runner_hooks
from vllm_spac.integration.hooks.ranks import Ranks
from vllm_spac.integration.layers import routers, triton_tiles
from vllm_spac.integration.layers.managed_experts import ManagedExperts
from vllm_spac.integration.loading import ahead, assembly, description, fast_memory
from vllm_spac.integration.loading.fingerprint import model_fingerprint
from vllm_spac.integration.loading.packing import Packing
from vllm_spac.integration.loading.runner_choice import adapter_of
from vllm_spac.integration.stepping import draft_planning
from vllm_spac.integration.stepping import tree_install as trees
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.recording.timeline_file import TimelineFacts
from vllm_spac.runtime import Runtime
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.headers import find_folder
from vllm_spac.system import machine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_spac.integration.hooks.draft_cutting import DraftCutter
    from vllm_spac.integration.hooks.drafter_forwards import DrafterForwards
    from vllm_spac.integration.stepping.draft_routing import DraftChoices

logger = logging.getLogger("vllm.spac")  # below "vllm", so that vLLM's handlers and levels apply


@dataclass(frozen=True)
class LoadPlan:
    """What is decided once all layers are built, before any weight is loaded."""

    budget: BudgetControl
    draft_states: DraftStates | None  # keeps what is chosen of a draft model's tokens, for a predictor that looks at it
    other_weights: int  # bytes of the model's weights that are not experts


@dataclass(frozen=True)
class Serving:
    """What serves the model once its weights are loaded."""

    runtime: Runtime
    budget: BudgetControl
    guard: LengthChooser | Chooser | None  # decides how many drafts a step gets, if it does
    cuts: DeviceChooser | None  # fits the numbers by which drafts are cut on the device, if they are
    timeline_facts: TimelineFacts
    draft_states: DraftStates | None
    other_weights: int


class ModelExperts:
    """All managed layers of one model: plans and packs them, then serves them with one execution per shape.

    Attributes:
        packing: the stores of the experts, and the executions that they become.
        serving: what runs the model; None until the weights are loaded.
        trees: None until the KV cache exists, or without draft trees.
        cutter: cuts drafts on the device; None until the KV cache exists, or where none are cut.
        forwards: those of V2's drafter; None until the KV cache exists, or where no guard plans them.
        drafted: probabilities of the drafts that are being verified.
        draft_routing: None until a draft model is loaded by which experts are chosen for a predictor.
        head: None until an MTP head is loaded whose experts have slots.
    """

    def __init__(self, config: SpacConfig, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.device = torch.device(vllm_config.device_config.device)
        self.on_cpu = current_platform.is_cpu()
        self.ranks = Ranks.of(vllm_config)
        machine.limit_cpus(*self.ranks.place)
        self.ranks.watch(vllm_config.parallel_config.master_addr)
        self.config, self.execution = config, config.execution_class
        self.packing = packing = Packing(config, vllm_config, self.device, self.on_cpu, self.ranks)
        self.arrived, self.is_stored, self.pack = packing.add_bytes, packing.is_stored, packing.pack  # for the layers
        self.serving: Serving | None = None
        self.trees: Any = None  # of its runner, as ``RunnerAdapter.plant`` returns them
        self.cutter: DraftCutter | None = None
        self.forwards: DrafterForwards | None = None
        self.drafted = DraftProbabilities()
        self.draft_routing: DraftChoices | None = None
        self.head: ModelExperts | None = None
        self._layers: list[ManagedExperts] = []
        self._plan: LoadPlan | None = None  # between ``prepare`` and ``finish``

    @property
    def layers(self) -> tuple[ManagedExperts, ...]:
        """In the order of the model."""
        return tuple(self._layers)

    @property
    def runtime(self) -> Runtime | None:
        """Runs the model's steps; None until the weights are loaded."""
        return None if self.serving is None else self.serving.runtime

    def model_name(self) -> str:
        """Fingerprint of the weights; for trained predictors."""
        return model_fingerprint(self.packing.checkpoint)

    # -- called by the layers ------------------------------------------------------------------------------

    def add(self, layer: ManagedExperts) -> None:
        layer.spac_number = len(self._layers)
        self._layers.append(layer)

    # -- called by the loader and the runner ---------------------------------------------------------------

    def prepare(self, model: torch.nn.Module) -> None:
        """Plans the slots and opens the stores; called when all layers are built, before any weight is loaded.

        Raises:
            SpacError: this model cannot be served with this configuration.
        """
        routers.install(model, self._layers)
        if not self._layers:
            raise UnsupportedError(_no_layers(self.vllm_config, self.ranks))
        others = sum(p.nbytes for p in model.parameters()) - sum(layer.staged_bytes for layer in self._layers)
        config, vllm_config, shapes = self.config, self.vllm_config, self._shapes()
        parts = self.ranks.beside if self.ranks.divide_experts else 1
        predictors = ahead.predictors(
            config, shapes, self.model_name, partial(find_folder, vllm_config.model_config.model), parts
        )
        asked_on = torch.device("cpu") if config.has_workers else self.device  # rows are there on their way
        predictor = ahead.predictor(config, predictors, asked_on)
        args = config, vllm_config, self._layers, self.device, predictor
        self._plan = LoadPlan(assembly.budget(*args), ahead.draft_states(config, shapes), others)
        self.packing.plan(self._layers, shapes, predictor)
        free, early = self._free(shapes, others), PrefetchSettings.configured(config, config.prefetch, predictor)
        for shape in shapes:
            free -= self.execution.ahead_bytes(shape, early)
            room = self.execution.divide(config.parsed_slots, shape, free)
            if not self.execution.needs_host and room.slots < shape.total:
                graphs.check_long_prompts(vllm_config, shape, parts)
            if self.execution.layout == "kernel" and room.slots < shape.total and not self.on_cpu:
                triton_tiles.install()
            free -= room.nbytes
            self.packing.open(shape, room, free)
        if not self.packing.store_kind.persistent:
            self.ranks.wait()  # until all have seen that there is room; no lock is held that another engine waits for
        self.packing.pin()
        self.packing.begin()

    def finish(self) -> None:
        """Fills the slots and attaches the layers to them; called once the weights are loaded."""
        plan, self._plan = self._plan, None  # predictors' tensors are only needed by what is built here
        assert plan is not None
        config, vllm_config, first = self.config, self.vllm_config, self.ranks.rank == 0
        executions = self.packing.finish()
        trace = assembly.trace(config, vllm_config, executions) if first else None
        facts = assembly.timeline_facts(vllm_config, executions, self.packing.store_name)
        saved = assembly.timeline(config, facts) if first else None
        guard, cuts = assembly.guard(config, vllm_config), assembly.cuts(config, vllm_config, executions)
        chooser = guard if isinstance(guard, Chooser) else None
        runtime = Runtime(executions, plan.budget, trace, chooser, saved, failed=self.ranks.end_process)
        self.serving = Serving(runtime, plan.budget, guard, cuts, facts, plan.draft_states, plan.other_weights)
        if isinstance(guard, LengthChooser) or cuts is not None:
            ended = None if cuts is None else self._ended
            draft_planning.install(vllm_config, guard if isinstance(guard, LengthChooser) else None, ended)
        for execution in executions:
            if config.cpu_experts != "off":
                assembly.attach_balancer(config, vllm_config, execution, self.packing.layer_of(execution.shape))
            _log_serving(self, execution, self.serving)
        if saved is not None:
            runtime.watch(saved.timeline)
        runtime.report_stalls(config.folder, self.device)
        for caveat in dict.fromkeys(execution.caveat() for execution in executions):
            if caveat is not None:
                logger.warning("spac: %s", caveat)
        (adapter := adapter_of(vllm_config)).install()
        if vllm_config.speculative_config is not None:
            trees.install(adapter)
        runner_hooks.install()
        if self.on_cpu:
            fast_memory.install()

    @property
    def signals(self) -> frozenset[Signal]:
        """What predictors are passed; once the weights are loaded."""
        assert self.serving is not None
        return frozenset().union(*(execution.signals for execution in self.serving.runtime.executions))

    @property
    def fast_bytes(self) -> int:
        """Bytes of experts in RAM: slots, and what is between them and the disk; once the weights are loaded."""
        assert self.runtime is not None
        slots = sum(e.residency.slots * e.shape.expert_bytes for e in self.runtime.executions)
        head = 0 if self.head is None else self.head.fast_bytes
        return head + slots + sum(e.host.block.nbytes for e in self.runtime.executions if e.host is not None)

    def _ended(self, plan: SchedulerOutput, emitted: Mapping[str, Sequence[int]], seconds: float) -> None:
        if self.cutter is not None:
            self.cutter.end_step(plan, emitted, seconds)

    def stats(self) -> dict:
        """Settings and counters of this worker, summed over executions, as plain data; once the weights are loaded."""
        serving = self.serving
        assert serving is not None
        counts = {} if self.trees is None else self.trees.counters.snapshot()
        counts |= {} if self.head is None else {"mtp_head": self.head.stats()}
        told = description.stats(serving.runtime, serving.budget, self.config, self.packing.store_name, serving.guard)
        told |= {} if serving.cuts is None else {"device_chooser": serving.cuts.facts()}
        if self.forwards is not None:
            told["guard"] = told["guard"] | {"rested_steps": self.forwards.left_out}
        return self.ranks.facts() | told | counts

    def close(self) -> None:
        """Stops threads and closes stores."""
        if self.head is not None:
            self.head.close()
        self.packing.release_locks()
        if self.runtime is not None:
            self.runtime.close()
        else:  # loading failed
            self.packing.close()

    # -- parts ---------------------------------------------------------------------------------------------

    def _shapes(self) -> list[MoEShape]:
        shapes = _grouped(self._layers)
        for shape in shapes:
            self.execution.check_shape(shape)
        return shapes

    def _free(self, shapes: Sequence[MoEShape], others: int) -> int:
        """Bytes of fast memory for experts, beside ``others`` of other weights; the same for all ranks of a stage."""
        config, vllm_config, share = self.config, self.vllm_config, self.ranks.share
        working = fast_memory.working(vllm_config, self.device, {layer.spac_widths for layer in self._layers})
        total = sum(shape.total * shape.expert_bytes for shape in shapes)
        assembly.check_host_memory(config, total, share)
        beside = min(total, int((config.host_memory or 0) * share))
        both = fast_memory.room(vllm_config, self.device, others, working.total, beside, share)
        shared = None if self.on_cpu else both  # on a CPU a KV cache takes memory where requests use it
        each = fast_memory.built(vllm_config).request_bytes
        if config.parsed_slots == SlotCount():
            shorter = fast_memory.built(vllm_config, fast_memory.SHORT).request_bytes
            kept = fast_memory.describe(vllm_config, each, shorter, shared)
            logger.info("spac: slots=auto leaves %s and %s", kept, working.describe())
        self.ranks.wait()  # no rank allocates before all have seen what is free
        return self.ranks.least(both - fast_memory.beside_slots(vllm_config, each, shared))


def _grouped(layers: Sequence[ManagedExperts]) -> list[MoEShape]:
    """Groups the layers by the layout of their experts; numbers those of each group."""
    groups: dict[tuple, list[ManagedExperts]] = {}
    for layer in layers:
        specs = sorted((n, s.shape, str(s.dtype)) for n, s in layer.probe().items())
        groups.setdefault((layer.spac_packed, *specs), []).append(layer)
    shapes = []
    for group in groups.values():
        for index, layer in enumerate(group):
            layer.spac_index = index
        first, names = group[0], tuple(layer.layer_name for layer in group)
        shapes.append(MoEShape(names, first.local_num_experts, first.top_k, first.probe(), first.spac_packed))
    return shapes


def _log_serving(experts: ModelExperts, execution: Execution, serving: Serving) -> None:
    """Logs what serves the layers of an execution."""
    config, budget = experts.config, serving.budget
    exactness = description.mode(budget, serving.runtime.executions)
    entry = quant_config.of(experts.vllm_config.model_config.hf_config.to_dict())
    facts = device.query()
    only_ours = facts is not None and quantisation.only_ours(entry, facts.capability)
    exactness = description.shown_mode(exactness, config, experts.on_cpu, only_ours)
    cut = budget.describe()
    mode = cut if budget.lossy else exactness + cut.removeprefix("exact")
    choices = description.choices(config, execution)
    choices += "" if serving.cuts is None else ", drafts=cut on the device"
    logger.info("spac: mode=%s, %s, %s%s", mode, description.describe(execution), choices, experts.ranks.describe())


def _no_layers(vllm_config: VllmConfig, ranks: Ranks) -> str:
    """Says that a model has no managed layer; some backends replace vLLM's fused layer by one of their own."""
    if ranks.stages > 1:
        return (
            f"spac: pipeline stage {ranks.stage} has no MoE layer that the plugin can manage; use a lower "
            "--pipeline-parallel-size, or set VLLM_PP_LAYER_PARTITION"
        )
    problem = "spac: this model builds no MoE layer that the plugin can manage"
    kernels = getattr(vllm_config, "kernel_config", None)
    if "mega_moe" in (backend := str(getattr(kernels, "moe_backend", ""))):
        return f"{problem}: with {backend} its experts are not in vLLM's fused layer; drop --moe-backend"
    return problem
