"""What vLLM's configuration allows with drafts: another length, and weights by the draft's probabilities."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from vllm_spac.errors import Remedy, add, drop, use

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig


class Reason(NamedTuple):
    """Why something cannot work, and what helps."""

    problem: str
    remedy: Remedy

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy.text}"


_EAGLE = {"--speculative-config": {"method": "eagle3", "model": "HEAD"}}
_COPY = {"--speculative-config": {"method": "draft_model", "model": "COPY", "num_speculative_tokens": 4}}
_PARENT = {"--speculative-config": {"method": "draft_model", "model": "PARENT", "num_speculative_tokens": 4}}
_V1 = Remedy("set VLLM_USE_V2_MODEL_RUNNER=0", {"VLLM_USE_V2_MODEL_RUNNER": "0"})
IN_ORDER = Remedy("add --no-async-scheduling", {"--no-async-scheduling": True})
CHAINS = drop("tree").but(", and the drafter proposes chains")
_CHAINS = ("eagle", "eagle3", "draft_model")  # methods that draft one token from the logits of each forward


def unguarded(vllm_config: VllmConfig, trees: bool = False) -> Reason | None:
    """Why the guard cannot change draft lengths, or the nodes of ``trees``, and what helps; None if it can."""
    if (ranks := vllm_config.parallel_config.tensor_parallel_size) > 1:
        one = use(vllm_tensor_parallel_size=1)
        return Reason(f"each of {ranks} ranks would choose the draft length by its own clock", one)
    if plans_drafts(vllm_config):
        if trees:
            return Reason("V2 keeps on the device which nodes of a draft tree were accepted", drop("tree"))
        if vllm_config.parallel_config.distributed_executor_backend != "uni":
            within = add(vllm_distributed_executor_backend="uni")
            return Reason("V2's scheduler plans drafts in another process", within)
    elif vllm_config.scheduler_config.async_scheduling:
        return Reason("V1 plans the drafts of a step before the last one has finished", IN_ORDER)
    return None


def unweighted(vllm_config: VllmConfig, trees: bool = False) -> Reason | None:
    """Why votes cannot be weighted by the draft's probabilities, in ``trees`` or not, and what helps; None if they can.

    Without speculation every row is certain.
    """
    speculation = vllm_config.speculative_config
    if speculation is None:
        return None
    if hidden := _hidden(speculation, "gives no probabilities", "drafts without logits of the whole vocabulary"):
        return hidden
    if plans_drafts(vllm_config):
        chains = Remedy(f"drop --spac-tree and {_V1.text}", {**_V1.changes, "tree": None})  # V1 has no trees on a GPU
        return Reason("V2 keeps drafts and their probabilities on the device", chains if trees else _V1)
    if vllm_config.scheduler_config.async_scheduling:
        return Reason("V1 plans a step before its drafts are known on the host", IN_ORDER)
    return None


def unread(vllm_config: VllmConfig) -> Reason | None:
    """Why a trained predictor cannot read the drafter's states, and what helps; None if it can."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        drafter = Remedy("add --speculative-config with the one that the predictor was trained with", _EAGLE)
        return Reason("there is no drafter", drafter)
    return _hidden(speculation, "has no states", "hides the drafter's states or tokens")


def unshadowed(vllm_config: VllmConfig) -> Reason | None:
    """Why the routers of a draft model cannot stand for the model's, and what helps; None if they may.

    What a model builds is compared when it is loaded (``draft_routing``).
    """
    speculation = vllm_config.speculative_config
    copy = Remedy("use a copy of this model, from `vllm-spac quantise`, as draft model", _COPY)
    if speculation is None:
        example = f"add --speculative-config '{json.dumps(_COPY['--speculative-config'])}'"
        written = Remedy(f"{example}, where COPY is a copy of this model, from `vllm-spac quantise`", _COPY)
        return Reason("there is no draft model", written)
    if speculation.method != "draft_model":
        return Reason(f"{speculation.method} drafts without experts like this model's", copy)
    if hidden := _hidden(speculation, "has no routing", "hides the drafter's tokens"):
        return hidden
    ours, theirs = map(_described, (vllm_config.model_config, speculation.draft_model_config))
    if ours != theirs:
        return Reason(f"this model has {ours}, and the draft model {theirs}", copy)
    return None


def ungated(vllm_config: VllmConfig) -> Reason | None:
    """Why the model's routers cannot score what a draft model computes, and what helps; None if they can.

    What a model builds is looked at when it is loaded (``draft_routing``).
    """
    speculation = vllm_config.speculative_config
    trained = use(prefetch="draft_linear", predictor_file="FILE")
    if speculation is None:
        example = f"add --speculative-config '{json.dumps(_PARENT['--speculative-config'])}'"
        return Reason("there is no draft model", Remedy(f"{example}, where PARENT has this model's width", _PARENT))
    if speculation.method != "draft_model":
        return Reason(f"{speculation.method} has no layers that stand for this model's", trained)
    if hidden := _hidden(speculation, "has no layers", "hides the drafter's tokens"):
        return hidden
    ours, theirs = (each.get_hidden_size() for each in (vllm_config.model_config, speculation.draft_model_config))
    if ours != theirs:
        return Reason(f"the width of this model is {ours}, and that of the draft model {theirs}", trained)
    return None


def _described(model: ModelConfig) -> str:
    layers, experts = model.get_total_num_hidden_layers(), model.get_num_experts()
    routed = f"{experts} experts per layer, top-{model.get_num_experts_per_tok()}" if experts else "no experts"
    return f"{layers} layers and {routed}"


def _hidden(speculation: SpeculativeConfig, lacks: str, hides: str) -> Reason | None:
    """Why a drafter's forwards cannot be observed, and what helps; None if they can.

    Args:
        lacks: what is said of a method that does not draft a chain.
        hides: what is said of an option that changes what its forwards compute.
    """
    if speculation.method not in _CHAINS or speculation.parallel_drafting:
        method = f"parallel drafting ({speculation.method})" if speculation.parallel_drafting else speculation.method
        return Reason(
            f"{method} {lacks} along a chain of drafts", Remedy("use EAGLE, EAGLE-3 or a draft model", _EAGLE)
        )
    for option in ("use_local_argmax_reduction", "use_heterogeneous_vocab"):
        if getattr(speculation, option):
            return Reason(f"{option} {hides}", without(option))
    return None


def shows_logits(speculation: SpeculativeConfig) -> bool:
    """Whether the logits of a drafter's forwards can be observed, each of which drafts one token."""
    return _hidden(speculation, "", "") is None


def without(option: str) -> Remedy:
    """Returns the remedy of leaving ``option`` out of ``--speculative-config``."""
    return Remedy(f"drop {option} from --speculative-config", {f"--speculative-config.{option}": None})


def most(vllm_config: VllmConfig) -> int:
    """Returns the most draft tokens that a request has in a step; 0 without speculation."""
    speculation = vllm_config.speculative_config
    return 0 if speculation is None else speculation.num_speculative_tokens


def plans_drafts(vllm_config: VllmConfig) -> bool:
    """Whether the scheduler decides the draft length (V2, see ``draft_planning``) rather than the runner."""
    return getattr(vllm_config, "use_v2_model_runner", False)
