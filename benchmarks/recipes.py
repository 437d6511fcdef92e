"""Writes ``vllm_spac/RECIPES.md``: how to serve published models, as ``vllm-spac plan`` calculates it.

    python benchmarks/recipes.py

``recipes.json`` has the machine that a model is served on, or several of them (``machines``), which share a table; its
published ``config.json`` is a copy in the package, which ``vllm-spac plan`` reads, too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter
from tqdm import tqdm

from benchmarks.common import ROOT, Script
from vllm_spac.errors import ConfigError
from vllm_spac.storage.checkpoint.published import NamedModel, find_model, published
from vllm_spac.storage.checkpoint.quantisation import Capability
from vllm_spac.system.files import replacing
from vllm_spac.system.host_memory import gib
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Load
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_serving import Row, ServingPlan, plan_model

RECIPES = ROOT / "benchmarks" / "recipes.json"
DOCUMENT = ROOT / "vllm_spac" / "RECIPES.md"
PUBLISHED = ROOT / "tests" / "upstream" / "published"  # configs of newer models
NEWER = (
    "nvidia/Qwen3.8-Flash-Next-NVFP4",
    "sgl-project/DeepSeek-V4-Flash-FP8",
    "RedHatAI/GLM-5.3-Flash-NVFP4",
    "nvidia/MiniMax-M3-NVFP4",
)
_CARDS, _HOSTS = ("rtx3090", "rtx4090", "rtx5090"), (64, 128)  # GiB of host memory
_HEAD = """# Recipes

Written by `python benchmarks/recipes.py`. **Every figure is calculated**, as `vllm-spac plan MODEL` does for your
machine, context and requests: from `config.json`, data sheets, and the host's work that an H100's machine had.
Real speeds are mostly lower. *Low* and *high* assume the locality that is published of Qwen3-30B-A3B, *no locality*
that every token chooses anew. **CPU experts, too, are calculated: on an H100 they
never paid, with an older kernel.** Models in bf16
come first, each on one machine; quantised ones on four, with the second one's command."""
_STORES = {"host": "host memory", "disk": "the disk", "tiers": "host memory, the rest of them on the disk"}
_LIMITS = {
    "compute": "reading the weights in GPU memory",
    "link": "loads over PCIe",
    "disk": "loads from the disk",
    "CPU": "experts on the CPU",
    "host": "the host's work between steps",
}


app = Script(__doc__)


def recipes() -> list[dict[str, Any]]:
    """Returns the content of ``recipes.json``, each with the whole ``config``."""
    found = json.loads(RECIPES.read_text(encoding="utf-8"))
    configs = published()
    known = {recipe["model"]: recipe for recipe in found}
    return [
        {key: known[recipe["like"]][key] for key in ("billions",) if "like" in recipe}
        | recipe
        | {"config": configs[recipe["model"]]}
        for recipe in found
    ]


def planned(recipe: dict[str, Any], name: str = "") -> ServingPlan:
    """Returns the plan of one recipe on its machine, or on the one of its ``machines`` with this name."""
    host = int(TypeAdapter(ByteSize).validate_python(recipe["host_memory"]))
    machine = PlannedMachine.of(name or recipe["machine"], None, host)
    load = {"context": recipe["context"], "concurrency": recipe["concurrency"]}
    with named(recipe) as model:
        return plan_model(model, machine, **load)


@contextmanager
def named(recipe: dict[str, Any]) -> Iterator[NamedModel]:
    """Context with the model of a recipe, by its published name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(recipe["config"]))
        yield replace(find_model(str(path)), name=recipe["model"])


def served(recipe: dict[str, Any], capability: Capability | None = None) -> list[ServedModel]:
    """Returns the model of a recipe as each execution serves it on such a GPU."""
    with named(recipe) as model:
        return list(ServedModel.ways(model, on_cpu=False, capability=capability))


def written(recipe: dict[str, Any]) -> list[str]:
    """Plans one recipe on each of its machines, and returns the lines of its section."""
    if "machines" not in recipe:
        return list(section(planned(recipe)))
    return list(table(recipe, [planned(recipe, name) for name in recipe["machines"]]))


def document(sections: list[list[str]]) -> str:
    """Returns the document in Markdown."""
    return "\n".join([_HEAD, *(line for lines in sections for line in lines)]) + "\n"


def table(recipe: dict[str, Any], plans: list[ServingPlan]) -> Iterator[str]:
    """Yields the lines of one recipe on several machines; the command is that of the second."""
    model, load, shown = plans[1].model, plans[1].load, plans[1]
    yield from ("", f"## {model.name}", "")
    yield (
        f"{recipe['format']}; {gib(shown.machine.host)} of host memory; {_requests(load)} of {load.context:,} tokens. "
        f"The experts take {gib(model.experts_bytes)}. On `{shown.machine.name}`:"
    )
    yield from ("", "```bash", shown.best.command, "```", "")
    yield from (
        "| calculated | slots | plane | drafts | tokens/s: no locality | low | high | limited by | first token |",
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for plan in plans:
        best = plan.best
        if best.choice.store == "none":
            yield f"| `{plan.machine.name}` | 100 % | all fit: stock vLLM serves it | | | | | | |"
            continue
        speeds = (f"{one.tokens_per_second:.3g}" for one in (best.even, best.compared, best.high) if one is not None)
        yield (
            f"| `{plan.machine.name}` | {best.choice.slots.replace('%', ' %')} | `{plan.model.execution}` | "
            f"{best.choice.drafts or '-'} | {' | '.join(speeds)} | {_LIMITS[best.compared.limit]} | "
            f"{max(best.first_token):.2g} s |"
        )


def newer() -> list[dict[str, Any]]:
    """Returns name and config of the newer models, as recipes."""
    facts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(PUBLISHED.glob("*.json"))]
    known = {each["name"]: each["config"] for each in facts}
    return [{"model": name, "config": known[name], "context": 8192, "concurrency": 1} for name in NEWER]


def newer_plan(recipe: dict[str, Any], card: str, host: int) -> ServingPlan | None:
    """Returns the plan of a newer model with ``host`` GiB of host memory; None if nothing fits."""
    try:
        return planned(recipe | {"host_memory": f"{host}GiB"}, card)
    except ConfigError:
        return None


def newer_row(recipe: dict[str, Any], host: int, plans: list[ServingPlan | None]) -> str:
    """Returns a line of the newer models' table: one model with so much host memory, on each card."""
    cells = []
    for plan in plans:
        if plan is None:
            cells.append("does not fit")
            continue
        best, disk = plan.best, ", disk" if plan.best.choice.store in ("disk", "tiers") else ""
        drafts = ", n-grams" if best.choice.drafts else ""
        speeds = " - ".join(f"{one.tokens_per_second:.3g}" for one in (best.even, best.compared, best.high) if one)
        cells.append(f"{best.choice.slots.replace('%', ' %')}{disk}{drafts}: {speeds}")
    return f"| `{recipe['model']}` | {host} GiB | {' | '.join(cells)} |"


def newer_section() -> Iterator[str]:
    """Yields the lines of the newer models on cards of 24 and 32 GB."""
    yield from ("", "## Models of this autumn", "")
    yield (
        "One request of 8,192 tokens. Of each card: slots, whether a disk holds what host memory does not, and "
        "tokens/s without locality, with low and with high. None of these has been served on a GPU; "
        "[FAMILIES.md](../tests/upstream/FAMILIES.md) has tiny models of their classes. The commands are those of "
        f"`{_CARDS[1]}` with {_HOSTS[-1]} GiB."
    )
    cards = " | ".join(f"`{card}`" for card in _CARDS)
    yield from ("", f"| calculated | host memory | {cards} |", f"|---|---{len(_CARDS) * '|---'}|")
    commands = []
    for recipe in tqdm(newer(), unit="newer model"):
        for host in _HOSTS:
            plans = [newer_plan(recipe, card, host) for card in _CARDS]
            yield newer_row(recipe, host, plans)
        if (shown := plans[1]) is not None:
            commands.append(shown.best.command)
    yield from ("", "```bash", *commands, "```")


def section(plan: ServingPlan) -> Iterator[str]:
    """Yields the lines of one recipe."""
    best, machine, load = plan.best, plan.machine, plan.load
    yield from ("", f"## {plan.model.name}", "")
    yield (
        f"`{machine.name}`: {gib(machine.gpu)} of GPU memory, {gib(machine.host)} of host memory; {_requests(load)} of "
        f"{load.context:,} tokens."
    )
    yield from ("", "```bash", best.command, "```", "")
    yield from ("| calculated | tokens/s | hits | limited by | first token |", "|---|---|---|---|---|")
    for name, prediction in (("no locality", best.even), ("low", best.compared), ("high", best.high)):
        if prediction is not None:
            yield (
                f"| {name} | {prediction.tokens_per_second:.3g} | {100 * prediction.hit_rate:.0f} % | "
                f"{_LIMITS[prediction.limit]} | {max(best.first_token):.2g} s |"
            )
    yield from ("", *reasons(plan))


def _requests(load: Load) -> str:
    return "one request" if load.concurrency == 1 else f"{load.concurrency} requests"


def reasons(plan: ServingPlan) -> Iterator[str]:
    """Yields why this command: what fits, where the rest is, and what the alternatives would give."""
    choice, parts = plan.best.choice, plan.split
    beside = f"{gib(parts.fast - parts.room)} of {gib(parts.fast)}"
    slots = choice.slots.replace("%", " %")
    others = f" The other experts are in {_STORES[choice.store]}." if choice.store in _STORES else ""
    yield (
        f"- Experts: {gib(plan.model.experts_bytes)}. Other weights, KV cache and buffers: {beside}; "
        f"slots for {slots} fit into the rest.{others}"
    )
    if plan.beside is not None:
        found = plan.beside.best
        speeds = f"{found.low.tokens_per_second:.3g} - {found.high.tokens_per_second:.3g}"
        yield f"- With `--spac-plane {plan.beside.model.execution}`: {speeds} tokens/s."
    for what, other in (("CPU experts", _without(plan, cpu=False)), ("drafts", _without(plan, drafts=0))):
        if other is not None:
            speeds = f"{other.low.tokens_per_second:.3g} - {other.high.tokens_per_second:.3g}"
            measured = " On an H100, with an older kernel, they never paid." if what == "CPU experts" else ""
            yield f"- Without {what}: {speeds} tokens/s.{measured}"


def _without(plan: ServingPlan, **change: Any) -> Row | None:
    """The row that differs from the best only in ``change``; None if the best has that already."""
    wanted = replace(plan.best.choice, **change)
    if wanted == plan.best.choice:
        return None
    same = [row for row in plan.rows if replace(row.choice, percent=wanted.percent) == wanted]
    return max(same, key=lambda row: row.choice.percent, default=None)


@app.main
def main() -> None:
    sections = [written(recipe) for recipe in tqdm(recipes(), unit="model")] + [list(newer_section())]
    with replacing(DOCUMENT) as partial:
        partial.write_text(document(sections), encoding="utf-8")


if __name__ == "__main__":
    app()
