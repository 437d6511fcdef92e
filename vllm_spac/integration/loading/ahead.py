"""Predictors of an engine: from ``predictor_file`` or the checkpoint, and the choice of ``prefetch=auto``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_spac import components
from vllm_spac.cache.measured_costs import fast_seconds, load_seconds
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import AUTO
from vllm_spac.core import MoEShape
from vllm_spac.decisions.costs import Costs, ExpertSize
from vllm_spac.decisions.guard.draft_states import DraftStates
from vllm_spac.decisions.predictor_file import Identity, PredictorFile, kinds
from vllm_spac.decisions.predictors._recall import overall
from vllm_spac.decisions.predictors._trained import Gates, Sizes
from vllm_spac.decisions.predictors.base import DRAFTING, Predictor, Signal
from vllm_spac.decisions.prefetch_choice import PrefetchChoice, StepCosts, choose
from vllm_spac.errors import ConfigError, SpacError, UnsupportedError, add, use
from vllm_spac.execution.base import Execution
from vllm_spac.integration.loading.assembly import one_row
from vllm_spac.storage.checkpoint import router_weights

if TYPE_CHECKING:
    import torch

    from vllm_spac.integration.layers.managed_experts import ManagedExperts

_SECONDS = 0.1  # of each measurement, about


def predictors(
    config: SpacConfig, shapes: Sequence[MoEShape], model: Callable[[], str], folder: Callable[[], Path], parts: int = 1
) -> PredictorFile | None:
    """Reads the file of trained predictors, if one is given; else computes what ``prefetch`` names, if it can be.

    Args:
        model: returns the fingerprint of the weights.
        folder: returns that of the checkpoint.
        parts: processes that divide the experts of each layer.

    Raises:
        ConfigError: it cannot be read or is of another model, the checkpoint has no routers of a known form, or layers
            differ in shape.
    """
    name = config.prefetch.partition("@")[0]
    if config.predictor_file is None:
        if name not in kinds() or not kinds()[name].from_checkpoint:
            return None
        shape = _only(config, shapes)
        try:
            return _computed(name, shape, parts * shape.experts, folder())
        except (SpacError, OSError) as error:
            problem = str(error).removeprefix("spac: ")
            raise ConfigError.refused(
                f"spac: prefetch={config.prefetch} (--spac-prefetch) is made of the checkpoint's routers: {problem}",
                add(prefetch="linear", predictor_file="FILE").but(", which `vllm-spac train-predictor` writes"),
                use(prefetch="utility"),
            ) from error
    shape = _only(config, shapes)
    return PredictorFile.load(config.predictor_file, Identity(model(), "", shape.layers), parts * shape.experts)


def _computed(name: str, shape: MoEShape, experts: int, folder: Path) -> PredictorFile:
    """Makes a predictor of the routers in a checkpoint, which looks one layer ahead, as if it came from a file.

    Raises:
        SpacError: they cannot be read, or are not what the predictor can use.
    """
    gates = Gates(*router_weights.read(folder, shape.layers))
    if gates.weight.shape[1] != experts:
        raise UnsupportedError(f"these have {gates.weight.shape[1]} experts, not {experts}")
    if not gates.norm.all():
        raise UnsupportedError("the norm before one of them has a weight of 0")
    sizes = Sizes(len(shape.layers), experts, shape.top_k, gates.weight.shape[2], reach=1, words=1)
    made = {name: kinds()[name].computed(sizes, gates)}
    return PredictorFile(Identity("", "", shape.layers), sizes, 0, made, {}, {})


def _only(config: SpacConfig, shapes: Sequence[MoEShape]) -> MoEShape:
    """Returns the shape of all layers; ``ConfigError`` if they have several."""
    if len(shapes) != 1:
        raise ConfigError(
            f"spac: prefetch={config.prefetch.partition('@')[0]} (--spac-prefetch) needs MoE layers of one shape, this "
            f"model has {len(shapes)}; use --spac-prefetch utility or off"
        )
    return shapes[0]


def draft_states(config: SpacConfig, file: PredictorFile | None, shapes: Sequence[MoEShape]) -> DraftStates:
    """Builds what keeps the drafter's states, or what is chosen by them, until the step that verifies its drafts.

    Raises:
        ConfigError: as ``predictors``, if experts are chosen by them; ``k`` or ``cutoff`` is more than there are.
    """
    name = config.named_prefetch
    needs = frozenset() if name == "off" else components.find("predictors", name).needs
    width = 0 if file is None else file.sizes.draft_width
    if not needs & DRAFTING:  # or auto, which may choose one that does
        return DraftStates(width)
    shape, (k, cutoff) = _only(config, shapes), config.of_drafts
    most = shape.top_k if Signal.DRAFT_ROUTING in needs else shape.experts
    for argument, value, limit, of in (("k", k, most, "experts"), ("cutoff", cutoff, len(shape.layers), "MoE layers")):
        if value is not None and value > limit:
            written = components.written(name.partition("@")[0], components.parse(name)[1] | {argument: limit})
            raise ConfigError.refused(
                f"spac: {argument} of prefetch={name} (--spac-prefetch) is more than the {limit} {of} that there are",
                use("use at most", prefetch=written),
            )
    if Signal.DRAFT in needs:
        return DraftStates(width)
    return DraftStates(len(shape.layers), k or shape.top_k, unread=-1)


def predictor(
    config: SpacConfig, file: PredictorFile | None, drafter: Callable[[], str], device: torch.device
) -> Predictor | None:
    """Builds the trained predictor that ``prefetch`` names; None if it names none, or one that needs no file.

    Args:
        drafter: returns the fingerprint of the drafter; called if the predictor reads its states.
        device: that computes, where the predictor is asked. Of an execution whose layers do not wait for the host it
            looks one layer ahead.

    Raises:
        ConfigError: the file lacks it, or it was trained with another drafter.
    """
    if file is None or config.prefetch == AUTO:
        return None
    name, path = config.prefetch.partition("@")[0], config.predictor_file
    if name not in file.names:
        why = file.left_out.get(name, "it was written by another version")
        raise ConfigError(f"spac: {path} has no predictor {name} ({why}); use one of {', '.join(file.names)}")
    if Signal.DRAFT in kinds()[name].needs and file.drafter != (found := drafter()):
        raise ConfigError(
            f"spac: {name} of {path} was trained with another drafter ({file.drafter[:12]}) than this engine's "
            f"({found[:12] or 'none'}); train again with `vllm-spac train-predictor` and its speculative_config"
        )
    there = file if device.type == "cpu" else file.on(device)
    return there.build(name) if config.execution_class.needs_host else there.build(name, reach=1)


def choose_for(
    config: SpacConfig,
    execution: Execution,
    layer: ManagedExperts,
    file: PredictorFile,
    store: str,
    drafter: str,
    most: int | None = None,
) -> PrefetchChoice:
    """Chooses the predictor of ``prefetch=auto`` for ``execution``, which reads ahead by it from now on, if any.

    Args:
        drafter: fingerprint of the drafter whose states can be read; empty if none can.
        most: draft tokens of a request in a step; None: not known.
    """
    if execution.holds_all:
        return PrefetchChoice(None, "every expert has a slot")
    names = usable(file, drafter)
    recalls = {name: overall(file.recall[name]) for name in names}
    nbytes = {name: file.nbytes(name) for name in names}
    choice = choose(recalls, nbytes, _costs(config, execution, layer, store))
    if choice.predictor is not None:
        device = layer.spac.device
        built = (file if device.type == "cpu" else file.on(device)).build(choice.predictor)
        execution.read_ahead(PrefetchSettings.configured(config, choice.predictor, built, stops=True, drafts=most))
    return choice


def usable(file: PredictorFile, drafter: str) -> list[str]:
    """Returns the predictors of the file that an engine can ask; ``drafter`` as in ``choose_for``."""
    return [name for name in file.names if Signal.DRAFT not in kinds()[name].needs or file.drafter == drafter]


def _costs(config: SpacConfig, execution: Execution, layer: ManagedExperts, store: str) -> StepCosts:
    """Returns the costs of a step, by the profile if it matches this machine and these experts, else measured."""
    shape, slots, missing = execution.shape, execution.residency.slots, ""
    if config.profile is not None:
        try:
            costs = Costs.read(config.profile, here=True, disk_dir=config.disk_dir)
            costs.check_experts(config.profile, ExpertSize.of(shape.expert_bytes).nbytes, store)
            rates = costs.rates(shape.expert_bytes)
            return StepCosts.of(shape, slots, rates.fast, rates.stream, costs.other, f" ({config.profile})")
        except ConfigError as error:
            missing = f", because {error}"
    _, in_slots = one_row(execution, layer)
    fast = fast_seconds(in_slots, shape.top_k, layer.spac.device, _SECONDS)
    load = load_seconds(execution.store, layer.spac.device, config.io_threads, _SECONDS)
    return StepCosts.of(shape, slots, fast, load, 0.0, f" (of experts, measured now{missing})")
