"""Predictors of an engine: from ``predictor_file`` or the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.decisions.guard.draft_states import DraftStates
from vllm_spac.decisions.predictor_file import Identity, PredictorFile, kinds
from vllm_spac.decisions.predictors._trained import Gates, Sizes
from vllm_spac.decisions.predictors.base import DRAFTING, Predictor, Signal
from vllm_spac.errors import ConfigError, SpacError, UnsupportedError, add, use
from vllm_spac.storage.checkpoint import router_weights

if TYPE_CHECKING:
    import torch


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
                add(prefetch="neural", predictor_file="FILE").but(", which `vllm-spac predictors train` writes"),
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
    sizes = Sizes(len(shape.layers), experts, shape.top_k, gates.weight.shape[2], reach=1)
    made = {name: kinds()[name].computed(sizes, gates)}
    return PredictorFile(Identity("", "", shape.layers), sizes, 0, made, {})


def _only(config: SpacConfig, shapes: Sequence[MoEShape]) -> MoEShape:
    """Returns the shape of all layers; ``ConfigError`` if they have several."""
    if len(shapes) != 1:
        raise ConfigError(
            f"spac: prefetch={config.prefetch.partition('@')[0]} (--spac-prefetch) needs MoE layers of one shape, this "
            f"model has {len(shapes)}; use --spac-prefetch utility or off"
        )
    return shapes[0]


def draft_states(config: SpacConfig, shapes: Sequence[MoEShape]) -> DraftStates | None:
    """Builds what keeps the experts that a draft model's tokens choose, until the step that verifies them.

    Raises:
        ConfigError: layers differ in shape; ``k`` or ``cutoff`` is more than there are.
    """
    name = config.prefetch
    needs = frozenset() if name == "off" else components.find("predictors", name).needs
    if not needs & DRAFTING:
        return None
    shape, (k, cutoff) = _only(config, shapes), config.of_drafts
    most = shape.top_k if Signal.DRAFT_ROUTING in needs else shape.experts
    for argument, value, limit, of in (("k", k, most, "experts"), ("cutoff", cutoff, len(shape.layers), "MoE layers")):
        if value is not None and value > limit:
            written = components.written(name.partition("@")[0], components.parse(name)[1] | {argument: limit})
            raise ConfigError.refused(
                f"spac: {argument} of prefetch={name} (--spac-prefetch) is more than the {limit} {of} that there are",
                use("use at most", prefetch=written),
            )
    return DraftStates(len(shape.layers), k or shape.top_k)


def predictor(config: SpacConfig, file: PredictorFile | None, device: torch.device) -> Predictor | None:
    """Builds the trained predictor that ``prefetch`` names; None if it names none, or one that needs no file.

    Args:
        device: that computes, where the predictor is asked. Of an execution whose layers do not wait for the host it
            looks one layer ahead.

    Raises:
        ConfigError: the file lacks it.
    """
    if file is None:
        return None
    name, path = config.prefetch.partition("@")[0], config.predictor_file
    if name not in file.names:
        why = file.left_out.get(name, "it was written by another version")
        raise ConfigError(f"spac: {path} has no predictor {name} ({why}); use one of {', '.join(file.names)}")
    there = file if device.type == "cpu" else file.on(device)
    return there.build(name) if config.execution_class.needs_host else there.build(name, reach=1)
