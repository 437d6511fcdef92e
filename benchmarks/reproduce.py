"""Lists the command and inputs of each figure of benchmarks/README.md, runs it, and checks the results against it.

A figure is a table, a picture or a sentence with numbers. Its numbers are in ``benchmarks/results`` with the command,
the commit, the versions and the machine they come from; ``rendered`` writes them into the documents. Timed figures need
an otherwise idle machine.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import rendered
import typer
from common import RESULTS, ROOT, TRACES, sha256
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MODELS = "benchmarks/toy/models"
MID = ".cache/toy/mid"  # the toy model with experts of 1.2 MB
_INFLATE = f"python benchmarks/toy/inflate.py {MODELS}/target {MID} --expert-bytes 1.2MB --eagle3 {MODELS}/eagle3"
_SERVE = f"python benchmarks/serving/run.py {MID}"
_PAIRED = f"python benchmarks/serving/paired.py {MID}"
_BOUND = (
    "--slots 10%,25%,50% --policy reuse,reuse+io_uring --speculation none --batch 1 --prompts 4 --output-tokens 96 "
    "--repeats 1"
)
_BESIDE = "python benchmarks/peers/beside_llama.py"
_HEAD = f"--eagle3 {MID}-eagle3"
_ONE_ENGINE = "--turns 80 --starts 2 --warm 2 --output-tokens 64"
QUANTISED = ".cache/toy/quantised"  # sizes that are multiples of 128, as kernels for quantised experts need them
LOCAL_MID = ".cache/toy/local-mid"  # the same of the local one
LOCAL_LARGE = ".cache/toy/local-large"  # the same with experts as large as those of Qwen3-30B-A3B
LARGE = ".cache/toy/large"  # the first one, with experts of that size
LOCAL_8GB = ".cache/toy/local-8gb"  # the same with experts of 21 MB, 8 GB in all
LOCAL_INT8 = ".cache/toy/local-int8"  # the local one, rounded to INT8
_INFLATE_LARGE = f"python benchmarks/toy/inflate.py {MODELS}/target {LARGE} --expert-bytes 9.4MB"
_INFLATE_LOCAL_LARGE = f"python benchmarks/toy/inflate.py {MODELS}/local/target {LOCAL_LARGE} --expert-bytes 9.4MB"
_INFLATE_LOCAL = (
    f"python benchmarks/toy/inflate.py {MODELS}/local/target {LOCAL_MID} --expert-bytes 1.2MB "
    f"--eagle3 {MODELS}/local/eagle3"
)
_INFLATE_QUANTISED = f"python benchmarks/toy/inflate.py {MODELS}/target {QUANTISED} --hidden 512 --intermediate 384"
_SCALED = f"python benchmarks/scaled/run.py {LOCAL_MID}"
_RESULT = "--output benchmarks/results"
_LOCAL_TRACES = "benchmarks/traces/local"

EXAMPLES = """[bold]Examples[/]

python benchmarks/reproduce.py list

python benchmarks/reproduce.py run policies

python benchmarks/reproduce.py results --timed   [dim]# hours; nothing else may run[/]

python benchmarks/reproduce.py check
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False, epilog=EXAMPLES)


@dataclass(frozen=True)
class Figure:
    """One figure, or several from one run.

    Attributes:
        readme: where it is in the documents.
        files: its results, in ``benchmarks/results``.
        commands: commands that make it, in this order, from the checkout's root; none: see ``note``.
        inputs: files and folders of the checkout that it is made from.
        minutes: approximate duration on two otherwise idle cores.
        timed: whether its numbers are times.
        inflated: whether it uses a toy model with larger experts, which is written first if missing.
        stale: why its results are not from the code, command or traces in the tree, until it is made again.
        note: further remarks.
    """

    readme: str
    files: tuple[str, ...]
    commands: tuple[str, ...]
    inputs: tuple[str, ...] = (MODELS,)
    minutes: int = 10
    timed: bool = False
    inflated: bool = False
    stale: str = ""
    note: str = ""


FIGURES = {
    "acceptance": Figure(
        "Results: acceptance length of ngram, EAGLE-3, a dense draft and an INT8 copy",
        ("toy_acceptance.json", "toy_local_acceptance.json"),
        (
            "python benchmarks/toy/accept.py all",
            f"python benchmarks/toy/accept.py all --models {MODELS}/local {_RESULT}/toy_local_acceptance.json",
        ),
    ),
    "serving": Figure(
        "Results: tokens/s with and without drafts, the picture of hit rates; the bound",
        ("serving_toy.json", "serving_toy.png"),
        (
            f"{_SERVE} --slots 25% --policy layer_lru,reuse --speculation none,eagle3 --batch 1 --prompts 4 "
            f"--output-tokens 96 --repeats 3 --disk-dir .cache/mid {_HEAD} {_RESULT}/serving_toy.json",
        ),
        minutes=25,
        timed=True,
        inflated=True,
    ),
    "bounds": Figure(
        "Results: seconds over their lower bound at 10, 25 and 50 % of the slots",
        tuple(
            f"serving_bound_toy{name}.{kind}"
            for name in ("", "_local", "_large", "_local_large")
            for kind in ("json", "png")
        ),
        (
            f"{_SERVE} {_BOUND} --disk-dir .cache/mid {_RESULT}/serving_bound_toy.json",
            f"python benchmarks/serving/run.py {LOCAL_MID} {_BOUND} --disk-dir .cache/local-mid "
            f"{_RESULT}/serving_bound_toy_local.json",
            f"python benchmarks/serving/run.py {LARGE} {_BOUND} {_RESULT}/serving_bound_toy_large.json",
            f"python benchmarks/serving/run.py {LOCAL_LARGE} {_BOUND} {_RESULT}/serving_bound_toy_local_large.json",
        ),
        minutes=18,
        timed=True,
        inflated=True,
    ),
    "peers": Figure(
        "Results: beside llama.cpp at equal memory",
        ("peers_toy.json", "peers_toy.png", "peers_8gb_toy.json", "peers_8gb_toy.png"),
        (
            f"{_BESIDE} {LOCAL_MID} --slots 25% --turns 10 --read-ahead-kib 128 {_RESULT}/peers_toy.json",
            f"python benchmarks/toy/inflate.py {MODELS}/local/target {LOCAL_8GB} --expert-bytes 21MB",
            f"{_BESIDE} {LOCAL_8GB} --slots 25% --turns 6 --warm 1 --output-tokens 48 --read-ahead-kib 128 "
            f"{_RESULT}/peers_8gb_toy.json",
        ),
        minutes=20,
        timed=True,
        inflated=True,
        note="needs root, `pip install 'vllm-spac[peers]'` and 45 GB of disk",
    ),
    "batches": Figure(
        "Exactness: how often stock vLLM's answers depend on their batch",
        ("stock_batches.json",),
        ("python benchmarks/serving/batches.py measure",),
        minutes=3,
    ),
    "resident": Figure(
        "Results: spac over stock vLLM, in turns",
        ("paired_resident_toy.json",),
        (f"{_PAIRED} stock spac --slots 100% --turns 80 {_RESULT}/paired_resident_toy.json",),
        timed=True,
        inflated=True,
    ),
    "never_slower": Figure(
        "Results: EAGLE-3 over no drafts, in turns",
        ("paired_never_slower_toy.json", "paired_never_slower_toy.png"),
        (
            f"{_PAIRED} spac 'spac speculation=eagle3' {_HEAD} --one-engine --own-base --slots 10%,25%,100% "
            f"--turns 24 --starts 6 --warm 1 --output-tokens 64 --dtype float32 {_RESULT}/paired_never_slower_toy.json",
        ),
        minutes=25,
        timed=True,
        inflated=True,
    ),
    "quantised": Figure(
        "Serving: quantised experts over bf16 at equal memory, in turns",
        ("quantised_toy.json",),
        (f"python benchmarks/serving/quantised.py {QUANTISED} --slots 10%,25% --turns 10",),
        minutes=8,
        timed=True,
        inflated=True,
        note="on a CPU with AMX, or with AVX-512 and its bf16 and integer products",
    ),
    "recipe": Figure(
        "Results: MoE-SpAc's recipe over on-demand caches, in turns",
        ("paired_recipe_toy.json", "paired_recipe_toy.png"),
        (
            f"{_PAIRED} 'spac store=host policy=layer_lru' 'spac store=host policy=utility prefetch=utility "
            f"cpu_experts=threshold guard=off speculation=eagle3' {_HEAD} --draft-tokens 8 "
            "--slots 17%,25% --turns 30 --starts 1 --output-tokens 64 --dtype float32 "
            f"{_RESULT}/paired_recipe_toy.json",
        ),
        timed=True,
        inflated=True,
        stale="its command names the balancer by a knob of its own, of that time",
    ),
    "three_tiers": Figure(
        "Results: slots, host memory and disk, in turns with either two",
        ("paired_three_tiers_disk_toy.json", "paired_three_tiers_host_toy.json"),
        (
            f"python benchmarks/serving/paired.py {LOCAL_LARGE} spac 'spac host_memory=1380MiB' --slots 10% --turns 12 "
            f"--starts 2 --output-tokens 64 {_RESULT}/paired_three_tiers_disk_toy.json",
            f"python benchmarks/serving/paired.py {LOCAL_LARGE} 'spac host_memory=1380MiB' 'spac store=host' "
            f"--slots 10% --turns 12 --starts 2 --output-tokens 64 {_RESULT}/paired_three_tiers_host_toy.json",
        ),
        minutes=8,
        timed=True,
        inflated=True,
    ),
    "submitted": Figure(
        "Results: reads of missed experts by threads and by io_uring",
        ("reads_submitted.json",),
        ("python benchmarks/replay/submitted.py",),
        inputs=(),
        minutes=3,
        timed=True,
        note="needs `pip install 'vllm-spac[io-uring]'`",
    ),
    "prefetch": Figure(
        "Predictors: reads ahead by linear over none, in turns",
        ("paired_prefetch_local_toy.json", "paired_prefetch_local_toy.png"),
        (
            f"python benchmarks/toy/train_predictor.py {LOCAL_MID} {LOCAL_MID}.predictors.safetensors",
            f"python benchmarks/serving/paired.py {LOCAL_MID} spac 'spac prefetch=linear "
            f"predictor_file={LOCAL_MID}.predictors.safetensors' --slots 25%,50% --turns 16 --starts 2 --warm 2 "
            f"--output-tokens 64 {_RESULT}/paired_prefetch_local_toy.json",
        ),
        minutes=8,
        timed=True,
        inflated=True,
    ),
    "prefetch_large": Figure(
        "Predictors: the same with experts of 9.4 MB",
        ("paired_prefetch_local_large.json", "paired_prefetch_local_large.png"),
        (
            f"python benchmarks/toy/train_predictor.py {LOCAL_LARGE} {LOCAL_LARGE}.predictors.safetensors",
            f"python benchmarks/serving/paired.py {LOCAL_LARGE} spac 'spac prefetch=linear "
            f"predictor_file={LOCAL_LARGE}.predictors.safetensors' --slots 25%,50% --turns 16 --starts 2 --warm 2 "
            f"--output-tokens 64 {_RESULT}/paired_prefetch_local_large.json",
        ),
        minutes=15,
        timed=True,
        inflated=True,
    ),
    "prefetch_shadow": Figure(
        "Predictors: reads ahead by a shadow that drafts, over the same drafts without",
        ("paired_shadow_local_large.json", "paired_shadow_local_large.png"),
        (
            f"python benchmarks/toy/quantize.py {MODELS}/local/target {LOCAL_INT8}",
            f"python benchmarks/serving/paired.py {LOCAL_LARGE} 'spac guard=off speculation=draft' 'spac guard=off "
            f"speculation=draft prefetch=shadow' --draft {LOCAL_INT8} --slots 25%,50% --turns 12 --starts 2 --warm 2 "
            f"--output-tokens 64 {_RESULT}/paired_shadow_local_large.json",
        ),
        minutes=8,
        timed=True,
        inflated=True,
    ),
    "layer_ahead": Figure(
        "Results: the next layer read while a layer runs a prompt, over none, in turns",
        tuple(f"paired_layer_ahead_{name}.json" for name in ("toy", "short_toy", "large", "local_toy")),
        (),
        minutes=8,
        timed=True,
        inflated=True,
        note="answered: no engine is without these reads any more, so the files have the commands of that time",
    ),
    "workers": Figure(
        "Expert workers: all misses at workers over all misses from disk, in turns",
        ("paired_workers_toy.json", "paired_workers_cacheless_toy.json", "paired_workers_divided_toy.json"),
        (
            f"{_PAIRED} 'spac slots=2k policy=drop' 'spac slots=100% executor=processes workers=2' --slots 2k "
            f"--turns 24 --starts 2 --output-tokens 64 --dtype float32 {_RESULT}/paired_workers_toy.json",
            f"{_PAIRED} 'spac slots=2k policy=drop' 'spac slots=2k policy=drop executor=processes workers=2' "
            "--slots 2k --turns 24 --starts 2 --output-tokens 64 --dtype float32 "
            f"{_RESULT}/paired_workers_cacheless_toy.json",
            f"{_PAIRED} 'spac slots=2k policy=drop executor=processes workers=2' 'spac slots=2k policy=drop "
            "executor=processes@per_layer=2 workers=2' --slots 2k --turns 24 --starts 2 --output-tokens 64 "
            f"--dtype float32 {_RESULT}/paired_workers_divided_toy.json",
        ),
        minutes=30,
        timed=True,
        inflated=True,
        stale="the command of the divided ones gives the workers of a layer by a knob of its own, of that time",
    ),
    "round_trip": Figure(
        "Expert workers: a round trip on this machine",
        ("worker_round_trip.json",),
        ("python benchmarks/serving/round_trip.py",),
        inputs=("vllm_spac/methods/od_moe",),
        minutes=2,
        timed=True,
    ),
    "worker_faults": Figure(
        "Expert workers: seconds lost per fault",
        ("worker_faults_toy.json", "worker_faults_replica_toy.json"),
        (
            f"python benchmarks/serving/worker_faults.py {MID}",
            f"python benchmarks/serving/worker_faults.py {MID} --replicas 1 "
            "--output benchmarks/results/worker_faults_replica_toy.json",
        ),
        minutes=10,
        timed=True,
        inflated=True,
    ),
    "planned": Figure(
        "Planning and tuning: planned and measured tokens/s",
        ("planned_toy.json",),
        ("python benchmarks/serving/planned.py",),
        minutes=20,
        timed=True,
    ),
    "tuned": Figure(
        "Planning and tuning: vllm-spac tune and configurations chosen by hand",
        ("tuned_toy.json",),
        (f"python benchmarks/serving/tuned.py {MID} --eagle3 {MID}-eagle3",),
        minutes=40,
        timed=True,
        inflated=True,
    ),
    "trace": Figure(
        "Results: --spac-trace over no trace, in turns",
        ("paired_trace_toy.json", "paired_trace_toy.png"),
        (f"{_PAIRED} spac 'spac trace=.cache/serving/paired.trace' --one-engine --slots 25%,100% {_ONE_ENGINE}",),
        minutes=20,
        timed=True,
        inflated=True,
    ),
    "under_load": Figure(
        "Serving: many streams at once, and a long prompt among them",
        ("under_load_toy.json",),
        (f"python benchmarks/serving/under_load.py {LOCAL_MID}",),
        minutes=10,
        timed=True,
        inflated=True,
    ),
    "prefetch_auto": Figure(
        "Predictors: prefetch=auto over none, in turns",
        ("paired_prefetch_auto_toy.json", "paired_prefetch_auto_toy.png", "paired_prefetch_auto_large.json")
        + ("paired_prefetch_auto_large.png",),
        tuple(
            command
            for model, name in ((LOCAL_MID, "toy"), (LOCAL_LARGE, "large"))
            for command in (
                f"python benchmarks/toy/train_predictor.py {model} {model}.predictors.safetensors",
                f"python benchmarks/serving/paired.py {model} spac 'spac prefetch=auto "
                f"predictor_file={model}.predictors.safetensors' --slots 25%,50% --turns 16 --starts 2 --warm 2 "
                f"--output-tokens 64 {_RESULT}/paired_prefetch_auto_{name}.json",
            )
        ),
        minutes=20,
        timed=True,
        inflated=True,
    ),
    "budget": Figure(
        "Results: a budget in real time",
        ("serving_toy_budget.json", "serving_toy_budget.png"),
        (
            f"{_SERVE} {_HEAD} --slots 25% --policy reuse --speculation eagle3 --draft-tokens 8 --budget 32 --batch 1 "
            f"--guard off --repeats 2 {_RESULT}/serving_toy_budget.json",
        ),
        minutes=15,
        timed=True,
        inflated=True,
    ),
    "budget_cost": Figure(
        "Results: what choosing a budget's experts takes",
        ("toy_budget_cost.json", "toy_budget_cost_offloaded.json"),
        (
            "python benchmarks/toy/budget_cost.py --engine --prompts 12",
            f"python benchmarks/toy/budget_cost.py --engine --prompts 12 --model {MID} --slots 25% "
            f"{_RESULT}/toy_budget_cost_offloaded.json",
        ),
        minutes=4,
        timed=True,
        inflated=True,
    ),
    "simulated": Figure(
        "Results: simulated and measured time per token",
        ("simulated_toy.json",),
        (f"python benchmarks/serving/simulated.py {MID} {_HEAD} --slots 10%,25%,50% --policy reuse --repeats 1",),
        minutes=20,
        timed=True,
        inflated=True,
    ),
    "scaled": Figure(
        "Scaled machine: the ladder",
        ("scaled_rtx4090_toy_local.json", "scaled_rtx4090_toy_local.png"),
        (
            f"python benchmarks/toy/train_predictor.py {LOCAL_MID} {LOCAL_MID}.predictors.safetensors",
            f"{_SCALED} --machine rtx4090 --slots 25%,50% --turns 12 --predictor linear --predictor-file "
            f"{LOCAL_MID}.predictors.safetensors {_RESULT}/scaled_rtx4090_toy_local.json",
        ),
        inputs=(MODELS, "vllm_spac/decisions/profiles"),
        minutes=20,
        timed=True,
        inflated=True,
    ),
    "scaled_simulated": Figure(
        "Scaled machine: simulated and measured",
        ("scaled_rtx4090_simulated.json",),
        (f"python benchmarks/scaled/validate.py {LOCAL_MID} --machine rtx4090 --slots 25%,50% --turns 10",),
        inputs=(MODELS, "vllm_spac/decisions/profiles"),
        minutes=6,
        timed=True,
        inflated=True,
    ),
    "scaled_pacing": Figure(
        "Scaled machine: what pacing itself costs",
        ("scaled_pacing_toy.json", "scaled_pacing_toy.png"),
        (f"{_SCALED} --pacing-cost --slots 25% --turns 12 {_RESULT}/scaled_pacing_toy.json",),
        minutes=4,
        timed=True,
        inflated=True,
    ),
    "scaled_trees_sampled": Figure(
        "Scaled machine: budgets over trees at temperature 1, by seed",
        ("scaled_trees_sampled_toy.json", "scaled_trees_sampled_toy.png"),
        (
            f"python benchmarks/papers/moe_spec_table.py {LOCAL_MID} --chains '' --trees 16 --budgets 16,32 --votes "
            f"path --temperatures 1 --seeds 5 --prompts 4 {_RESULT}/scaled_trees_sampled_toy.json",
        ),
        inputs=(MODELS, "vllm_spac/decisions/profiles"),
        minutes=8,
        timed=True,
        inflated=True,
    ),
    "scaled_simulated_h200": Figure(
        "Scaled machine: the same with the proportions of an H200 server",
        ("scaled_h200_simulated.json",),
        (f"python benchmarks/scaled/validate.py {LOCAL_MID} --machine h200 --slots 25%,50% --turns 10",),
        inputs=(MODELS, "vllm_spac/decisions/profiles"),
        minutes=10,
        timed=True,
        inflated=True,
    ),
    "resident_budgets": Figure(
        "Budgets with all experts in memory, by batch size, in turns",
        ("resident_budgets_toy.json", "resident_budgets_toy.png", "resident_budgets_toy_local.json")
        + ("resident_budgets_toy_local.png",),
        (
            f"python benchmarks/papers/resident_budgets.py {MID}",
            f"python benchmarks/papers/resident_budgets.py {LOCAL_MID} {_RESULT}/resident_budgets_toy_local.json",
        ),
        minutes=20,
        timed=True,
        inflated=True,
    ),
    "policies": Figure(
        "Results: hit rates of policies, and how often predictions are right",
        ("toy_policies.json", "toy_policies.png"),
        ("python benchmarks/replay/policies.py",),
        inputs=("benchmarks/traces",),
        minutes=15,
    ),
    "local_policies": Figure(
        "Results: the same with local routing",
        ("toy_local_policies.json", "toy_local_policies.png"),
        (
            f"python benchmarks/replay/policies.py {_LOCAL_TRACES} "
            "--policy 'lru layer_lru lfu pinned utility reuse belady' "
            f"--shares '10 17 25 50' {_RESULT}/toy_local_policies.json",
        ),
        inputs=("benchmarks/traces/local",),
        minutes=15,
    ),
    "ceilings": Figure(
        "Predictors: what a better overlap of loads could gain, calculated",
        ("toy_ceilings.json",),
        (f"python benchmarks/replay/ceilings.py {_RESULT}/toy_ceilings.json",),
        inputs=("benchmarks/traces", "vllm_spac/decisions/profiles"),
        minutes=4,
    ),
    "tried": Figure(
        "Policies: per-layer minima and the last run's placement, not adopted",
        ("toy_tried.json",),
        ("python benchmarks/replay/tried.py",),
        inputs=("benchmarks/traces",),
        minutes=2,
    ),
    "waves": Figure(
        "Policies: loads of prompts that need more experts than there are slots",
        ("toy_waves.json",),
        ("python benchmarks/replay/waves.py",),
        inputs=("benchmarks/traces",),
        minutes=1,
    ),
    "locality": Figure(
        "Results: locality of the toy models' routing",
        ("toy_locality.json", "toy_local_locality.json"),
        (
            "python benchmarks/replay/locality.py",
            f"python benchmarks/replay/locality.py {_LOCAL_TRACES}/none1.trace {_RESULT}/toy_local_locality.json",
        ),
        inputs=("benchmarks/traces",),
        minutes=1,
    ),
    "local_seeds": Figure(
        "Results: local models by seed",
        ("toy_local_seeds.json",),
        (
            *(
                f"python benchmarks/toy/train.py local --minutes 22 --seed {seed} --output .cache/toy/local-seed-{seed}"
                for seed in (1, 2)
            ),
            "python benchmarks/toy/seeds.py .cache/toy/local-seed-1 .cache/toy/local-seed-2",
        ),
        minutes=46,
    ),
    "moe_spac_tables": Figure(
        "Results: MoE-SpAc's tables 2 and 4, simulated",
        ("toy_tables.json", "toy_tables.png", "toy_local_tables.json", "toy_local_tables.png"),
        (
            f"python benchmarks/papers/moe_spac_tables.py {_RESULT}/toy_tables.json",
            f"python benchmarks/papers/moe_spac_tables.py {_LOCAL_TRACES} {_RESULT}/toy_local_tables.json",
        ),
        inputs=("benchmarks/traces", "vllm_spac/decisions/profiles"),
        minutes=20,
    ),
    "moe_spac": Figure(
        "Results: MoE-SpAc's figure 9",
        ("toy_moe_spac.json", "toy_moe_spac.png", "toy_local_moe_spac.json", "toy_local_moe_spac.png"),
        (
            "python benchmarks/papers/moe_spac.py",
            f"python benchmarks/papers/moe_spac.py {_LOCAL_TRACES} {_RESULT}/toy_local_moe_spac.json",
        ),
        inputs=("benchmarks/traces",),
        minutes=1,
    ),
    "moe_spac_reuse": Figure(
        "Results: MoE-SpAc's figures 7 and 8",
        ("toy_reuse.json", "toy_reuse.png", "toy_local_reuse.json", "toy_local_reuse.png"),
        (
            "python benchmarks/papers/moe_spac_reuse.py",
            f"python benchmarks/papers/moe_spac_reuse.py {_LOCAL_TRACES} {_RESULT}/toy_local_reuse.json",
        ),
        inputs=("benchmarks/traces",),
        minutes=8,
    ),
    "moe_spec": Figure(
        "Results: MoE-Spec's figures 2b and 2c, and Eq. 9",
        ("toy_moe_spec.json", "toy_moe_spec.png", "toy_local_moe_spec.json", "toy_local_moe_spec.png"),
        (
            "python benchmarks/papers/moe_spec.py",
            f"python benchmarks/papers/moe_spec.py {_LOCAL_TRACES} {_RESULT}/toy_local_moe_spec.json",
        ),
        inputs=("benchmarks/traces",),
        minutes=1,
    ),
    "od_moe": Figure(
        "Expert workers: OD-MoE's speed, and workers on other networks, calculated",
        ("toy_local_od_moe.json",),
        (
            f"python benchmarks/papers/od_moe.py {_LOCAL_TRACES}/none1.trace --layers 48 --share 0.0625 "
            "--output benchmarks/results/toy_local_od_moe.json",
        ),
        inputs=("benchmarks/traces/local",),
        minutes=1,
    ),
    "trees": Figure(
        "Results: draft trees",
        ("toy_trees.json", "toy_trees.png", "toy_local_trees.json", "toy_local_trees.png"),
        (
            f"python benchmarks/papers/moe_spec_trees.py {MODELS}/target --eagle3 {MODELS}/eagle3",
            f"python benchmarks/papers/moe_spec_trees.py {MODELS}/local/target --eagle3 {MODELS}/local/eagle3 "
            f"{_RESULT}/toy_local_trees.json",
        ),
        minutes=30,
    ),
    "votes": Figure(
        "Results: what the rows of a draft tree should count under a budget",
        ("toy_votes.json", "toy_votes.png", "toy_local_votes.json", "toy_local_votes.png"),
        (
            f"python benchmarks/papers/moe_spec_votes.py {MODELS}/target --eagle3 {MODELS}/eagle3",
            f"python benchmarks/papers/moe_spec_votes.py {MODELS}/local/target --eagle3 {MODELS}/local/eagle3 "
            f"{_RESULT}/toy_local_votes.json",
        ),
        minutes=30,
    ),
    "tree_step": Figure(
        "Results: what a step of a draft tree takes, in turns with a chain",
        ("paired_tree_step_toy.json",),
        (
            f"{_PAIRED} 'spac guard=off speculation=eagle3 draft_tokens=4' 'spac guard=off speculation=eagle3 tree=16' "
            f"{_HEAD} --slots 100% --turns 48 --starts 3 --warm 2 --output-tokens 96 --dtype float32 "
            f"{_RESULT}/paired_tree_step_toy.json",
        ),
        minutes=6,
        timed=True,
        inflated=True,
    ),
    "scaled_trees": Figure(
        "Scaled machine: budgets over chains and trees",
        ("scaled_trees_toy.json", "scaled_trees_toy.png"),
        (
            f"python benchmarks/papers/moe_spec_table.py {LOCAL_MID} --temperatures 0 --kl 3 "
            f"{_RESULT}/scaled_trees_toy.json",
        ),
        inputs=(MODELS, "vllm_spac/decisions/profiles"),
        minutes=22,
        timed=True,
        inflated=True,
    ),
    "recall": Figure(
        "Results: recall of predictors of the next layers' experts",
        ("toy_predictors.json", "toy_predictors.png", "toy_local_predictors.png"),
        ("python benchmarks/toy/predictors.py",),
        minutes=15,
        timed=True,
    ),
    "speculated": Figure(
        "Results: quality and bytes of speculated execution",
        ("toy_speculated.json",),
        ("python benchmarks/toy/speculated.py",),
        minutes=10,
    ),
    "shadow": Figure(
        "Results: a quantised copy as a shadow",
        ("toy_shadow.json",),
        ("python benchmarks/toy/shadow.py",),
        minutes=5,
    ),
    "executions": Figure(
        "Pointers: what ways to reach experts take, calculated",
        ("toy_executions.json", "toy_executions.png"),
        ("python benchmarks/replay/executions.py",),
        inputs=("benchmarks/traces", "vllm_spac/decisions/profiles"),
        minutes=25,
    ),
    "quality": Figure(
        "Results: what budgets cost, how much of the router mass the best experts hold",
        tuple(
            f"{model}_quality{what}"
            for model in ("toy", "toy_local")
            for what in (".json", "_figures.png", "_pareto.png")
        ),
        (
            "python benchmarks/toy/quality.py",
            f"python benchmarks/toy/quality.py {MODELS}/local --name toy_local",
        ),
        minutes=30,
    ),
    "v2": Figure(
        "What works: vLLM's CUDA path with the V2 runner",
        ("v2_emulated.json",),
        (),
        inputs=(),
        note="the emulation of a GPU on a CPU is no part of this repository; the file says what ran, row by row",
    ),
    "soak": Figure(
        "What works: an hour of one server",
        ("soak_toy.json", "soak_toy.png"),
        ("python tests/soak/soak.py",),
        minutes=65,
    ),
    "memory": Figure(
        "What works: memory while loading",
        (),
        (".venv/bin/pytest tests/parity/test_memory.py -m full -rP",),
        inputs=("tests/parity/test_memory.py",),
        note="printed by the test",
    ),
}


@app.command("list")
def list_() -> None:
    """Show every figure, its files, and its commands."""
    table = Table("name", "in the documents", "files", "from", "minutes", show_lines=True)
    for name, figure in FIGURES.items():
        marks = (" (timed)" * figure.timed) + (f" (stale: {figure.stale})" if figure.stale else "")
        sources = ", ".join((*figure.inputs, *([MID] if figure.inflated else [])))
        table.add_row(name, figure.readme + marks, "\n".join(figure.files), sources, str(figure.minutes))
    console = Console(width=max(140, Console().width))
    console.print(table)
    for name, figure in FIGURES.items():
        for text in (*figure.commands, *([f"# {figure.note}"] if figure.note else [])):
            console.print(escape(f"{name}: {text}"), highlight=False, soft_wrap=True)


@app.command()
def run(name: Annotated[str, typer.Argument(help=f"Of {', '.join(FIGURES)}.")]) -> None:
    """Make a figure again."""
    if name not in FIGURES or not FIGURES[name].commands:
        known = ", ".join(other for other, figure in FIGURES.items() if figure.commands)
        raise typer.BadParameter(f"no command makes {name!r}; use one of {known}")
    _make(FIGURES[name])
    _render()


@app.command("results")
def results_again(
    timed: Annotated[
        bool, typer.Option("--timed", help="Those whose numbers are times, instead of the others.")
    ] = False,
) -> None:
    """Make all figures again, then render the documents' tables and numbers from them."""
    console = Console(stderr=True)
    names = [name for name, figure in FIGURES.items() if figure.timed == timed and figure.commands and figure.files]
    left = sum(FIGURES[name].minutes for name in names)
    for place, name in enumerate(names, 1):
        figure = FIGURES[name]
        console.print(f"[bold]{place} of {len(names)}: {name}[/], about {figure.minutes} of the {left} minutes left")
        _make(figure)
        left -= figure.minutes
    _render()


@app.command()
def tables() -> None:
    """Render the documents' tables and numbers from the results in the tree."""
    _render()


def _render() -> None:
    changed = rendered.update()
    print(f"rendered: {', '.join(changed) or 'nothing changed'}")


def _make(figure: Figure) -> None:
    console = Console(stderr=True)
    if figure.timed:
        console.print("its numbers are times: run nothing else on this machine")
    models = {MID: _INFLATE, LOCAL_MID: _INFLATE_LOCAL, QUANTISED: _INFLATE_QUANTISED}
    models |= {LARGE: _INFLATE_LARGE, LOCAL_LARGE: _INFLATE_LOCAL_LARGE}
    named = " ".join(figure.commands) if figure.inflated else ""
    prepare = [command for folder, command in models.items() if folder in named and not (ROOT / folder).exists()]
    for command in (*prepare, *figure.commands):
        console.print(escape(command), highlight=False, soft_wrap=True)
        program, *arguments = shlex.split(command)
        code = subprocess.run([sys.executable if program == "python" else program, *arguments], cwd=ROOT).returncode
        if code:
            raise typer.Exit(code)


@app.command("check")
def check_results() -> None:
    """Find results without a figure or provenance, of other traces, commands or histories, and numbers of no result."""
    why = unknown_history()
    found = [*unnamed(), *of_something_else(history=not why), *rendered.problems()]
    for problem in found:
        print(problem)
    if why:
        print(f"commits were not looked up: {why}")
    if found:
        raise typer.Exit(1)


def unnamed() -> Iterator[str]:
    """Yields files without a figure, figures without their files, and files in the documents that no figure has."""
    named = [file for figure in FIGURES.values() for file in figure.files]
    there = {path.name for path in RESULTS.iterdir()}
    yield from (f"{file}: no figure has it" for file in sorted(there - set(named)))
    yield from (f"{file}: a figure has it, and it is not there" for file in sorted(set(named) - there))
    yield from (f"{file}: two figures have it" for file in sorted({file for file in named if named.count(file) > 1}))
    for file in sorted(set(re.findall(r"\b\w+_(?:toy|emulated)\w*\.(?:json|png)|\btoy_\w+\.(?:json|png)", readme()))):
        if file not in named:
            yield f"{file}: the documents name it, and no figure has it"
    for name, figure in FIGURES.items():
        yield from (f"{name}: {path} is not there" for path in figure.inputs if not (ROOT / path).exists())


def of_something_else(*, history: bool) -> Iterator[str]:
    """Yields results from another command, traces or history than those in the tree, except for figures marked stale.

    Whether the code has changed since a result's commit is not compared: nearly every commit changes some of it.

    Args:
        history: look commits up.
    """
    for name, figure in FIGURES.items():
        found = [
            f"{file}: {problem}"
            for file, content in results(figure)
            for problem in (
                *unexplained(figure, content),
                *of_other_traces(content),
                *(lost(content) if history else []),
            )
        ]
        if not figure.stale:
            yield from found
        elif history and not found:
            yield f"{name}: its results are of what is in the tree, it is not stale"


def unexplained(figure: Figure, content: dict) -> Iterator[str]:
    origins = [content.get("provenance") or {}, *([content["also"]] if "also" in content else [])]
    for origin in origins if figure.commands else []:
        if missing := [key for key in ("command", "git", "versions", "machine", "date") if not origin.get(key)]:
            yield f"its provenance has no {', '.join(missing)}"
        elif origin["command"].startswith("python benchmarks/") and origin["command"] not in figure.commands:
            yield f"was made by {origin['command']}"


def of_other_traces(content: dict) -> Iterator[str]:
    for name, facts in (content.get("traces") or {}).items():
        if facts["sha256"] not in [sha256(path) for path in TRACES.rglob(f"{name}.trace")]:
            yield f"is of another {name}.trace than those below {TRACES.relative_to(ROOT)}"


def lost(content: dict) -> Iterator[str]:
    for commit in sorted(set(commits(content))):
        if _git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
            yield f"{commit} is not in the history of this checkout"


def unknown_history() -> str:
    """Returns why commits cannot be looked up; empty if they can."""
    if not (ROOT / ".git").exists():
        return "this is no git checkout"
    return "this checkout is shallow" * (_git("rev-parse", "--is-shallow-repository").stdout.strip() == "true")


def commits(content: object) -> Iterator[str]:
    """Yields every ``git`` commit in a result, at any depth."""
    if isinstance(content, dict):
        if isinstance(content.get("git"), dict):
            yield content["git"]["commit"]
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from commits(item)


def results(figure: Figure) -> Iterator[tuple[str, dict]]:
    for file in figure.files:
        if file.endswith(".json") and (RESULTS / file).is_file():
            yield file, json.loads((RESULTS / file).read_text())


def readme() -> str:
    """Returns the text of the documents that show results."""
    paths = (ROOT / name for name in ("README.md", "benchmarks/README.md", "vllm_spac/USAGE.md"))
    return "".join(path.read_text() for path in paths if path.exists())


def _git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60)


if __name__ == "__main__":
    app()
