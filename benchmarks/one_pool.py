"""Calculates what one pool of slots gives: slots, decode and prompts of six models on four sizes of GPU memory.

    python benchmarks/one_pool.py

Nothing is measured and no engine runs. Slots are what ``vllm serve MODEL --plugin spac`` would count, by the engine's
own functions, on a GPU that is not there. Speeds are the simulator's and the plan's formula, for one request with a
little locality.

"Before" is a commit that reserved two layers for prompts. Its rows are kept in the result. To make them again, by this
script as it was at a8d88f7a (the store was no choice then):

    git worktree add ../before 94f0589c && make -C ../before setup
    ../before/.venv/bin/python benchmarks/one_pool.py --rows before.json
    python benchmarks/one_pool.py --before before.json
"""

from __future__ import annotations

import inspect
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast
from unittest.mock import patch

import torch
import typer
from tqdm import tqdm

from benchmarks.common import RESULTS, Script, provenance, show, write_result
from vllm_spac.cache.sizing import MoEWidths
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import SlotCount
from vllm_spac.decisions.costs import Costs
from vllm_spac.errors import ConfigError
from vllm_spac.integration import gpu_defaults, store_choice
from vllm_spac.integration.hooks import device
from vllm_spac.integration.hooks.device import DeviceFacts
from vllm_spac.integration.loading import fast_memory
from vllm_spac.storage.checkpoint.published import NamedModel, find_model
from vllm_spac.tools.planning import predict
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Choice, Load
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_routing import LOW

OUTPUT = RESULTS / "one_pool.json"
CONFIGS = Path(__file__).parents[1] / "vllm_spac" / "storage" / "checkpoint" / "published.json"  # also of "before"
GIB = 1 << 30
MODELS = {  # model -> format, host memory in GiB that holds its experts
    "Qwen/Qwen3-30B-A3B": ("bf16", 64),
    "Qwen/Qwen3-30B-A3B-FP8": ("FP8", 64),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": ("INT4", 64),
    "openai/gpt-oss-120b": ("MXFP4", 96),
    "zai-org/GLM-4.5-Air-FP8": ("FP8", 128),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("bf16", 192),
}
CARDS = {12: "rtx4090", 16: "rtx4090", 24: "rtx4090", 32: "rtx5090"}  # GiB -> the profile with its PCIe
REQUESTS = 256  # vLLM's --max-num-seqs on such cards when it serves; its --max-num-batched-tokens is ROWS
ROWS = 2048
CAPTURED, GRAPHS = 512, 51  # rows of vLLM's largest graph of a decode step, and their number
PROMPT = 8192  # tokens of the prompt whose first token is calculated
LONG = 32768  # of the one whose tokens/s are
BLOCK, BLOCK_QUANTISED = 128, 64  # rows of an expert that a block of our kernel has in long prompts
COLUMNS = {
    "slots": "of vllm serve MODEL --plugin spac, one request, by the engine's own functions",
    "slots_of_long": "the same with --max-model-len of `long_prompt` tokens; null where nothing fits",
    "tokens_per_s": "decode of one request with low locality, by the simulator with late reports and shared DRAM",
    "tokens_per_s_before": "the same simulator with the slots of before",
    "tokens_per_s_claimed_before": "what that commit's own simulator says: no late report, 4-bit hits at full rate",
    "first_token": "seconds of a prompt of `prompt` tokens; each expert is read once a chunk, arithmetic is hidden",
    "first_token_most": "the same with arithmetic after the loads, and a read per block of rows where read in place",
    "first_token_claimed_before": "what that commit's own formula says at most",
    "prompt_tokens_per_s": "of a prompt of `long_prompt` tokens, as first_token; least: as first_token_most",
    "kv_bytes_per_request": "of a request of the model's length",
}

app = Script(__doc__)


@dataclass(frozen=True)
class Start:
    """What an engine's start counts.

    Attributes:
        plane: how layers reach experts; ``stock``: the model is left to stock vLLM.
        slots: of ``total`` experts.
        rows: of a chunk of a prompt.
        kv: bytes that are left for the KV cache, and ``request`` those of one request of the model's length.
        working: bytes of run-time buffers.
        reserved: bytes of buffers for prompts.
    """

    plane: str
    slots: int
    total: int
    rows: int
    kv: int
    request: int
    working: int
    reserved: int = 0

    @property
    def holds_all(self) -> bool:
        return self.slots == self.total


def given_to(function: Callable[..., Any], **known: Any) -> Any:
    """Calls a function with those of ``known`` that it takes: "before", some take others."""
    return function(**{name: known[name] for name in inspect.signature(function).parameters if name in known})


@contextmanager
def card(gib: int) -> Iterator[DeviceFacts]:
    """Context in which the plugin finds a GPU of this memory; yields what it is told of it."""
    costs = Costs.read(CARDS[gib])
    assert costs.capacity is not None and costs.capacity.capability is not None
    facts = DeviceFacts(costs.name, True, costs.capacity.capability, pinned=True, unified=True)
    with (
        patch.object(device, "is_cpu", lambda: False),
        patch.object(fast_memory, "is_cpu", lambda: False),
        patch.object(device, "query", lambda: facts),
        patch.object(store_choice, "available_host_bytes", lambda: 1 << 40),  # the store is host memory
        patch.object(device, "total_memory", lambda: gib * GIB, create=True),
    ):
        yield facts


def start(named: NamedModel, gib: int, length: int | None = None) -> Start:
    """Counts what ``vllm serve MODEL --plugin spac`` would have of a card; ``length``: its only other flag."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    usage = UsageContext.OPENAI_API_SERVER
    with card(gib) as facts:
        args = EngineArgs(model=str(named.folder), max_model_len=length, skip_tokenizer_init=True)
        args.additional_config = {"spac": {}}
        args.spac_command = True
        args.get_batch_defaults = lambda ranks: ({usage: ROWS}, {usage: REQUESTS})
        config = given_to(gpu_defaults.apply, engine_args=args, config=SpacConfig(), usage=usage)
        plane: Any = "slots" if config is None else config.plane
        served = ServedModel.of(named, plane, capability=facts.capability)
        total = served.checkpoint.total
        if config is None:
            return Start("stock", total, total, ROWS, 0, 0, 0)
        given_to(fast_memory.request, engine_args=args, usage=usage)
        return counted(args, served, gib * GIB, total)


def counted(args: Any, served: ServedModel, memory: int, total: int) -> Start:
    """Counts as ``ModelExperts`` does before it loads weights, the KV cache as is known before there are layers."""
    from vllm.config import CUDAGraphMode

    rows, model, others = args.max_num_batched_tokens or ROWS, args.create_model_config(), served.checkpoint.other_bytes
    engine = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(
            max_num_seqs=REQUESTS, max_num_batched_tokens=rows, disable_hybrid_kv_cache_manager=False
        ),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=args.gpu_memory_utilization),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            max_cudagraph_capture_size=CAPTURED,
            cudagraph_capture_sizes=range(GRAPHS),
        ),
        speculative_config=None,
        max_in_flight_tokens=2 * rows,
        num_speculative_tokens=0,
    )
    shape = served.architecture
    widths = {MoEWidths(served.checkpoint.top_k, shape.hidden, shape.inner)}
    gpu = torch.device("cuda")
    working = fast_memory.working(cast(Any, engine), gpu, widths).total
    with (
        patch.object(torch.cuda, "mem_get_info", lambda of: (memory - others, memory)),
        patch.object(torch.cuda, "memory_reserved", lambda of: others),
    ):
        both = fast_memory.room(cast(Any, engine), gpu, others, working)
    if hasattr(fast_memory, "by_config"):
        request = fast_memory.by_config(cast(Any, engine)).request_bytes
    else:
        request = vars(fast_memory)["_request_bytes"](engine)
    kv = given_to(fast_memory.beside_slots, vllm_config=engine, each=request, free=both)
    experts = SimpleNamespace(
        total=total,
        experts=served.checkpoint.experts,
        top_k=served.checkpoint.top_k,
        expert_bytes=served.expert_bytes,
        layers=range(served.layers),
    )
    execution = SpacConfig.parse({"plane": served.execution}).execution_class
    room = given_to(execution.divide, slots=SlotCount(), staging="auto", shape=experts, free_bytes=both - kv)
    reserved = room.nbytes - room.slots * served.expert_bytes
    return Start(served.execution, room.slots, total, rows, kv, request, working, reserved)


def machine(model: str, gib: int) -> PlannedMachine:
    return PlannedMachine.of(CARDS[gib], gib * GIB, MODELS[model][1] * GIB)


def judged(begun: Start, named: NamedModel, on: PlannedMachine) -> dict[str, Any]:
    """Returns tokens/s, and the least and most seconds of both prompts, by the code that stands here.

    The memory is that of ``begun``; where it reserves buffers for prompts, or reads them in place, so do its prompts.
    """
    plane = cast(Any, "slots" if begun.plane == "stock" else begun.plane)
    served = ServedModel.of(named, plane, capability=on.capability)
    choice = Choice(cast(int, Fraction(100 * begun.slots, begun.total)), "none" if begun.plane == "stock" else "host")
    decode = predict.predict(choice, served, on, Load(2 * PROMPT, 1), LOW)
    prompts = {}
    for tokens in (PROMPT, LONG):
        with patch.object(predict, "rows", lambda *_: begun.rows), patch.object(predict, "PROMPT", tokens):
            prompts[tokens] = predict.first_token(choice, served, on, Load(2 * tokens, 1))
    return {
        "tokens_per_s": decode.tokens_per_second,
        "hit_rate": decode.hit_rate,
        "first_token": prompts[PROMPT],
        "long_prompt": prompts[LONG],
    }


def as_before(begun: Start) -> Any:
    """Has prompts read as they were "before": in place, or from buffers of two layers, if these were reserved."""

    def loads(chunk: int, used: float, slots: int, settled: int, model: ServedModel) -> tuple[float, float]:
        """As ``predict._loads``: without a buffer, from one read of an expert to one for each block of its rows.

        No expert had settled.
        """
        outside = 1 - slots / model.checkpoint.total
        if begun.reserved:
            return (outside * model.checkpoint.total,) * 2
        block = BLOCK_QUANTISED if model.quantised else BLOCK
        reads = used + chunk * model.checkpoint.top_k / block
        return outside * model.layers * used, outside * model.layers * reads

    return patch.object(predict, "_loads", loads)


@contextmanager
def models() -> Iterator[dict[str, NamedModel]]:
    """Context with the models, each in a folder that has its ``config.json``."""
    found = json.loads(CONFIGS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for name in MODELS:
            path = Path(folder, name.replace("/", "--"))
            path.mkdir()
            entry = {**found.get(found[name].get("like"), {}), **found[name]}
            (path / "config.json").write_text(json.dumps({key: entry[key] for key in entry if key != "like"}))
            made[name] = replace(find_model(str(path)), name=name)
        yield made


def own_rows() -> Iterator[dict[str, Any]]:
    """Yields what the code that stands here counts and claims, for each model and card."""
    with models() as named:
        for model, gib in tqdm([(model, gib) for model in MODELS for gib in CARDS], unit="plan"):
            begun = start(named[model], gib)
            row = {"model": model, "memory_gib": gib, "start": asdict(begun), "slots_of_long": None}
            with suppress(ConfigError):  # four requests of this length leave no room for experts
                row["slots_of_long"] = start(named[model], gib, LONG).slots
            yield row | judged(begun, named[model], machine(model, gib))


def merged(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each model and card: now beside "before", whose memory is judged by the code of now."""
    with models() as named:
        for now, then in zip(rows, before, strict=True):
            model, gib = now["model"], now["memory_gib"]
            assert (model, gib) == (then["model"], then["memory_gib"]), "rows of other models"
            begun, old = Start(**now["start"]), Start(**then["start"])
            with as_before(old):
                found = judged(old, named[model], machine(model, gib))
            yield {
                "model": model,
                "format": MODELS[model][0],
                "memory_gib": gib,
                "machine": CARDS[gib],
                "host_memory_gib": MODELS[model][1],
                "experts": begun.total,
                "plane_before": old.plane,
                "plane": begun.plane,
                "slots_before": old.slots,
                "slots": begun.slots,
                "slots_of_long_before": then["slots_of_long"],
                "slots_of_long": now["slots_of_long"],
                "prompts_before": "two buffers" if old.reserved else "none missing" if old.holds_all else "in place",
                "chunk_before": old.rows,
                "chunk": begun.rows,
                "kv_bytes_per_request_before": old.request,
                "kv_bytes_per_request": begun.request,
                "tokens_per_s_before": found["tokens_per_s"],
                "tokens_per_s": now["tokens_per_s"],
                "tokens_per_s_claimed_before": then["tokens_per_s"],
                "hit_rate_before": found["hit_rate"],
                "hit_rate": now["hit_rate"],
                "first_token_before": found["first_token"][0],
                "first_token": now["first_token"][0],
                "first_token_most_before": found["first_token"][1],
                "first_token_most": now["first_token"][1],
                "first_token_claimed_before": then["first_token"][1],
                "prompt_tokens_per_s_before": LONG / found["long_prompt"][0],
                "prompt_tokens_per_s": LONG / now["long_prompt"][0],
                "prompt_tokens_per_s_least_before": LONG / found["long_prompt"][1],
                "prompt_tokens_per_s_least": LONG / now["long_prompt"][1],
            }


@app.main
def main(
    rows: Annotated[Path | None, typer.Option(help='Write this code\'s own rows there, to be "before".')] = None,
    before: Annotated[Path | None, typer.Option(help="Rows of another commit, instead of those in the result.")] = None,
) -> None:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    origin = provenance()
    if rows is not None:
        write_result(rows, {"provenance": origin, "rows": list(own_rows())})
        return
    then = json.loads(before.read_text(encoding="utf-8")) if before else json.loads(OUTPUT.read_text("utf-8"))["before"]
    now = list(own_rows())
    found = list(merged(now, then["rows"]))
    about = {"prompt": PROMPT, "long_prompt": LONG, "routing": asdict(LOW), "columns": COLUMNS}
    write_result(OUTPUT, {"provenance": origin, "calculated": True, **about, "rows": found, "now": now, "before": then})
    show("one pool, calculated", found, "model", "memory_gib", "slots_before", "slots", "tokens_per_s_before",
         "tokens_per_s", "tokens_per_s_claimed_before", "first_token_before", "first_token", "first_token_most_before",
         "first_token_most", "prompt_tokens_per_s_before", "prompt_tokens_per_s")  # fmt: skip


if __name__ == "__main__":
    app()
