"""What goes with what: combinations of knobs, platform, drafts and ranks that cannot serve, and what helps.

One function decides. Engines ask it when they start, and a test compares it with the table of this folder's README.
What a model or another option of vLLM's decides is checked in ``preflight``; what knobs alone decide, in
``config.rules``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.presets import PRESETS
from vllm_spac.config.rules import WITHOUT_WORKERS, plane
from vllm_spac.cpu_kernels._library import missing
from vllm_spac.decisions.predictors.base import DRAFTING, Signal
from vllm_spac.errors import Remedy, UnsupportedError, add, drop, flag, use
from vllm_spac.integration.hooks import drafts
from vllm_spac.integration.hooks.ranks import Refusal, several

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WHOLE = drop("vllm_enable_expert_parallel").but(", and each rank holds a part of every expert")


def check(config: SpacConfig, vllm_config: VllmConfig, gpu: bool) -> None:
    """Raises ``UnsupportedError`` for the first combination that cannot serve; it has the remedies.

    Args:
        vllm_config: its parallelism, speculation, scheduler and runner are read.
    """
    for refused, problem, remedies in _refusals(config, vllm_config, gpu):
        if refused:
            raise UnsupportedError.refused(f"spac: {problem}", *remedies)


def _refusals(config: SpacConfig, vllm_config: VllmConfig, gpu: bool) -> Iterator[Refusal]:
    if (unknown := drafts.unserved(vllm_config)) is not None:
        method = f"--speculative-config with method {vllm_config.speculative_config.method}"
        yield True, f"{method} is not supported: {unknown.problem}", (unknown.remedy, drop("vllm_speculative_config"))
    yield from _of_preset(config, vllm_config)
    yield from _of_workers(config, vllm_config)
    yield from _of_ranks(config, vllm_config)
    if vllm_config.parallel_config.enable_expert_parallel:
        yield from _of_divided_experts(vllm_config, gpu)
    if drafts.of_itself(vllm_config):
        yield from _of_own_drafts(config, vllm_config)
    yield from _of_guard(config, vllm_config)
    yield from _of_votes(config, vllm_config)
    yield from _of_cpu_experts(config, gpu)
    yield from _of_cpu_kernel(config, gpu)
    yield from _of_prefetch(config, vllm_config)


def _flag_of(config: SpacConfig, knob: str) -> str:
    return f"{knob}={getattr(config, knob)} ({flag(knob)})"


def _of_preset(config: SpacConfig, vllm_config: VllmConfig) -> Iterator[Refusal]:
    preset = None if config.preset is None else PRESETS[config.preset]
    if preset is not None and preset.drafts is not None:
        without = vllm_config.speculative_config is None
        yield (
            without,
            f"{_flag_of(config, 'preset')} verifies drafts, and nothing drafts",
            (preset.drafter, drop("preset")),
        )


def _of_workers(config: SpacConfig, vllm_config: VllmConfig) -> Iterator[Refusal]:
    (ranks, flags, one), named = several(vllm_config), plane(config)
    what = f"{named} with {flags} (a worker has whole experts, and serves one process)"
    yield config.has_workers and ranks > 1, f"{what} is not supported", (WITHOUT_WORKERS, one)


def _of_ranks(config: SpacConfig, vllm_config: VllmConfig) -> Iterator[Refusal]:
    ranks, flags, one = several(vllm_config)
    yield (
        ranks > 1 and config.speculate != "off",
        f"{_flag_of(config, 'speculate')} with {flags} (ranks have different experts in "
        "fast memory and would run different ones) is not supported",
        (drop("speculate"),),
    )
    stages = vllm_config.parallel_config.pipeline_parallel_size > 1
    yield (
        stages and config.record is not None,
        f"{_flag_of(config, 'record')} with {flags} (no stage has the layers of all, and the last alone the tokens) is "
        "not supported",
        (drop("record"), use(vllm_pipeline_parallel_size=1)),
    )
    yield (
        stages and config.predictor_file is not None,
        f"{_flag_of(config, 'prefetch')} with {flags} (the file is for the layers of all stages) is not supported",
        (use(prefetch="gate"), drop("prefetch"), use(vllm_pipeline_parallel_size=1)),
    )


def _of_divided_experts(vllm_config: VllmConfig, gpu: bool) -> Iterator[Refusal]:
    option = "--enable-expert-parallel"
    drafter = vllm_config.speculative_config
    copies = getattr(drafter, "method", None) == "draft_model" and drafter.draft_model_config.get_num_experts() > 0
    yield (
        not gpu and copies,
        f"a draft model with experts and {option} (vLLM's CPU kernel cannot divide these) is not supported",
        (_WHOLE,),
    )


def _of_own_drafts(config: SpacConfig, vllm_config: VllmConfig) -> Iterator[Refusal]:
    """A model that is its own draft model drafts with the experts in slots that it can reach."""
    ranks, other = vllm_config.parallel_config.tensor_parallel_size, drafts.OTHER_DRAFT_MODEL
    what = "a model that drafts for itself (--speculative-config names it as draft model)"
    if (off := drafts.switched_off(vllm_config, drafts.OWN_DRAFTS)) is not None:
        yield True, f"{what} cannot work here: {off.problem}", (off.remedy, other)
    yield (
        ranks > 1,
        f"{what} with --tensor-parallel-size {ranks} (ranks have different experts in fast memory) is not supported",
        (use(vllm_tensor_parallel_size=1), other),
    )
    yield (
        drafts.plans_drafts(vllm_config),
        f"{what} with V2's runner (which keeps its drafts on the device) is not supported",
        (drafts.V1, other),
    )
    yield config.has_workers, f"{what} with {plane(config)} is not supported", (WITHOUT_WORKERS, other)
    yield (
        not config.execution_class.needs_host,
        f"{what} with {plane(config)} (its layers load what they miss) is not supported",
        (use(plane="slots"), other),
    )
    model = vllm_config.model_config
    yield (
        model.is_hybrid,
        f"{what} whose layers keep a recurrent state, which drafts would change, is not supported",
        (other,),
    )
    yield (
        model.use_mla,
        f"{what} with latent attention (MLA), with which vLLM runs no draft model, is not supported",
        (other,),
    )


def _of_guard(config: SpacConfig, vllm_config: VllmConfig) -> Iterator[Refusal]:
    """If the user set guard=on; by default a guard that cannot work is left out, with a line in the log."""
    asked = config.guards and "guard" in config.model_fields_set
    if not asked or vllm_config.speculative_config is None:
        return
    if (reason := drafts.unguarded(vllm_config, config.tree_nodes > 0)) is not None:
        what = f"guard=on (--spac-guard) cannot work here: {reason.problem}"
        yield True, what, (reason.remedy, use(guard="off"))


def _of_votes(config: SpacConfig, vllm_config: VllmConfig) -> Iterator[Refusal]:
    """Votes that are weighted by what is not known, or that a policy would not count."""
    if config.parsed_budget.alpha is None:
        return
    what = f"votes=path of {_flag_of(config, 'budget')} cannot work here"
    uniform = use(budget=config.parsed_budget.but(votes=None, alpha=None))
    if (reason := drafts.unweighted(vllm_config, config.cuts_in_graphs)) is not None:
        yield True, f"{what}: {reason.problem}", (reason.remedy, uniform)
    on_device = drafts.weighs_on_device(vllm_config)
    if config.execution_class.counts_votes and not on_device:
        return
    each, others = f"with {plane(config)} each row counts one", [use(plane="slots"), uniform]
    if on_device:
        each = "V2 keeps the probabilities of drafts on the device"
    if on_device or config.has_workers:
        others = [uniform]
    yield (
        bool(components.find("policies", config.policy).predictor),
        f"{what}: policy={config.policy} counts selections, and {each}",
        (use(policy="reuse"), *others),
    )
    counts = config.prefetch != "off" and not components.find("predictors", config.prefetch).observes_layers()
    yield counts, f"{what}: prefetch={config.prefetch} counts selections, and {each}", (drop("prefetch"), *others)


def _of_cpu_experts(config: SpacConfig, gpu: bool) -> Iterator[Refusal]:
    device, before = "cuda" if gpu else "cpu", config.host_memory is not None and config.execution_class.reads_in_place
    yield (
        config.cpu_experts != "off" and not config.store_class_on(device).addressable and not before,
        f"{_flag_of(config, 'cpu_experts')} computes experts where they are stored, and "
        f"store={config.store_on(device)} is not in memory",
        (add(store="host"), drop("cpu_experts")),
    )


def _of_cpu_kernel(config: SpacConfig, gpu: bool) -> Iterator[Refusal]:
    """A kernel of CPU experts that is missing, or cannot read the layout that these have here."""
    if config.cpu_experts == "off":
        return
    ours = gpu or config.execution_class.layout == "plain"  # else vLLM's kernel runs the slots, on the CPU
    kernel = config.cpu_kernel or ("simd" if ours else "native")
    yield (
        kernel == "simd" and bool(missing()),
        f"{_flag_of(config, 'cpu_experts')} needs kernels that were not compiled when vllm_spac was installed",
        (Remedy("install a C compiler, then vllm_spac again"), drop("cpu_experts")),
    )
    if config.cpu_kernel is None:
        return
    kind = components.find("cpu_kernels", kernel)
    needs_vllm_s = kind.layout == "kernel"
    named, other = _flag_of(config, "cpu_kernel"), drop("cpu_kernel")
    layers = "on a GPU" if gpu else f"with {plane(config)}"
    yield (
        needs_vllm_s and ours,
        f"{named} is vLLM's kernel for a CPU, and {layers} experts are not in its layout",
        (use(cpu_kernel="simd"), other),
    )
    yield (
        not needs_vllm_s and not ours,
        f"{named} cannot read the layout that experts have for vLLM's kernel on a CPU ({plane(config)})",
        (use(cpu_kernel="native"), other),
    )
    yield (
        not config.execution_class.needs_host and not kind.answers,
        f"{named} answers no requests of a device, which {plane(config)} makes",
        (use(cpu_kernel="simd"), other),
    )


def _of_prefetch(config: SpacConfig, vllm_config: VllmConfig) -> Iterator[Refusal]:
    """A predictor that looks at a draft model, where there is none that it can read."""
    needs = frozenset() if config.prefetch == "off" else components.find("predictors", config.prefetch).needs
    if not DRAFTING & needs:
        return
    reason = (drafts.unshadowed if Signal.DRAFT_ROUTING in needs else drafts.ungated)(vllm_config)
    if reason is not None:
        what = f"{_flag_of(config, 'prefetch')} cannot work here: {reason.problem}"
        yield True, what, (reason.remedy, drop("prefetch"))
