"""Every knob of the product, with its values and default. The flag ``--spac-disk-dir`` sets the key ``disk_dir``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vllm_spac.components import ComponentName
from vllm_spac.config import tree_shape, types
from vllm_spac.config.budget_knob import ALPHA, BudgetText
from vllm_spac.config.tree_shape import TreeText


class Knobs(BaseModel):
    """The knobs as they are given; each value is checked by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: types.PresetName = Field(
        None,
        description="A recipe, a paper's or composed of several (moe-spec, speculating-experts and composed-lossy are "
        "LOSSY): the knobs that it stands for, which the log prints, where you do not set them.",
    )
    slots: types.SlotsText = Field(
        "auto",
        description="Experts kept in fast memory: a number per layer, a percentage of all, a multiple of top-k for "
        "all layers together (2k), or auto (as many as fit next to the KV cache).",
    )
    store: Annotated[str | None, ComponentName("stores", "store")] = Field(
        None,
        description="Where experts without a slot are stored: host, disk, or by default host with a GPU, without "
        "host_memory and where all experts fit host memory, else disk.",
    )
    disk_dir: types.SomePath = Field(
        None,
        description="Folder of the packed experts with store=disk, by default ~/.cache/vllm_spac.",
    )
    host_memory: types.Size | None = Field(
        None,
        gt=0,
        description="With store=disk, pinned host memory, e.g. 32GiB for all ranks together, that holds experts "
        "between the slots and the disk.",
    )
    policy: Annotated[str, ComponentName("policies", "policy", arguments=True)] = Field(
        "reuse",
        description="Which expert is evicted when a slot is needed.",
    )
    prefetch: Annotated[
        str,
        ComponentName(
            "predictors",
            "predictor",
            ("off",),
            arguments=True,
            settings=types.PREFETCHING,
        ),
    ] = Field(
        "off",
        description="Which experts are read ahead in the background: none (off); those of the highest utility "
        "(utility); those that the next layer's router chooses of what this one reads (gate); those that a trained "
        "predictor names for the next layers (neural@file=PATH, of vllm-spac predictors train); those that a copy of "
        "the model as draft model chose "
        "(shadow); or those that the model's routers choose of what a draft model's layers compute (draft_gate); "
        f"extra limits what this adds to the loads that layers need ({types.EXTRA:g}), where the host decides; of "
        "draft_gate and shadow, k is the experts that a row names per layer, and cutoff the number of layers.",
    )
    guard: Annotated[str, types.GUARD] = Field(
        "on",
        description="Shorten or skip drafts when the experts they need cost more time than their tokens save (on); on "
        "a GPU, cut says whether single drafts are cut in full CUDA graphs too (always), in which no GPU has run it "
        "since an H100 stood still, or in other steps alone (eager); with V1's runner, lookups says whether n-grams of "
        "a request's text are its drafts where a drafter agrees or fared worse (on).",
    )
    tree: Annotated[str, TreeText()] = Field(
        tree_shape.CHAINS,
        description="Draft tokens of an EAGLE draft tree (16), the most probable by the drafter, or chains (0); depth "
        "is the levels (6), and width the most children per node and expanded nodes per level (8).",
    )
    cpu_experts: Annotated[
        str, ComponentName("balancers", "balancer", ("off", types.AUTO), arguments=True, counts=True)
    ] = Field(
        "off",
        description="Which missing experts the CPU computes where they are stored, exact up to rounding: none (off), "
        "those that waterfill selects while steps are shorter with them (auto), those that the named balancer "
        "selects in every step, or per layer the N with the fewest rows.",
    )
    profile: types.SomePath = Field(
        None,
        description="Costs for cpu_experts, a file of vllm-spac check --measure, not those measured at the start.",
    )
    cpu_kernel: Annotated[str | None, ComponentName("cpu_kernels", "CPU kernel")] = Field(
        None,
        description="Kernel of cpu_experts: vLLM's (native, the default for its layout on a CPU machine), "
        "or compiled ones that read experts as they are stored (simd, the default elsewhere).",
    )
    io_threads: Annotated[int, BeforeValidator(types.no_bool)] = Field(
        4, ge=1, le=64, description="Threads that load missed experts."
    )
    executor: Annotated[str, types.EXECUTOR] = Field(
        types.LOCAL,
        description="Which processes keep and compute the experts: the engine's own (local), expert workers on CPUs "
        "that are started here (processes; by default 2) or that vllm-spac cluster has started (cluster; those of its "
        "file, by default all); per_layer of them divide the experts of each layer (1).",
    )
    plane: Annotated[str, types.PLANE] = Field(
        types.AUTO,
        description="How layers reach their experts: the host loads them into slots, between router and kernel, for "
        "vLLM's own kernel, with stock's bits (slots), or for our grouped GEMM over a table of addresses, exact up to "
        "rounding, which also reads MXFP4, NVFP4 and INT8 (table); or the GPU decides in the layer what gets a slot, "
        "and our kernel reads the rest in place; long prompts borrow slots (pointers); or pointers on a GPU where it "
        "can serve, else what reads the checkpoint from slots (auto).",
    )
    record: types.RecordText = Field(
        None,
        description="Files to record in, each replaced if it is one: trace=FILE, the routers' choices, for vllm-spac "
        "trace; timeline=FILE, what each thread did in the last steps, for https://ui.perfetto.dev; or both, with a "
        "comma between them.",
    )
    budget: Annotated[str, BudgetText()] = Field(
        "off",
        description="LOSSY: experts per layer that one verify step may use, ranked over all of its tokens: a number "
        "of them (16), as many as hold a share of the routing mass of the selected experts (0.98) or of all "
        "(0.98@of=scores), or no bound (off); ranking orders them, coverage is what runs in place of one that was cut "
        "(substitution: another, truncation: none), when says which rows count and are cut (verify, all decoding ones, "
        "or all), and votes how much (uniform, or path: by the probability that a draft is reached, to the power of "
        f"alpha, {ALPHA:g}).",
    )
    speculate: Annotated[str, types.SPECULATE] = Field(
        "off",
        description="LOSSY: decoding rows, or with when=all prompts too, run experts that the predictor of prefetch "
        "named one layer earlier: with predicted weights (predicted), or the router's choice among the first 2k of "
        "them and those in fast memory (restricted).",
    )
    tuned: types.TunedText = "auto"
    http: types.HttpText = Field(
        None,
        description="What the server opens besides its counters: GET /spac/, which shows every expert and where the "
        "time of a token goes (page; by default to its own machine), POST /spac/budget, which changes the budget "
        "(control), or both (page,control).",
    )
