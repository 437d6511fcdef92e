"""What vLLM's configuration allows with drafts: another length, and weights by the draft's probabilities."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_spac.errors import Remedy, add, drop, use
from vllm_spac.integration.hooks import device, patches

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig


class Reason(NamedTuple):
    """Why something cannot work, and what helps."""

    problem: str
    remedy: Remedy

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy.text}"


_EAGLE = {"--speculative-config": {"method": "eagle3", "model": "HEAD"}}
_KNOWN = Remedy("use EAGLE, EAGLE-3 or a draft model", _EAGLE)
_COPY = {"--speculative-config": {"method": "draft_model", "model": "COPY", "num_speculative_tokens": 4}}
OTHER_DRAFT_MODEL = Remedy("name a copy of it in another folder, or another draft model", _COPY)
V1 = Remedy("set VLLM_USE_V2_MODEL_RUNNER=0", {"VLLM_USE_V2_MODEL_RUNNER": "0"})
_PARENT = {"--speculative-config": {"method": "draft_model", "model": "PARENT", "num_speculative_tokens": 4}}
IN_ORDER = Remedy("add --no-async-scheduling", {"--no-async-scheduling": True})
EAGER = Remedy("add --enforce-eager", {"--enforce-eager": True})
CHAINS = drop("tree").but(", and the drafter proposes chains")
_PROPOSING_V1 = f"{patches.RUNNER_V1}.propose_draft_token_ids"
CUTTING = (
    f"{patches.RUNNER_V2}.initialize_kv_cache",
    f"{patches.SPECULATOR}.propose",
    f"{patches.SPECULATOR}.compute_draft_logits",
)
OWN_DRAFTS = f"{patches.PROPOSER}.load_model", f"{patches.PROPOSER}.set_inputs_first_pass", _PROPOSING_V1
_GUARDED = ("ngram", "draft_model", "eagle", "eagle3", "mtp", "dflash")  # methods that the guard was tried with
# Methods whose drafts the target verifies as any others, and that nothing of the plugin looks at or shortens. One that
# is in neither is refused: ``extract_hidden_states`` drafts nothing, and a shorter step would lose what it is for.
_PLAIN = ("ngram_gpu", "suffix", "custom_class", "dspark", "medusa", "mlp_speculator")
_LOSSY = ("synthetic", "fly")  # ways to verify that accept drafts which the target would not choose
_CHAINS = ("eagle", "eagle3", "draft_model")  # methods that draft one token from the logits of each forward


def unserved(vllm_config: VllmConfig) -> Reason | None:
    """Why the plugin does not serve with this way to draft, and what helps; None if it does, or nothing drafts."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method in (*_GUARDED, *_PLAIN):
        return None
    return Reason(f"the plugin does not know what {speculation.method} does in a step", _KNOWN)


def unguarded(vllm_config: VllmConfig, trees: bool = False) -> Reason | None:
    """Why the guard cannot change draft lengths, or the nodes of ``trees``, and what helps; None if it can."""
    if (ranks := vllm_config.parallel_config.tensor_parallel_size) > 1:
        one = use(vllm_tensor_parallel_size=1)
        return Reason(f"each of {ranks} ranks would choose the draft length by its own clock", one)
    hooks = (_PROPOSING_V1,), (f"{patches.SCHEDULER}.__init__",)
    if off := switched_off(vllm_config, *hooks):
        return off
    method = "none" if (speculation := vllm_config.speculative_config) is None else speculation.method
    if method in _PLAIN or (method == "dflash" and plans_drafts(vllm_config)):
        return Reason(f"it was not tried with drafts of {method}{' in V2' * (method == 'dflash')}", _KNOWN)
    if (way := getattr(speculation, "rejection_sample_method", "standard")) in _LOSSY:
        kept = "rejection_sample_method"
        return Reason(f"{kept}={way} is lossy, and tokens would depend on the length of drafts", without(kept))
    if plans_drafts(vllm_config):
        asked = "num_speculative_tokens_per_batch_size"
        if trees and getattr(speculation, asked, None):
            return Reason(f"{asked} plans how many nodes are drafted", without(asked))
        if vllm_config.parallel_config.distributed_executor_backend != "uni":
            # On a CPU vLLM takes mp for uni where the engine is a process of its own, as a server's is.
            within = V1 if device.is_cpu() else add(vllm_distributed_executor_backend="uni")
            return Reason("V2's scheduler plans drafts in another process", within)
    elif vllm_config.scheduler_config.async_scheduling:
        return Reason("V1 plans the drafts of a step before the last one has finished", IN_ORDER)
    return None


def uncut(vllm_config: VllmConfig, in_graphs: bool = False) -> Reason | None:
    """Why V2's runner cannot cut drafts of a step on the device, and what helps; None if it can.

    Args:
        in_graphs: the user wants it also where full CUDA graphs hold the drafter.
    """
    assert plans_drafts(vllm_config), "V1 chooses them before a step is planned"
    if (reason := unguarded(vllm_config)) is not None:
        return reason
    speculation = vllm_config.speculative_config
    if hidden := _hidden(speculation, "gives no probabilities", "drafts without logits of the whole vocabulary"):
        return hidden
    if getattr(speculation, "enable_adaptive_verification", False):
        return Reason("vLLM cuts drafts itself", without("enable_adaptive_verification"))
    if reason := _beside_graphs(vllm_config, in_graphs, " to have them cut"):
        return reason
    return switched_off(vllm_config, (), CUTTING)


def _beside_graphs(vllm_config: VllmConfig, in_graphs: bool, gain: str) -> Reason | None:
    """Why the drafter's logits are not read; None if they are. No cause was found for what the H100 did.

    Args:
        in_graphs: as of ``uncut``. Nothing is then launched for the first time beside a replay, which may wait for it.
        gain: what eager steps are good for.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs():
        return None
    if not in_graphs:
        problem = "full CUDA graphs hold the steps, and an H100 that cut drafts in such graphs stood still"
        other = add(guard="on@cut=always").text
        return Reason(problem, EAGER.but(f"{gain}, at the price of the graphs, or {other}, which no GPU has run since"))
    if vllm_config.kernel_config.enable_jit_warmup:
        return None
    named = "--kernel-config.enable_jit_warmup"
    return Reason("vLLM does not warm up what runs beside its graphs", Remedy(f"drop {named}", {named: None}))


def unweighted(vllm_config: VllmConfig, in_graphs: bool = False) -> Reason | None:
    """Why votes cannot be weighted by the draft's probabilities, and what helps; None if they can.

    Without speculation every row is certain. ``in_graphs`` as of ``uncut``.
    """
    speculation = vllm_config.speculative_config
    if speculation is None:
        return None
    if hidden := _hidden(speculation, "gives no probabilities", "drafts without logits of the whole vocabulary"):
        return hidden
    if off := switched_off(vllm_config, (_PROPOSING_V1,)):
        return off
    if plans_drafts(vllm_config):
        return _unweighted_on_device(vllm_config, in_graphs)
    if vllm_config.scheduler_config.async_scheduling:
        return Reason("V1 plans a step before its drafts are known on the host", IN_ORDER)
    return None


def weighs_on_device(vllm_config: VllmConfig) -> bool:
    """Whether only the device knows the probabilities of drafts, and the host counts each row as one."""
    return vllm_config.speculative_config is not None and plans_drafts(vllm_config)


def _unweighted_on_device(vllm_config: VllmConfig, in_graphs: bool) -> Reason | None:
    """As ``unweighted``, with V2, which keeps the probabilities on the device."""
    if getattr(vllm_config.speculative_config, "enable_adaptive_verification", False):
        return Reason("vLLM cuts drafts itself", without("enable_adaptive_verification"))
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        one = use(vllm_tensor_parallel_size=1)
        return Reason("V2 keeps the probabilities on the device, which was not tried with several ranks", one)
    if reason := _beside_graphs(vllm_config, in_graphs, ""):
        return reason
    return switched_off(vllm_config, (), CUTTING)


def unshadowed(vllm_config: VllmConfig) -> Reason | None:
    """Why the routers of a draft model cannot stand for the model's, and what helps; None if they may.

    What a model builds is compared when it is loaded (``draft_routing``).
    """
    speculation = vllm_config.speculative_config
    copy = Remedy("use a copy of this model, quantised with llm-compressor, as draft model", _COPY)
    if speculation is None:
        example = f"add --speculative-config '{json.dumps(_COPY['--speculative-config'])}'"
        written = Remedy(f"{example}, where COPY is a copy of this model, quantised with llm-compressor", _COPY)
        return Reason("there is no draft model", written)
    if speculation.method != "draft_model":
        return Reason(f"{speculation.method} drafts without experts like this model's", copy)
    if unheard := _unheard(vllm_config, "has no routing"):
        return unheard
    ours, theirs = map(_described, (vllm_config.model_config, speculation.draft_model_config))
    if ours != theirs:
        return Reason(f"this model has {ours}, and the draft model {theirs}", copy)
    return None


def _unheard(vllm_config: VllmConfig, lacks: str) -> Reason | None:
    """Why nothing hears of the forwards of a draft model, and what helps; ``lacks`` as of ``_hidden``."""
    hooks = (
        (_PROPOSING_V1, f"{patches.PROPOSER}.load_model"),
        (f"{patches.SPECULATOR}.propose", f"{patches.SPECULATOR}.load_model"),
    )
    hidden = _hidden(vllm_config.speculative_config, lacks, "hides the drafter's tokens")
    return hidden or switched_off(vllm_config, *hooks)


def switched_off(vllm_config: VllmConfig, v1: Sequence[str], v2: Sequence[str] = ()) -> Reason | None:
    """Why what needs these hooks of the engine's runner cannot work: the environment switches one off; None if not."""
    for target in v2 if plans_drafts(vllm_config) else v1:
        if patches.is_off(target):
            return Reason(
                f"{patches.WITHOUT} switches off {target}", Remedy(f"unset {patches.WITHOUT}", {patches.WITHOUT: None})
            )
    return None


def ungated(vllm_config: VllmConfig) -> Reason | None:
    """Why the model's routers cannot score what a draft model computes, and what helps; None if they can.

    What a model builds is looked at when it is loaded (``draft_routing``).
    """
    speculation = vllm_config.speculative_config
    other = use(prefetch="gate")
    if speculation is None:
        example = f"add --speculative-config '{json.dumps(_PARENT['--speculative-config'])}'"
        return Reason("there is no draft model", Remedy(f"{example}, where PARENT has this model's width", _PARENT))
    if speculation.method != "draft_model":
        return Reason(f"{speculation.method} has no layers that stand for this model's", other)
    if unheard := _unheard(vllm_config, "has no layers"):
        return unheard
    if of_itself(vllm_config):
        return Reason("the model is its own draft model, whose routers choose", use(prefetch="shadow"))
    ours, theirs = (each.get_hidden_size() for each in (vllm_config.model_config, speculation.draft_model_config))
    if ours != theirs:
        return Reason(f"the width of this model is {ours}, and that of the draft model {theirs}", other)
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
        return Reason(f"{method} {lacks} along a chain of drafts", _KNOWN)
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


def of_itself(vllm_config: VllmConfig) -> bool:
    """Whether the draft model is the model itself, so that it drafts with the experts in slots (``self_drafting``)."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method != "draft_model":
        return False
    draft, model = speculation.draft_model_config, vllm_config.model_config
    if os.path.isdir(draft.model) and os.path.isdir(model.model):
        return os.path.samefile(draft.model, model.model)
    return (draft.model, draft.revision) == (model.model, model.revision)


def most(vllm_config: VllmConfig) -> int:
    """Returns the most draft tokens that a request has in a step; 0 without speculation."""
    speculation = vllm_config.speculative_config
    return 0 if speculation is None else speculation.num_speculative_tokens


def plans_drafts(vllm_config: VllmConfig) -> bool:
    """Whether the scheduler decides the draft length (V2, see ``draft_planning``) rather than the runner."""
    return getattr(vllm_config, "use_v2_model_runner", False)
