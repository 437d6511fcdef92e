"""Calculates what two cards give by pipeline stages and by tensor parallelism, beside one of them.

    python benchmarks/stages.py

Nothing is measured and no engine runs. Two stages are a card with the memory of both, whose link is that of one: a step
passes one stage after the other. Several requests are two batches, each in another stage, so there are twice the tokens
of half the requests. No time is lost between stages. Tensor parallelism is a card with the memory, the rates and the
links of both, and ``MEETINGS`` all-reduces per layer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import RESULTS, Script, provenance, show, write_result
from benchmarks.one_pool import CONFIGS, GIB
from vllm_spac.storage.checkpoint.published import NamedModel, find_model
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Load
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_routing import LOW
from vllm_spac.tools.planning.planned_serving import choices
from vllm_spac.tools.planning.predict import predict

OUTPUT = RESULTS / "stages.json"
MODEL, CARD, HOST = "openai/gpt-oss-120b", "rtx3090", 96
MEMORY, BUFFERS = 24, 1  # GiB of a card; of run-time buffers, which the second one needs, too
CONTEXT, REQUESTS = 8192, (1, 2, 4, 8)
MEETINGS, MEETING = 2, 30e-6  # all-reduces of a layer, and seconds of each without peer access (assumed)
LANES = {16: 1.0, 8: 0.5}  # of each card where there are two -> part of the link of one by itself
WAYS = {
    "one": "one card, with 16 lanes",
    "stages": "two pipeline stages",
    "tensors": "tensor parallelism over two cards",
}

app = Script(__doc__)


def machine(way: str, part: float) -> PlannedMachine:
    """Returns the card that stands for all of them; ``part``: of its link that each has."""
    if way == "one":
        return PlannedMachine.of(CARD, MEMORY * GIB, HOST * GIB)
    found = PlannedMachine.of(CARD, (2 * MEMORY - BUFFERS) * GIB, HOST * GIB)
    load = found.costs.load.model_copy(update={"bytes_per_second": part * found.costs.load.bytes_per_second})
    found = replace(found, costs=found.costs.model_copy(update={"load": load}))
    return tensors(found, 2) if way == "tensors" else found


def tensors(machine: PlannedMachine, cards: int) -> PlannedMachine:
    """Returns the card that stands for so many of ``machine``'s with tensor parallelism, but for their memory."""
    costs = machine.costs
    load = costs.load.model_copy(update={"bytes_per_second": cards * costs.load.bytes_per_second})
    fast = costs.fast.model_copy(update={"bytes_per_second": cards * costs.fast.bytes_per_second})
    vllm = costs.vllm.model_copy(update={"layer": costs.vllm.layer + MEETINGS * MEETING})
    return replace(machine, costs=costs.model_copy(update={"load": load, "fast": fast, "vllm": vllm}))


def speed(named: NamedModel, way: str, part: float, requests: int) -> dict[str, Any]:
    """Tokens per second of all ``requests``, and what part of the experts has slots; exact, without drafts."""
    on = machine(way, part)
    batches = 2 if way == "stages" and requests > 1 else 1
    served = ServedModel.of(named, "pointers", capability=on.capability)
    choice = next(each for each in choices(served, on, Load(CONTEXT, requests)) if not (each.drafts or each.cpu))
    found = predict(choice, served, on, Load(CONTEXT, requests // batches), LOW)
    return {
        "tokens_per_s": batches * found.tokens_per_second,
        "hit_rate": found.hit_rate,
        "limit": found.limit,
        "percent": choice.percent,
        "store": choice.store,
    }


def rows(named: NamedModel) -> Iterator[dict[str, Any]]:
    for lanes, part in LANES.items():
        for requests in tqdm(REQUESTS, unit="load"):
            found = {way: speed(named, way, part, requests) for way in WAYS}
            yield {"lanes": lanes, "requests": requests, **found}


@app.main
def main() -> None:
    origin = provenance()
    configs = json.loads(CONFIGS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(configs[MODEL]))
        found = list(rows(replace(find_model(str(path)), name=MODEL)))
    about = {"model": MODEL, "card": CARD, "memory_gib": MEMORY, "host_memory_gib": HOST, "context": CONTEXT}
    assumed = {"all_reduces_per_layer": MEETINGS, "all_reduce_seconds": MEETING, "second_buffers_gib": BUFFERS}
    write_result(OUTPUT, {"provenance": origin, **about, "assumed": assumed, "ways": WAYS, "rows": found})
    shown = [
        {"lanes": row["lanes"], "requests": row["requests"]} | {way: round(row[way]["tokens_per_s"], 1) for way in WAYS}
        for row in found
    ]
    show(f"{MODEL}, tokens/s, calculated", shown, "lanes", "requests", *WAYS)


if __name__ == "__main__":
    app()
