"""Every name of vLLM that the plugin replaces at run time, in one table.

vLLM's source is neither modified nor copied. The methods below are wrapped while vLLM loads, or set on its objects.
``check_names`` fails at the start of an engine, and names the method, if one of them is missing in this vLLM or does
not take the parameters that its wrapper relies on.

Rows that an engine can be served without, exactly, are switched off by name in the environment:
``SPAC_WITHOUT_PATCH=target[,target]``. Rows that lose the same go together: half of a part would be worse than none.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vllm_spac.errors import UnsupportedError, printable

Where = Literal["frontend", "worker", "v1", "v2", "cpu", "gpu"]
Does = Literal["encloses", "replaces", "refuses"]
WITHOUT = "SPAC_WITHOUT_PATCH"


@dataclass(frozen=True)
class Patch:
    """One wrapped name of vLLM.

    Attributes:
        where: the process or the model runner that needs it; ``cpu``: workers on a CPU; ``gpu``: layers whose experts
            pass through slots there.
        on: ``class`` if the name itself is replaced; ``object`` if it is set on one object of the managed model.
        does: ``encloses``: always calls what it wraps; ``replaces``: in some steps does without it, so a change of its
            body has to be followed; ``refuses``: stands before it.
    """

    target: str  # ``module:name`` or ``module:Class.name``
    why: str
    where: Where
    takes: tuple[str, ...] = ()  # names of the parameters that the wrapper relies on; all others are passed on
    first: bool = False  # whether these are the first parameters, in this order: the wrapper gets them by position
    until: str = ""  # the upstream feature that would make the row unnecessary
    on: Literal["class", "object"] = "class"
    does: Does = "encloses"
    loses: str = ""  # what an engine lacks with the row switched off; empty: no engine is served, or exact, without it


_MOE = "vllm.model_executor.layers.fused_moe"
ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"
LOADER = "vllm.model_executor.model_loader.base_loader:BaseModelLoader"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
ENGINE_CORE = "vllm.v1.engine.core:EngineCoreProc.run_engine_core"
THROTTLE = "vllm.v1.engine.core:EngineCore._should_throttle_prefills"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
ENDPOINTS = "vllm.plugins:load_endpoint_plugins"
EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"
SUPPORTED = f"{_MOE}.modular_kernel:FusedMoEExperts.is_supported_config"
TILES = f"{_MOE}.experts.triton_moe:try_get_optimal_moe_config"
CAPTURED_LENGTHS = "vllm.v1.worker.gpu.cudagraph_utils:build_dynamic_sd_schedule_lookup"
_AUTOREGRESSIVE = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator"
ALIGN = tuple(f"{_MOE}.{module}:moe_align_block_size" for module in ("experts.triton_moe", "fused_moe"))
_RUNNERS: tuple[tuple[str, Where], ...] = ((RUNNER_V1, "v1"), (RUNNER_V2, "v2"))
_ROUTING = "a draft model whose routing is returned with its drafts"
_STEP_HOOK = "a plugin hook with the batch before a forward and its tokens after it"
_ENCLOSES: Does = "encloses"
_REPLACES: Does = "replaces"
# Sentences of ``Patch.loses``.
_NO_FLAGS = "the command line has no --plugin and no --spac-* flags, and engines are configured by additional_config"
_NO_ROUTES = "servers have no /spac routes: no live page, no statistics, no change of a budget"
_NO_DRAFTS_WITH_TOKENS = "V1 asks workers in other processes for drafts in a call of its own after each step"
_NO_CHOICE_V1 = (
    "with V1, drafts are not chosen, and budgets and predictors that look at drafts are refused, as trees are"
)
_NO_CHOICE_V2 = "with V2, the guard is off and all drafts are verified"
_NO_CUTS_V2 = "with V2, all drafts of a step run their experts, whatever these cost"
_NO_STATES_V2 = "with V2, predictors that look at the drafter are refused, and drafters run where no drafts are planned"
_STATES_V2 = "hidden states that a drafter returns"
_NO_ROUTING = "prefetch=shadow is refused, and the experts of an MTP head stay in fast memory"
_ONLY_VLLMS_ON_A_CPU = "on a CPU, quantised experts are refused where vLLM has no kernel for them"
_NO_TREES_V1, _NO_TREES_V2 = (f"with {runner}, draft trees are refused" for runner in ("V1", "V2"))

PATCHES = (
    Patch(
        f"{ENGINE_ARGS}.add_cli_args",
        "adds --plugin and the --spac-* flags",
        "frontend",
        ("parser",),
        until="flags that plugins may add",
        loses=_NO_FLAGS,
    ),
    Patch(
        f"{ENGINE_ARGS}.from_cli_args",
        "folds the --spac-* flags into additional_config",
        "frontend",
        ("args",),
        until="flags that plugins may add",
        loses=_NO_FLAGS,
    ),
    Patch(
        f"{ENGINE_ARGS}.create_engine_config",
        "refuses what cannot be served before a worker starts; names the worker extension; splits CUDA graphs",
        "frontend",
        until="a hook for plugins that validates a VllmConfig",
    ),
    Patch(
        ENDPOINTS,
        "adds the routes to servers that use spac",
        "frontend",
        until="routes for some servers only",
        loses=_NO_ROUTES,
    ),
    Patch(
        ENGINE_CORE,
        "an engine that an error of the plugin's ends leaves its sentence and no traceback",
        "frontend",
        until="a start-up error that vLLM hands to the process that started the engine",
        loses="an engine that an error ends prints tracebacks before the error's sentence",
    ),
    Patch(
        f"{LOADER}.load_model",
        "builds the target model of an engine that uses spac with managed experts, and no other model",
        "worker",
        ("vllm_config", "model_config"),
        until="a replacement of custom ops per model",
    ),
    Patch(
        f"{LOADER}.load_weights",
        "decides where experts are stored when all layers are built and no weight has been loaded",
        "worker",
        ("model",),
        until="a hook between building a model and loading it",
        on="object",
    ),
    Patch(
        "vllm.model_executor.custom_op:op_registry_oot",
        "names the managed class of each expert layer while a managed model is built (how vLLM replaces layers)",
        "worker",
    ),
    Patch(
        f"{_MOE}.router.base_router:BaseRouter._compute_routing",
        "a budget cuts what the router chose, traces and evaluations record it, and a predictor reads a draft model's",
        "worker",
        ("hidden_states", "router_logits", "indices_type"),
        until="a callback after the router",
        on="object",
    ),
    Patch(
        f"{_MOE}.runner.moe_runner:MoERunner._select_forward",
        "its result, _forward_entry, becomes an op that CUDA graphs can be split at (GPU only)",
        "worker",
        until="splitting ops that are chosen per layer",
        on="object",
        does=_REPLACES,
    ),
    Patch(
        TILES,
        "tiles are chosen as for a whole layer, not for as many experts as there are slots",
        "gpu",
        ("w1_shape", "w2_shape", "top_k", "dtype", "M", "block_shape"),
        first=True,
        until="tiles that depend on the layer's experts",
    ),
    *(
        Patch(
            target,
            "rows are sorted by expert, then mapped to slots: its CUDA kernel has one count per expert, not per slot",
            "gpu",
            ("topk_ids", "block_size", "num_experts", "expert_map", "pad_sorted_ids", "ignore_invalid_experts"),
            first=True,
            until="a kernel that maps experts after counting, or counts slots",
        )
        for target in ALIGN
    ),
    # -- from here on those of V1's runner --
    Patch(
        f"{RUNNER_V1}._prepare_inputs", "a step begins: its rows by kind", "v1", ("scheduler_output",), until=_STEP_HOOK
    ),
    Patch(f"{RUNNER_V1}.execute_model", "a forward has finished, also a failed one", "v1", until=_STEP_HOOK),
    Patch(f"{RUNNER_V1}.sample_tokens", "a step has finished: its tokens per request", "v1", until=_STEP_HOOK),
    Patch(
        f"{RUNNER_V1}._calc_spec_decode_metadata",
        "a step that the guard left without drafts is sampled as without speculation",
        "v1",
        ("self", "num_draft_tokens"),
        first=True,
        until="an upstream runner that skips it where no request has drafts",
        does=_REPLACES,
        loses="with V1, a step that the guard left without drafts is sampled by the rejection sampler",
    ),
    Patch(
        f"{RUNNER_V1}.propose_draft_token_ids",
        "the guard bounds how many tokens are drafted",
        "v1",
        ("scheduler_output",),
        until="a draft length that is queried at each step, as in V2",
        does=_REPLACES,
        loses=_NO_CHOICE_V1,
    ),
    Patch(
        f"{WORKER}.sample_tokens",
        "drafts return with the tokens of their step",
        "v1",
        until="an engine core that does not ask for drafts in a call of its own",
        loses=_NO_DRAFTS_WITH_TOKENS,
    ),
    *(
        Patch(
            f"{EXECUTOR}.{name}",
            why,
            "frontend",
            takes,
            until="an engine core that does not ask for drafts apart",
            does=does,
            loses=_NO_DRAFTS_WITH_TOKENS,
        )
        for name, why, takes, does in (
            (
                "sample_tokens",
                "takes the drafts out of the tokens of their step",
                ("grammar_output", "non_block"),
                _ENCLOSES,
            ),
            ("take_draft_token_ids", "the worker need not be asked for drafts that came", (), _REPLACES),
        )
    ),
    Patch(
        f"{RUNNER_V1}.initialize_kv_cache",
        "draft trees set their hooks once the KV cache exists",
        "v1",
        ("kv_cache_config", "is_profiling"),
        until="draft trees",
        loses=_NO_TREES_V1,
    ),
    Patch(
        f"{RUNNER_V1}._input_fits_in_drafter",
        "trees end their depth before a request is full, not their number of nodes",
        "v1",
        ("common_attn_metadata",),
        until="draft trees",
        on="object",
        does=_REPLACES,
        loses=_NO_TREES_V1,
    ),
    *(
        Patch(target, why, "v1", takes, until="draft trees", on="object", does=does, loses=_NO_TREES_V1)
        for target, does, why, takes in (
            (
                "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
                _REPLACES,
                "a path of each draft tree is accepted, by vLLM's sampler",
                ("metadata", "draft_probs", "logits", "sampling_metadata"),
            ),
            (
                "vllm.v1.spec_decode.eagle:EagleProposer.propose",
                _REPLACES,
                "a draft tree is grown from vLLM's first pass",
                ("num_speculative_tokens",),
            ),
            (
                "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
                _ENCLOSES,
                "rows of draft trees are sequences",
                ("common_prefix_len", "common_attn_metadata"),
            ),
            (
                "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
                _ENCLOSES,
                "keys and values of a tree row's ancestors are written to its scratch, too",
                ("layer", "key", "value", "kv_cache", "slot_mapping"),
            ),
        )
    ),
    Patch(
        "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration.compute_logits",
        "a budget weighs draft rows by the draft's probabilities, and a predictor hears of each forward of the "
        "drafter; set on the draft model while it drafts",
        "v1",
        ("hidden_states",),
        until="probabilities of greedy drafts, and hidden states, that a drafter returns",
        on="object",
        loses=_NO_CHOICE_V1,
    ),
    Patch(
        f"{PROPOSER}.load_model",
        "a predictor reads a draft model's routers",
        "v1",
        ("target_model",),
        until=_ROUTING,
        loses=_NO_ROUTING,
    ),
    Patch(
        f"{PROPOSER}.set_inputs_first_pass",
        "tells the rows to draft from; a model that drafts for itself reads the token sampled last alone",
        "v1",
        ("next_token_ids", "target_positions", "cad", "num_rejected_tokens_gpu"),
        until=_ROUTING,
        does="replaces",
        loses=_NO_ROUTING,
    ),
    # -- so far those of V1's runner, which go with ``stepping/v1`` --
    Patch(
        f"{RUNNER_V2}.initialize_kv_cache",
        "draft trees set their hooks once the KV cache exists; so does what cuts drafts on the device, or makes none",
        "v2",
        ("kv_cache_config", "is_profiling"),
        until="draft trees",
        loses=_NO_TREES_V2,
    ),
    *(
        Patch(target, why, "v2", takes, until="draft trees", on="object", does=does, loses=_NO_TREES_V2)
        for target, does, why, takes in (
            (
                "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
                _ENCLOSES,
                "rows of draft trees are sequences for the target, and a chain for the drafter",
                ("input_batch", "cudagraph_mode", "block_tables"),
            ),
            (
                "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update",
                _ENCLOSES,
                "keys and values of a tree row's ancestors are written to its scratch, too",
                ("layer", "key", "value", "kv_cache", "slot_mapping"),
            ),
            (
                "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
                _REPLACES,
                "a path of each draft tree is accepted, by the draws of vLLM's sampler",
                ("logits", "input_batch", "draft_logits", "invalid_drafts"),
            ),
            (
                "vllm.v1.worker.gpu.sample.sampler:Sampler.add_request",
                _ENCLOSES,
                "requests whose logits depend on the drafts before a row get chains",
                ("req_idx", "sampling_params"),
            ),
            (
                f"{_AUTOREGRESSIVE}.propose",
                _ENCLOSES,
                "the drafter gets the accepted rows as a chain",
                (
                    "input_batch",
                    "attn_metadata",
                    "slot_mappings",
                    "last_hidden_states",
                    "aux_hidden_states",
                    "dummy_run",
                ),
            ),
            (
                f"{_AUTOREGRESSIVE}.sample_draft",
                _REPLACES,
                "a tree's first level is drawn from these logits",
                ("hidden_states",),
            ),
            *(
                (f"{_AUTOREGRESSIVE}.{name}", _REPLACES, "a draft tree is grown from the first pass", ("num_reqs",))
                for name in ("_multi_step_decode", "_generate_fused_drafts")
            ),
        )
    ),
    Patch(
        f"{SPECULATOR}.load_model",
        "a predictor reads a draft model's routers",
        "v2",
        ("target_model",),
        until=_ROUTING,
        loses=_NO_ROUTING,
    ),
    *(
        Patch(target, why, "v2", takes, until=until, on="object", does=does, loses=_NO_STATES_V2)
        for target, does, why, takes, until in (
            (
                f"{SPECULATOR}.propose",
                _REPLACES,
                "a predictor hears what is chosen of the token sampled last, then of each draft; a drafter runs "
                "as often as drafts are planned, and not at all while the guard rests",
                ("input_batch", "num_sampled", "num_rejected", "last_sampled", "dummy_run", "num_speculative_tokens"),
                f"{_STATES_V2}, and drafters that follow num_spec_tokens_to_schedule",
            ),
            (
                f"{SPECULATOR}.sample_draft",
                _ENCLOSES,
                "a forward of the drafter is over, and which draft it makes",
                ("hidden_states", "draft_step"),
                _STATES_V2,
            ),
        )
    ),
    Patch(
        f"{SPECULATOR}.compute_draft_logits",
        "drafts are cut on the device by how sure the drafter is of them",
        "v2",
        ("hidden_states",),
        until="probabilities of greedy drafts that a drafter keeps on the device",
        on="object",
        loses=_NO_CUTS_V2,
    ),
    Patch(
        f"{RUNNER_V2}.prepare_inputs", "a step begins: its rows by kind", "v2", ("scheduler_output",), until=_STEP_HOOK
    ),
    Patch(f"{RUNNER_V2}.execute_model", "a forward has finished, also a failed one", "v2", until=_STEP_HOOK),
    Patch(f"{RUNNER_V2}.sample_tokens", "a step has finished: its tokens per request", "v2", until=_STEP_HOOK),
    Patch(f"{WORKER}.compile_or_warm_up_model", "nothing is counted while vLLM warms up", "worker", until=_STEP_HOOK),
    Patch(
        f"{CPU_WORKER}.determine_available_memory",
        "the KV cache is no larger than requests can use if the user set no size: vLLM takes all RAM that is left",
        "cpu",
        until="a KV cache that vLLM bounds by max_num_seqs requests of max_model_len tokens",
        loses="on a CPU, the KV cache takes all RAM that is left: set --kv-cache-memory-bytes",
    ),
    Patch(
        f"{CPU_WORKER}.compile_or_warm_up_model",
        "the KV cache, which vLLM has filled with zeros, takes memory only where requests use it",
        "cpu",
        until="a KV cache on the CPU that is allocated without being written to",
        loses="on a CPU, all of the KV cache is resident from the start",
    ),
    Patch(
        SUPPORTED,
        "a layer of quantised experts that our kernels compute is built, whether vLLM has a kernel for it or not",
        "cpu",
        ("cls", "moe_config", "weight_key", "activation_key", "activation_format"),
        first=True,
        until="a way for a plugin to provide a kernel for a CPU",
        does=_REPLACES,
        loses=_ONLY_VLLMS_ON_A_CPU,
    ),
    Patch(f"{WORKER}.shutdown", "traces are finished, threads stopped", "worker", until="a shutdown hook for plugins"),
    *(
        Patch(
            f"{runner}.reload_weights",
            "new weights for a running engine are refused: its experts were packed when it started",
            where,
            until="a way for a quant method to refuse an update",
            does="refuses",
        )
        for runner, where in _RUNNERS
    ),
    *(
        Patch(
            f"{WORKER}.{name}",
            "is refused: it would save what is in the slots instead of the experts",
            "worker",
            until="a way for a quant method to refuse being saved",
            does="refuses",
        )
        for name in ("save_sharded_state", "save_tensorized_model")
    ),
    Patch(
        THROTTLE,
        "steps that only decode run between chunks of prompts",
        "frontend",
        until="a share of their speed that running requests keep",
        loses="a long prompt slows running requests as in stock vLLM, by a chunk per token",
    ),
    Patch(
        f"{SCHEDULER}.__init__",
        "the guard replaces dynamic_sd_lookup, and observes schedule and update_from_output",
        "v2",
        ("vllm_config",),
        until="a draft length that a plugin provides",
        loses=_NO_CHOICE_V2,
    ),
    Patch(
        CAPTURED_LENGTHS,
        "full graphs are captured also of steps without drafts, where the schedule of draft lengths has none",
        "v2",
        ("num_speculative_tokens_per_batch_size",),
        until="draft lengths to capture that are no schedule",
        loses=_NO_CHOICE_V2,
    ),
    Patch(f"{SCHEDULER}.schedule", "the guard observes when a step is planned", "v2", on="object", loses=_NO_CHOICE_V2),
    Patch(
        f"{SCHEDULER}.update_from_output",
        "the guard, and what lets prompts wait, observe when a step has finished",
        "v2",
        ("scheduler_output", "model_runner_output"),
        on="object",
        loses=_NO_CHOICE_V2,
    ),
)
_BY_TARGET = {patch.target: patch for patch in PATCHES}


def switched_off() -> dict[str, list[str]]:
    """Returns what is lost by the rows that the environment switches off -> the targets of all rows that lose it.

    Raises:
        UnsupportedError: one that it names is not in the table, or cannot be done without.
    """
    lost: dict[str, list[str]] = {}
    for name in _named_off():
        if name not in _BY_TARGET:
            known = ", ".join(patch.target for patch in PATCHES if patch.loses)
            raise UnsupportedError(f"spac: {WITHOUT} names {printable(name)}; what can be switched off is {known}")
        if not (loses := _BY_TARGET[name].loses):
            why = _BY_TARGET[name].why
            raise UnsupportedError(f"spac: {WITHOUT} names {name}, which no engine can do without: {why}; leave it out")
        lost[loses] = [patch.target for patch in PATCHES if patch.loses == loses]
    return lost


def is_off(target: str) -> bool:
    """Returns whether the environment switches off ``target``, or another row that loses the same.

    What it must not name is not switched off; ``switched_off`` refuses it before an engine starts.
    """
    loses = _BY_TARGET[target].loses
    return bool(loses) and any(name in _BY_TARGET and _BY_TARGET[name].loses == loses for name in _named_off())


def _named_off() -> list[str]:
    return [name.strip() for name in os.environ.get(WITHOUT, "").split(",") if name.strip()]


def install(target: str, make: Callable[[Callable], Callable]) -> None:
    """Replaces ``target`` by ``make(present value)``; does nothing in a second call, or where it is switched off.

    Raises:
        UnsupportedError: this vLLM lacks the name or a parameter of it.
    """
    patch = _BY_TARGET[target]
    assert patch.on == "class", f"{target} is not replaced as a whole"
    if is_off(target):
        return
    owner, name, static = _find(patch)
    if getattr(static, "__spac__", False):
        return
    original = static.__func__ if isinstance(static, staticmethod | classmethod) else static
    wrapper = functools.wraps(original)(make(original))
    replaced: Any = type(static)(wrapper) if isinstance(static, staticmethod | classmethod) else wrapper
    replaced.__spac__ = True
    setattr(owner, name, replaced)


def check_names(*where: Where) -> None:
    """Checks that this vLLM has every name of these places, with the parameters that its wrapper relies on.

    Rows that are switched off are left out.

    Raises:
        UnsupportedError: names the first that is missing.
    """
    for error in missing(*where):
        raise error


def missing(*where: Where) -> Iterator[UnsupportedError]:
    """Yields an error for each name of these places that ``check_names`` would refuse."""
    for patch in PATCHES:
        if patch.where in where and not is_off(patch.target):
            try:
                _find(patch)
            except UnsupportedError as error:
                yield error


def is_wrapped(target: str) -> bool:
    """Returns whether ``install`` has replaced ``target`` in this process."""
    return getattr(_find(_BY_TARGET[target])[2], "__spac__", False)


def _find(patch: Patch) -> tuple[Any, str, Any]:
    """Returns (the owner of the name, the name, its raw value, which may be a staticmethod)."""
    module, _, path = patch.target.partition(":")
    *owners, name = path.split(".")
    try:
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        static = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise _missing(patch, f"has no {patch.target} ({error})") from error
    found = inspect.unwrap(static.__func__ if isinstance(static, staticmethod | classmethod) else static)
    given = tuple(inspect.signature(found).parameters) if patch.takes else ()
    if patch.first and given[: len(patch.takes)] != patch.takes:
        raise _missing(patch, f"calls {patch.target} with {', '.join(given)}")
    if absent := set(patch.takes) - set(given):
        raise _missing(patch, f"calls {patch.target} without {', '.join(sorted(absent))}")
    return owner, name, static


def _missing(patch: Patch, what: str) -> UnsupportedError:
    from vllm import __version__

    instead = f", or set {WITHOUT}={patch.target}: {patch.loses}" * bool(patch.loses)
    return UnsupportedError(
        f"spac: vLLM {__version__} {what}, and the plugin needs it: {patch.why}; use a vLLM that it was tested with "
        f"(see the README){instead}"
    )
