"""Each refusal's remedy is followed: it must lead to a configuration that is accepted, without taking anything back.

Configurations are pairs of settings on top of a few that decide most, with the plugin's own checks and vLLM's real
configuration of an engine; no engine starts. A refusal names settings as given and offers remedies. Who follows one may
be refused again for another reason; but a later remedy may change neither what an earlier one set nor what it spared.
Only the rules of knobs do not know the machine: what they spare may be refused by the checks of the engine, once.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import combinations
import pytest
from combinations import Cell
from compare import copied

from vllm_spac.config import presets
from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import Remedy, SpacError, flag

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models"
MOST_STEPS = 6
PREDICTORS = ("gate", "hybrid", "neural", "quasi_hidden")

# Values of each knob other than its default. Numbers whose size alone matters have one.
KNOBS: dict[str, tuple[Any, ...]] = {
    "preset": ("moe-spac", "speculating-experts"),
    "slots": ("100%", "8", "2k"),
    "store": ("host", "disk"),
    "disk_dir": ("/tmp/spac",),
    "host_memory": ("1GiB",),
    "policy": ("lru", "layer_lru", "utility"),
    "prefetch": (
        "utility",
        "shadow",
        "draft_gate@k=2@cutoff=1",
        "utility@threshold=2",
        "gate@extra=0.2",
        *PREDICTORS,
        "neural@file=FILE@extra=0.2",
        "utility@file=FILE",
    ),
    "guard": ("on", "off"),
    "tree": (1, 2, 16, "16@depth=1", "16@width=1"),
    "cpu_experts": ("auto", "2", "waterfill", "threshold"),
    "profile": ("FILE",),
    "cpu_kernel": ("simd",),
    "io_threads": (2,),
    "executor": ("processes", "processes@per_layer=2", "cluster@file=FILE"),
    "plane": ("slots", "table", "pointers"),
    "record": ("trace=run.trace", "timeline=run.timeline", "trace=run.trace,timeline=run.timeline"),
    "budget": (
        2,
        100,
        0.9,
        "100@coverage=truncation@when=all",
        "32@votes=path",
        "off@votes=path@ranking=router",
    ),
    "speculate": ("predicted", "restricted@when=all"),
    "tuned": ("off",),
    "http": ("page", "control", "page,control"),
}
EAGLE = {"method": "eagle3", "model": str(TOY / "eagle3"), "num_speculative_tokens": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
OWN = {"method": "draft_model", "model": str(TOY / "target"), "num_speculative_tokens": 4}
COPY = OWN | {"model": copied(TOY / "target")}
OTHER = {"method": "draft_model", "model": str(TOY / "draft"), "num_speculative_tokens": 4}
# What is not a knob: the machine, and options and variables of vLLM.
ENGINE: dict[str, tuple[Any, ...]] = {
    "gpu": (True,),
    "--speculative-config": (EAGLE, NGRAM, COPY, OTHER, OWN),
    "--tensor-parallel-size": (2,),
    "--enable-expert-parallel": (True,),
    "--compilation-config.cudagraph_mode": ("FULL",),
    "--no-async-scheduling": (True,),
    "--distributed-executor-backend": ("mp",),
    "VLLM_USE_V2_MODEL_RUNNER": ("0",),
    "--pipeline-parallel-size": (2,),
    "--data-parallel-size": (2,),
    "--enable-lora": (True,),
    "--max-num-seqs": (32,),
}
# Pairs are added to each of these; only to those of ``QUICK`` without ``make test-full``, and of the engine's options.
BASES: tuple[dict[str, Any], ...] = (
    {},
    {"gpu": True},
    {"gpu": True, "plane": "pointers"},
    {"executor": "processes@workers=2"},
    {"tree": 16, "--speculative-config": EAGLE},
    {"tree": 16, "--speculative-config": EAGLE, "gpu": True, "--attention-backend": "TRITON_ATTN"},
    {"prefetch": "neural@file=FILE"},
    {"--tensor-parallel-size": 2, "--enable-expert-parallel": True},
)
QUICK = BASES[:2]
MAIN = ("gpu", "--speculative-config", "--tensor-parallel-size", "--enable-expert-parallel")
# Refusals that no setting resolves alone, by what they say: another checkpoint, or another server.
WITHOUT_A_SETTING: tuple[str, ...] = ()

State = tuple[tuple[str, Any], ...]  # sorted (setting, value as JSON)


def frozen(settings: Mapping[str, Any]) -> State:
    return tuple(sorted((name, json.dumps(value)) for name, value in settings.items() if value is not None))


def thawed(state: State) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in state}


def states(bases: Sequence[dict[str, Any]], settings: Mapping[str, tuple[Any, ...]]) -> Iterator[State]:
    """Every base with every pair of values of two settings."""
    single = [(name, value) for name, values in settings.items() for value in values]
    pairs = [(one, other) for one, other in itertools.combinations(single, 2) if one[0] != other[0]]
    for base in bases:
        for pair in [(), *((one,) for one in single), *pairs]:
            yield frozen(base | dict(pair))


# -- one configuration through the checks --


@cache
def vllm_config(options: State) -> Any:
    """vLLM's own configuration of such an engine, on this machine."""
    from vllm.engine.arg_utils import EngineArgs

    given = {name.removeprefix("--").replace("-", "_"): value for name, value in thawed(options).items()}
    given.pop("attention_backend", None)
    if given.get("tensor_parallel_size", 1) > 1 or given.get("pipeline_parallel_size", 1) > 1:
        given.setdefault("distributed_executor_backend", "mp")
    asynchronous = not given.pop("no_async_scheduling", False)
    model = {"model": str(TOY / "target"), "max_model_len": 256, "max_num_batched_tokens": 256}
    eager = given.get("pipeline_parallel_size", 1) == 1  # with which stock vLLM runs no stages on a CPU
    made = EngineArgs(**{"max_num_seqs": 2, "enforce_eager": eager, "skip_tokenizer_init": True} | model | given)
    found = made.create_engine_config()
    found.scheduler_config.async_scheduling = asynchronous and found.scheduler_config.async_scheduling is not None
    return found


@cache
def refusal(state: State) -> SpacError | None:
    """What the plugin says to these settings; None: it would serve."""
    settings = thawed(state)
    knobs = {name: value for name, value in settings.items() if name in SpacConfig.model_fields}
    try:
        config = SpacConfig.parse(knobs)
    except SpacError as error:
        return OfKnobs(str(error)).solved_as(error)
    try:
        with presets.or_without(config):
            check(config, {name: value for name, value in settings.items() if name not in knobs})
    except SpacError as error:
        return error
    except (ValueError, NotImplementedError) as error:
        return OfVllm(str(error))
    return None


class OfKnobs(SpacError):
    """The rules of knobs refuse them, which know neither the machine nor vLLM's options."""


class OfVllm(SpacError):
    """vLLM refuses these options, whatever the plugin says to them."""


def check(config: SpacConfig, engine: dict[str, Any]) -> None:
    from vllm import platforms
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_spac.integration import preflight
    from vllm_spac.integration.hooks import device, drafts, graphs
    from vllm_spac.integration.stepping import tree_arguments as trees

    gpu, graph = engine.pop("gpu", False), engine.pop("--compilation-config.cudagraph_mode", "NONE")
    v2 = engine.pop("VLLM_USE_V2_MODEL_RUNNER", "1") != "0" and gpu
    backend = engine.pop("--attention-backend", "FLASH_ATTN")
    given = engine.get("--speculative-config")
    args = SimpleNamespace(
        speculative_config=None
        if given is None or not config.tree_nodes
        else {**given, "num_speculative_tokens": None},
        scheduler_cls=None,
        block_size=16,
        tensor_parallel_size=engine.get("--tensor-parallel-size", 1),
    )
    trees.request(args, config)
    if config.tree_nodes and given is not None:
        engine["--speculative-config"] = args.speculative_config
    facts = device.DeviceFacts("a GPU", True, (9, 0), pinned=True, unified=True)
    with pytest.MonkeyPatch.context() as patch:
        if gpu:
            patch.setattr(type(platforms.current_platform), "is_cpu", lambda self: True)
        found = vllm_config(frozen(engine))
        patch.setattr(type(platforms.current_platform), "is_cpu", lambda self: not gpu)
        patch.setattr(drafts, "plans_drafts", lambda _: v2)
        patch.setattr(device, "query", lambda: facts if gpu else None)
        patch.setattr(found.attention_config, "backend", AttentionBackendEnum[backend])
        patch.setattr(found.scheduler_config, "scheduler_cls", None)
        patch.setattr(preflight, "_check_files", lambda *_: None)  # FILE is not there
        if gpu:
            several = max(engine.get(f"--{kind}-parallel-size", 1) for kind in ("tensor", "pipeline")) > 1
            alone = "mp" if several else "uni"  # a CPU's is always mp
            executor = engine.get("--distributed-executor-backend", alone)
            patch.setattr(found.parallel_config, "distributed_executor_backend", executor)
            graphs.check_mode(graph, config, breakable=False)
        preflight.check_engine(config, found)


# -- remedies --


def applied(state: State, remedy: Remedy) -> State:
    settings = thawed(state)
    for name, value in remedy.changes.items():
        if name.startswith("--speculative-config."):
            continue
        if value in ("FILE", "OTHER"):
            value = f"{name}.file"
        if name == "--speculative-config" and value is not None:
            value = EAGLE if value["method"] == "eagle3" else COPY
        settings[name] = value
    return frozen(settings)


def named(state: State, problem: str) -> frozenset[str]:
    """The settings that a refusal names as given."""
    return frozenset(name for name, _ in state if re.search(rf"{re.escape(flag(name))}(?![\w-])", problem))


@cache
def leads_somewhere(state: State, settled: frozenset[str], of_knobs: bool, steps: int = MOST_STEPS) -> bool:
    """Whether these settings are accepted, or some remedies make them so that change nothing that is settled.

    Args:
        of_knobs: the rules of knobs refused those before, so that the machine may be another than they hoped for.
    """
    if (error := refusal(state)) is None:
        return True
    if steps == 0:
        return False
    if of_knobs and not isinstance(error, OfKnobs):
        of_knobs, settled = False, frozenset()
    for remedy in error.remedies:
        changed = frozenset(remedy.changes)
        if changed and not changed & settled:
            spared = named(state, error.problem) | changed
            if leads_somewhere(applied(state, remedy), settled | spared, of_knobs, steps - 1):
                return True
    return False


def shown(state: State) -> str:
    return " ".join(f"{name}={value}" for name, value in state)


def test_every_knob_is_tried() -> None:
    assert KNOBS.keys() == SpacConfig.model_fields.keys()


def test_every_remedy_leads_to_what_is_accepted() -> None:
    """Pairs of knobs on a CPU and on a GPU; pairs of the machine and of vLLM's main options on every base."""
    main = {name: ENGINE[name] for name in MAIN}
    follow_remedies([*states(QUICK, KNOBS), *states(BASES, main)])


@pytest.mark.full
def test_every_remedy_leads_to_what_is_accepted_on_every_base() -> None:
    follow_remedies(states(BASES, KNOBS | ENGINE))


def follow_remedies(configurations: Iterable[State]) -> None:
    refused, contradicted, without = Counter[str](), {}, set()
    for state in dict.fromkeys(configurations):
        if (error := refusal(state)) is None or isinstance(error, OfVllm):
            continue
        kind = re.sub(r"=\S+|\d+", "=", error.problem) or str(error)
        refused[kind] += 1
        if not any(remedy.changes for remedy in error.remedies):
            without.add(str(error))
        for remedy in error.remedies:
            if not remedy.changes:
                continue
            settled = named(state, error.problem) | frozenset(remedy.changes)
            after = applied(state, remedy)
            if after == state or not leads_somewhere(after, settled, isinstance(error, OfKnobs)):
                contradicted[kind, remedy.text] = f"{shown(state)}\n    {error}\n    {remedy.text}: {refusal(after)}"
    print(f"{sum(refused.values())} configurations refused for {len(refused)} reasons")
    assert [text for text in without if not any(said in text for said in WITHOUT_A_SETTING)] == []
    assert not contradicted, "\n".join(contradicted.values())


# -- all combinations, about which the plugin's checks are asked without vLLM --


def told(cell: Cell) -> str:
    """What an engine with vLLM's own configuration says to a combination; empty: it would serve."""
    drafts = {"none": None, "chain": EAGLE, "tree": EAGLE, "copy": COPY}[cell.speculation]
    options = {"gpu": True, "--attention-backend": "TRITON_ATTN"} if cell.platform == "gpu" else {}
    ranks = {"--tensor-parallel-size": cell.ranks.count} if cell.ranks.count > 1 else {}
    divided = {"--enable-expert-parallel": True} if cell.ranks.divide_experts else {}
    in_order = {"--no-async-scheduling": True}  # V1, as on a CPU; V2 plans drafts whichever it is
    given = options | ranks | divided | in_order | {"--speculative-config": drafts}
    return str(refusal(frozen(cell.knobs | given)) or "").removeprefix("spac: ")


def check_cells(cells: Iterable[Cell]) -> None:
    differ = {cell: (cell.reason, said) for cell in cells if (said := told(cell)) != cell.reason}
    assert not differ, "\n".join(f"{cell}\n    the checks: {a}\n    an engine: {b}" for cell, (a, b) in differ.items())


def test_engines_say_what_the_checks_say() -> None:
    check_cells(itertools.islice(combinations.cells(), 0, None, 23))


@pytest.mark.full
def test_engines_say_what_the_checks_say_of_all() -> None:
    check_cells(combinations.cells())
