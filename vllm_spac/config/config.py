"""The configuration of an engine: its knobs together, and what follows from them."""

from __future__ import annotations

import difflib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from vllm_spac import components
from vllm_spac.components import ComponentName
from vllm_spac.config import presets, rules, tree_shape, types
from vllm_spac.config.budget_knob import BudgetKnob, BudgetText
from vllm_spac.config.former import FORMER
from vllm_spac.config.knobs import Knobs
from vllm_spac.config.tree_shape import TreeShape, TreeText
from vllm_spac.errors import ConfigError, brief, shortened
from vllm_spac.system.machine import CLUSTER_FILE, DISK_DIR
from vllm_spac.system.untrusted import path_named, path_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from vllm_spac.storage.base import ExpertStore


class SpacConfig(Knobs):
    """The value of ``additional_config["spac"]``. An unknown key is an error."""

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, raw: Any, handler: ModelWrapValidatorHandler[SpacConfig]) -> SpacConfig:
        config = handler(presets.filled(raw) if isinstance(raw, dict) else raw)
        if isinstance(raw, dict):
            config.__dict__["explicit"] = frozenset(raw)
        with presets.or_without(config):
            rules.check(config)
        return config

    @cached_property
    def explicit(self) -> frozenset[str]:
        """The knobs that were given, without those that only a preset set. Equal knobs are equal, whoever set them."""
        return frozenset(self.model_fields_set)

    @property
    def parsed_slots(self) -> types.SlotCount:
        """What ``slots`` says."""
        return types.SlotCount.parse(self.slots)

    @cached_property
    def draft_tree(self) -> TreeShape | None:
        """The shape of draft trees; None: chains."""
        return tree_shape.parse(self.tree)

    @property
    def tree_nodes(self) -> int:
        """Draft tokens of a tree; 0: chains."""
        return 0 if self.draft_tree is None else self.draft_tree.nodes

    @property
    def execution_class(self) -> type[Any]:
        """The ``Execution`` subclass that runs the layers."""
        return components.find("executions", self.execution_name)

    @property
    def execution_name(self) -> str:
        """Name of ``execution_class``: the ``plane``, where that is still ``auto`` slots, or that of expert workers."""
        if self.has_workers:
            return "workers"
        name = self.plane.partition("@")[0]
        return "slots" if name == types.AUTO else name

    @property
    def executor_name(self) -> str:
        """The executor without its arguments."""
        return self.executor.partition("@")[0]

    @property
    def has_workers(self) -> bool:
        """Whether expert workers run the layers."""
        return self.executor_name != types.LOCAL

    @property
    def workers_per_layer(self) -> int:
        """Expert workers that divide the experts of each layer."""
        return int(types.EXECUTOR.split(self.executor)[1].get("per_layer", 1))

    @property
    def workers(self) -> int | None:
        """The number of expert workers; None: all of the cluster's file."""
        name, given = types.EXECUTOR.split(self.executor)
        count, size = given.get("workers"), self.workers_per_layer
        return count if count is not None or name != "processes" else size * -(-2 // size)

    @property
    def cluster(self) -> Path:
        """The file of a cluster's workers; ``ConfigError`` if it is below a home folder that nobody knows."""
        return path_named(str(types.EXECUTOR.split(self.executor)[1].get("file") or CLUSTER_FILE), "--spac-executor")

    @property
    def guards(self) -> bool:
        """Whether the guard chooses drafts where it can."""
        return self.guard != "off"

    @property
    def cuts_in_graphs(self) -> bool:
        """Whether the drafter's probabilities are also read where full CUDA graphs hold its steps."""
        return types.GUARD.split(self.guard)[1].get("cut") == "always"

    @property
    def uses_lookups(self) -> bool:
        """Whether n-grams of a request's text may be its drafts beside a drafter's."""
        return types.GUARD.split(self.guard)[1].get("lookups") == "on"

    @cached_property
    def parsed_budget(self) -> BudgetKnob:
        """What ``budget`` says."""
        return BudgetKnob.parse(self.budget)

    def store_on(self, device: str) -> str:
        """Name of the store on a ``device`` of this type (``cpu``, ``cuda``): the configured one, or its default."""
        in_memory = (
            self.execution_class.reads_in_place or device != "cpu"
        ) and not self.has_workers  # which have disks
        return self.store or ("host" if in_memory and self.host_memory is None else "disk")

    def store_class_on(self, device: str) -> type[ExpertStore]:
        """Class of the store that ``store_on`` names."""
        return components.find("stores", self.store_on(device))

    @property
    def prefetch_share(self) -> float:
        """Share of the loads that layers need which prefetches may add."""
        return float(components.parse(self.prefetch)[1].get("extra", types.EXTRA))

    @property
    def predictor_file(self) -> Path | None:
        """The file of trained predictors that ``prefetch`` names."""
        path = components.parse(self.prefetch)[1].get(components.FILE)
        return None if path is None else path_of(path)

    @property
    def of_drafts(self) -> tuple[int | None, int | None]:
        """``k`` and ``cutoff`` of ``prefetch``, as in ``PrefetchSettings``."""
        given = components.parse(self.prefetch)[1]
        return given.get("k"), given.get("cutoff")

    @property
    def trace(self) -> Path | None:
        """The file that records routing."""
        return types.recordings(self.record).get("trace")

    @property
    def timeline(self) -> Path | None:
        """The file that records a timeline."""
        return types.recordings(self.record).get("timeline")

    @property
    def page(self) -> bool:
        """Whether the live page is open to all machines."""
        return "page" in types.listed(self.http)

    @property
    def control(self) -> bool:
        """Whether a request may change the budget."""
        return "control" in types.listed(self.http)

    @property
    def cpu_expert_count(self) -> int | None:
        """Number of missing experts that the CPU computes per forward of a layer; None if that is not fixed."""
        return int(self.cpu_experts) if self.cpu_experts.isdigit() else None

    @property
    def balancer(self) -> str | None:
        """The balancer that selects experts for the CPU, with its arguments; None if none does."""
        if self.cpu_experts == "off" or self.cpu_expert_count is not None:
            return None
        return "waterfill" if self.cpu_experts == types.AUTO else self.cpu_experts

    @property
    def lossy(self) -> bool:
        """Whether steps may run other experts than the routers chose."""
        return self.parsed_budget.bounds or self.speculate != "off"

    @property
    def tuned_profile(self) -> str:
        """``tuned`` without its argument: ``off``, ``auto`` or a file."""
        return types.split_tuned(self.tuned)[0]

    @property
    def tuned_allow(self) -> str | None:
        """What a tuned profile may set: one of ``types.ALLOWED``; None: it is not named."""
        return types.split_tuned(self.tuned)[1]

    @property
    def folder(self) -> Path:
        """Folder of the packed experts; ``ConfigError`` if it is below a home folder that nobody knows."""
        return path_named(self.disk_dir or DISK_DIR, "--spac-disk-dir").absolute()

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


def check_knob(name: str, text: str) -> str:
    """Validates the text of one flag by itself, without the knobs it depends on; ``ConfigError`` if it is wrong."""
    try:
        SpacConfig.model_validate({name: text})
    except ValidationError as error:
        if problems := "; ".join(_explain(item) for item in error.errors() if item["loc"]):
            raise ConfigError(f"spac: {problems}") from None
    return text


def value_forms() -> dict[str, list[str]]:
    """Knobs whose values are names, perhaps with arguments, with the forms of these values."""
    found: dict[str, list[str]] = {}
    for name, field in SpacConfig.model_fields.items():
        kinds = ComponentName | types.WithArguments | BudgetText | TreeText
        found.update((name, item.values()) for item in field.metadata if isinstance(item, kinds))
    return found


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
        if name in FORMER:
            return f"{name} ({types.flag(name)}) is gone; {FORMER[name]}"
        near = difflib.get_close_matches(name, SpacConfig.model_fields, n=1, cutoff=0.75)
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
