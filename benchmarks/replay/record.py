"""Records routing traces of a model for the other scripts here: one engine each, with and without drafts, greedy.

Prompts are text that the model never saw. ``none1`` decodes at batch 1; ``eagle4_8`` verifies 4 drafts of EAGLE-3
at batch 8; of the carved model ``draft`` is its dense parent. Each trace begins with a few tokens of warm-up. Routers'
weights are left out unless ``--weights`` asks for them: with them a trace is three times as large, and only
``locality.py`` reads them. Beside a trace is what the
tree keeps of it, packed (``toy/stored.py``); ``traces.json``, or ``traces-SEED.json``, says how they were recorded.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from benchmarks.common import ROOT, TOY, TRACES, Script, provenance, sha256, write_result
from benchmarks.serving import prompts
from benchmarks.serving.cases import FULL, Case, Drafts, Settings, split
from benchmarks.serving.processes import run_engine
from benchmarks.toy.stored import pack
from vllm_spac.recording.trace_file import Trace

CASES = {  # name -> speculation, drafts, batch
    "none1": ("none", 0, 1),
    "none8": ("none", 0, 8),
    "eagle4_1": ("eagle3", 4, 1),
    "eagle4_8": ("eagle3", 4, 8),
    "eagle8_1": ("eagle3", 8, 1),
    "draft4_1": ("draft", 4, 1),
    "draft8_1": ("draft", 8, 1),
}
RECORDED = "none1,none8,eagle4_1,eagle4_8,eagle8_1,draft8_1"
EXAMPLES = """[bold]Examples[/]

python benchmarks/replay/record.py

python benchmarks/replay/record.py --case none1,eagle4_1 --output-tokens 256 --folder /tmp/traces

python benchmarks/replay/record.py .cache/real/target --case none1,none8 --folder /tmp/traces
"""
app = Script(__doc__, EXAMPLES)


@app.main
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model; eagle3 and draft (dense) are next to it.")] = TOY
    / "models"
    / "target",
    case: Annotated[str, typer.Option(help=f"Of {', '.join(CASES)}.")] = RECORDED,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts per engine.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 96,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the prompts; with another than 0 it is part of the names.")] = 0,
    weights: Annotated[bool, typer.Option("--weights", help="Keep the routers' weights.")] = False,
    folder: Annotated[Path, typer.Option(help="Folder to write CASE.trace or CASE-SEED.trace to.")] = TRACES,
) -> None:
    origin = provenance()
    names = split(case)
    if unknown := set(names) - set(CASES):
        raise typer.BadParameter(f"no case is called {', '.join(sorted(unknown))}; use {', '.join(CASES)}")
    folder.mkdir(parents=True, exist_ok=True)
    name_of_model = os.path.relpath(model, ROOT)  # the same on every machine
    parent = model.parent / "dense"  # of the carved model
    draft = parent if parent.is_dir() else model.parent / "draft"
    asked, recorded = prompts.load(model, count, prompt_tokens, seed), {}
    for name in track(names, "recording", console=Console(stderr=True)):
        speculation, tokens, batch = CASES[name]
        drafts = Drafts(tokens, model.parent / "eagle3", draft)
        path = folder / (f"{name}-{seed}.trace" if seed else f"{name}.trace")
        knobs = {
            "slots": FULL,
            "policy": "lru",
            "plane": "slots",
            "store": "disk",
            "record": f"trace={path.resolve()}",
        }
        engine = Case(name, knobs | ({"guard": "off"} if tokens else {}), speculation)
        settings = Settings(model, drafts, prompt_tokens, output_tokens, (batch,))
        _, error = run_engine(engine.job(settings, asked.ids), False, 3600.0)
        if error:
            raise typer.BadParameter(f"{name}: {error}")
        trace = Trace.load(path)
        kept = trace.weights if weights else None
        replace(trace, facts=replace(trace.facts, model=name_of_model), weights=kept).save(path)
        pack(path)
        recorded[path.name] = {
            "speculation": speculation,
            "draft_tokens": tokens,
            "batch": batch,
            "sha256": sha256(path),
        }
    file = folder / (f"traces-{seed}.json" if seed else "traces.json")
    facts = {"prompts": asked.describe(), "output_tokens": output_tokens}
    before = json.loads(file.read_text()) if file.exists() else {}
    if {name: before.get(name) for name in facts} == facts:  # more cases of the same prompts
        recorded = before["traces"] | recorded
        facts["earlier"] = [*before.get("earlier", []), before["provenance"]]
    write_result(file, {"provenance": origin} | facts | {"traces": recorded})


if __name__ == "__main__":
    app()
