"""Every knob of the product. The flag ``--spac-disk-dir`` sets the key ``disk_dir``."""

from __future__ import annotations

import difflib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from vllm_spac import components
from vllm_spac.components import ComponentName
from vllm_spac.config import rules, tree_shape, types
from vllm_spac.config.tree_shape import MOST_NODES, TreeShape
from vllm_spac.errors import ConfigError, brief, shortened
from vllm_spac.system.machine import DISK_DIR

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from vllm_spac.storage.base import ExpertStore


class SpacConfig(BaseModel):
    """The value of ``additional_config["spac"]``. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slots: types.SlotsText = Field(
        "auto",
        description="Experts kept in fast memory: a number per layer, a percentage of all, a multiple of top-k for all "
        "layers together (2k), or auto (as many as fit next to the KV cache).",
    )
    store: Annotated[str | None, ComponentName("stores", "store")] = Field(
        None,
        description="Where the other experts are stored. Default: host with a GPU and without host_memory, else disk.",
    )
    disk_dir: types.SomePath = Field(
        None, description="Folder of the packed experts with store=disk. Default: ~/.cache/vllm_spac."
    )
    host_memory: types.Size | None = Field(
        None,
        gt=0,
        description="With store=disk, host memory that holds experts between the slots and the disk, e.g. 32GiB, which "
        "all ranks share; pinned where there is a GPU. The same policy decides what it holds. Default: none.",
    )
    policy: Annotated[str, ComponentName("policies", "policy", arguments=True)] = Field(
        "reuse",
        description="Which expert is evicted when a slot is needed. Arguments of components: utility@upper=1.",
    )
    prefetch: Annotated[
        str,
        ComponentName(
            "predictors",
            "predictor",
            ("off", types.AUTO),
            arguments=True,
            settings=("threshold", "depth", "background"),
        ),
    ] = Field(
        "off",
        description="Prefetch experts in the background: utility, those with the highest utility over past steps; a "
        "predictor of predictor_file, those that it expects in the next layers, on a CPU or with execution=pointers; "
        "shadow, those that a draft model which is a copy of the model has chosen, on a CPU; auto, the predictor that "
        "was right most often, or none where that cannot pay; off, none. Also threshold, depth and background.",
    )
    predictor_file: types.SomePath = Field(
        None, description="File from vllm-spac train-predictor, for a trained predictor, e.g. prefetch=linear."
    )
    soft_pins: Literal["on", "off"] | None = Field(
        None, description="With a predictor that looks at layers, loads evict what it expects soon last. Default: on."
    )
    layer_ahead: Literal["on", "off"] = Field(
        "on", description="In forwards with many rows, as of prompts, also read what the next layer is expected to use."
    )
    prefetch_extra: Annotated[float | None, BeforeValidator(types.no_bool)] = Field(
        None,
        ge=0,
        le=1,
        description="With prefetch, the loads that prefetches may add, unused or because of what they evicted, as a "
        f"share of those that layers need. Default: {types.EXTRA:g}.",
    )
    guard: Literal["on", "off"] = Field(
        "on", description="Shorten or skip drafts when the experts they need cost more time than their tokens save."
    )
    tree: Annotated[int, BeforeValidator(types.no_bool)] = Field(
        0,
        ge=0,
        le=MOST_NODES,
        description="Draft tokens of an EAGLE draft tree, from 2, instead of a chain; 0: chains.",
    )
    tree_shape: str | None = Field(
        None,
        description="With tree, which nodes it has: dynamic (default), the most probable by the drafter; static, one "
        "shape for all steps; or the shape as a list of paths, e.g. [[0],[1],[0,0]].",
    )
    tree_depth: Annotated[int | None, BeforeValidator(types.no_bool)] = Field(
        None, ge=1, le=16, description="With tree, its levels, each a forward of the drafter. Default: 6."
    )
    tree_width: Annotated[int | None, BeforeValidator(types.no_bool)] = Field(
        None, ge=1, le=64, description="With tree, most children per node, and expanded nodes per level. Default: 8."
    )
    cpu_experts: types.CpuExpertsText = Field(
        "off",
        description="Compute missing experts on the CPU, where they are stored, exact up to rounding: off; auto, those "
        "that the balancer selects, while steps are shorter with them; or N, in each forward of a layer the N missing "
        "ones with the fewest rows.",
    )
    balancer: Annotated[str | None, ComponentName("balancers", "balancer", arguments=True)] = Field(
        None,
        description="With cpu_experts=auto, selects the experts for the CPU, in every step if it is named: waterfill "
        "(default), threshold (MoE-SpAc's) or makespan (also counts what fast memory computes).",
    )
    profile: types.SomePath = Field(
        None,
        description="Costs for the balancer and prefetch=auto: a file of vllm-spac profile. Default: measured here.",
    )
    cpu_kernel: Annotated[str | None, ComponentName("cpu_kernels", "CPU kernel")] = Field(
        None,
        description="CPU experts' kernel: vLLM's (native, default on a CPU machine), torch (default elsewhere) or kt.",
    )
    io_threads: Annotated[int, BeforeValidator(types.no_bool)] = Field(
        4, ge=1, le=64, description="Threads that load missed experts."
    )
    io_submit: Literal["threads", "io_uring"] = Field(
        "threads",
        description="How a layer's missed experts are read from a disk on a CPU machine: by io_threads, or together by "
        "io_uring (liburing), which is a little faster for experts of about a MB.",
    )
    executor: Literal["local", "processes", "ray"] = Field(
        "local",
        description="Which processes keep and compute the experts: local, the engine's own; processes, expert workers, "
        "which have whole layers (on a CPU); ray, expert workers that Ray places.",
    )
    workers: Annotated[int | None, BeforeValidator(types.no_bool)] = Field(
        None,
        ge=1,
        le=256,
        description="The number of expert workers: started on this machine, or, with cluster, those "
        "of its workers to use (default: all). Slots are then those of each worker, for its layers.",
    )
    cluster: str | None = Field(
        None,
        description="With executor=processes, the file of vllm-spac cluster start, for workers that run already, also "
        "on other machines; with executor=ray, the address of a Ray cluster (default: one is started here).",
    )
    workers_per_layer: Annotated[int, BeforeValidator(types.no_bool)] = Field(
        1,
        ge=1,
        le=16,
        description="With expert workers, how many divide the experts of each layer; above 1, exact up to rounding.",
    )
    replicas: Annotated[int, BeforeValidator(types.no_bool)] = Field(
        0,
        ge=0,
        le=255,
        description="With expert workers, how many further workers have each layer, to compute it when its worker is "
        "lost.",
    )
    execution: Annotated[str, ComponentName("executions", "execution")] = Field(
        "slots",
        description="How layers access experts: slots loads missing ones into slots and runs vLLM's kernel; pointers "
        "runs our own kernel, which reads each expert in place, in its slot or in host memory.",
    )
    admission: Annotated[str | None, ComponentName("admissions", "admission")] = Field(
        None,
        description="With execution=pointers, when a missed expert gets a slot: step, between steps, copied "
        "concurrently with the kernels; layer (default), before its layer computes, decided and copied by the GPU.",
    )
    staging: Literal["auto", "on", "off"] = Field(
        "auto",
        description="With execution=pointers, long prompts read missing experts from two buffers, each for all experts "
        "of a layer and filled one layer ahead: on, off, or auto (on if the buffers take at most a quarter of the free "
        "fast memory).",
    )

    trace: types.SomePath = Field(
        None,
        description="Record the routers' choices in this file, for vllm-spac trace and simulate; replaces a trace.",
    )
    trace_overwrite: bool = Field(False, description="Let the trace replace an existing file of any kind.")

    timeline: types.SomePath = Field(
        None,
        description="Record what each thread does and when in this file, for vllm-spac trace timeline: steps, layers, "
        "waits, loads, drafts. An existing timeline is replaced.",
    )
    timeline_steps: Annotated[int | None, BeforeValidator(types.no_bool)] = Field(
        None,
        ge=1,
        le=100_000,
        description=f"With timeline, the number of last steps kept, in memory and in the file. Default: {types.STEPS}.",
    )

    budget: Annotated[int | None, BeforeValidator(types.no_bool)] = Field(
        None,
        ge=1,
        description="LOSSY: experts per layer that one verify step may use (B), ranked over all of its tokens.",
    )
    budget_mass: Annotated[float | None, BeforeValidator(types.no_bool)] = Field(
        None, gt=0, le=1, description="LOSSY: instead of B, the share of the routing mass to keep, e.g. 0.98."
    )
    budget_mass_of: Literal["selected", "scores"] | None = Field(
        None,
        description="The mass that budget_mass is a share of: selected (default), the routing weights of the selected "
        "experts; scores, the routers' scores of all experts.",
    )
    budget_file: types.SomePath = Field(None, description="LOSSY: a budget for each layer, from vllm-spac budgets.")
    budget_ranking: Annotated[str, ComponentName("rankings", "ranking")] = Field(
        "selected", description="How experts are ranked under a budget: those a token selected first; B are kept."
    )
    budget_coverage: Literal["substitution", "truncation"] = Field(
        "substitution",
        description="What replaces an expert that the budget cut: another expert (substitution) or nothing "
        "(truncation).",
    )
    budget_rescue: bool = Field(
        False,
        description="With truncation, a row whose experts were all cut gets the best expert that the budget left, at "
        "that expert's natural weight.",
    )
    budget_when: Literal["verify", "decode", "all"] = Field(
        "verify",
        description="Which rows the budget applies to: verify, those with draft tokens; decode, all decoding rows; "
        "all, prompts too.",
    )
    budget_votes: Literal["uniform", "path"] = Field(
        "uniform",
        description="How much each row counts when experts are ranked: uniform, all the same; path, a draft row by the "
        "probability that it is reached, as the draft model gives it.",
    )
    budget_votes_alpha: Annotated[float | None, BeforeValidator(types.no_bool)] = Field(
        None,
        ge=0,
        le=1,
        description=f"With budget_votes=path, the power of that probability: 0 is uniform. Default: {types.ALPHA:g}.",
    )
    speculate: Literal["off", "restricted", "predicted"] = Field(
        "off",
        description="LOSSY: decoding rows run experts by a prediction that the predictor of prefetch makes one layer "
        "earlier: predicted, those that it names, with predicted weights, whatever the router chooses; restricted, the "
        "router's choice among the first 2k that it names and those in fast memory.",
    )
    calibration: types.SomePath = Field(
        None,
        description="File from vllm-spac calibrate, for the rankings static and coactivation and the policy pinned.",
    )
    tuned: types.TunedText = "auto"
    tuned_allow: types.TunedAllow = "exact"
    page: bool = Field(
        False,
        description="Open GET /spac/: a page that shows every expert, and where the time of a token goes, while the "
        "server runs.",
    )
    control: bool = Field(False, description="Open POST /spac/budget: change the budget while the server runs.")

    @model_validator(mode="after")
    def _consistent(self) -> SpacConfig:
        rules.check(self)
        return self

    @cached_property
    def draft_tree(self) -> TreeShape | None:
        """The shape of draft trees; None: chains."""
        if not self.tree:
            return None
        return tree_shape.parse(self.tree, self.tree_shape or "dynamic", self.tree_depth or 6, self.tree_width or 8)

    @property
    def execution_class(self) -> type[Any]:
        """The ``Execution`` subclass that runs the layers."""
        return components.find("executions", self.execution_name)

    @property
    def execution_name(self) -> str:
        """Name of ``execution_class``: that of the knob, unless expert workers run the layers."""
        return self.execution if self.executor == "local" else "workers"

    def store_on(self, device: str) -> str:
        """Name of the store on a ``device`` of this type (``cpu``, ``cuda``): the configured one, or its default."""
        in_memory = self.execution_class.needs_addressable_store or (device != "cpu" and self.host_memory is None)
        return self.store or ("host" if in_memory else "disk")

    def store_class_on(self, device: str) -> type[ExpertStore]:
        """Class of the store that ``store_on`` names."""
        return components.find("stores", self.store_on(device))

    @property
    def named_prefetch(self) -> str:
        """The predictor that ``prefetch`` names; ``off`` while ``auto`` has not chosen one."""
        return "off" if self.prefetch == types.AUTO else self.prefetch

    @property
    def prefetch_share(self) -> float:
        """Share of the loads that layers need which prefetches may add."""
        return types.EXTRA if self.prefetch_extra is None else self.prefetch_extra

    @property
    def uses_cpu_experts(self) -> bool:
        """Whether the CPU computes some of the missing experts."""
        return self.cpu_experts != "off"

    @property
    def cpu_expert_count(self) -> int | None:
        """Number of missing experts that the CPU computes per forward of a layer; None for ``off`` and ``auto``."""
        return int(self.cpu_experts) if self.cpu_experts.isdigit() else None

    @property
    def folder(self) -> Path:
        """Folder of the packed experts."""
        return (self.disk_dir or DISK_DIR).expanduser().absolute()

    @classmethod
    def parse(cls, raw: Any) -> SpacConfig:
        """Validates ``additional_config["spac"]``.

        Raises:
            ConfigError: names the knob, what is wrong with it and which values are valid.
        """
        if not isinstance(raw, dict):
            raise ConfigError(
                f'spac: the configuration must be a mapping of knobs, e.g. {{"slots": "25%"}}, not {brief(raw)}'
            )
        try:
            return cls(**raw)
        except ValidationError as error:
            problems = "; ".join(_explain(item) for item in error.errors())
            of_rule = error.errors()[0].get("ctx", {}).get("error")
            raise ConfigError(f"spac: {problems}").solved_as(of_rule) from None
        except TypeError as error:
            raise ConfigError(f"spac: knobs must be named by strings: {error}") from None

    @property
    def parsed_slots(self) -> types.SlotCount:
        return types.SlotCount.parse(self.slots)


def check_knob(name: str, text: str) -> str:
    """Validates the text of one flag by itself, without the knobs it depends on; ``ConfigError`` if it is wrong."""
    try:
        SpacConfig.model_validate({name: text})
    except ValidationError as error:
        if problems := "; ".join(_explain(item) for item in error.errors() if item["loc"]):
            raise ConfigError(f"spac: {problems}") from None
    return text


def component_knobs() -> dict[str, ComponentName]:
    """Knobs that name a component, with the names they accept."""
    found: dict[str, ComponentName] = {}
    for name, field in SpacConfig.model_fields.items():
        found.update((name, item) for item in field.metadata if isinstance(item, ComponentName))
    return found


def _explain(item: ErrorDetails) -> str:
    message = item["msg"].removeprefix("Value error, ").removeprefix("spac: ")
    if not item["loc"]:  # an error of several knobs together
        return message
    name = shortened(str(item["loc"][0]))
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, SpacConfig.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known knobs: {', '.join(SpacConfig.model_fields)}"
        return f"unknown knob {name!r}; {hint}"
    return f"{name}={brief(item['input'])} ({types.flag(name)}): {message}"


def config_of(additional_config: Any) -> SpacConfig | None:
    """The plugin's configuration in vLLM's ``additional_config``; None when the plugin is not configured.

    Raises:
        ConfigError: as ``SpacConfig.parse``.
    """
    if not isinstance(additional_config, dict) or "spac" not in additional_config:
        return None
    return SpacConfig.parse(additional_config["spac"])
