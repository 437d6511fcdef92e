"""MoE-Spec's table 1 and figures 4, 5b, 9 and 10: speed, acceptance length and quality by budget, on a scaled machine.

An engine without drafts, and for each chain and each tree of an EAGLE-3 head, or chain of n-grams, one that verifies
all drafts in every step, stay alive; each prompt goes to all of them, once per arm, in random order: exact, and under
each budget with each kind of votes. Speed is the ratio of tokens per second to those without drafts, of the same
prompt; acceptance length is 1 + accepted / drafts; experts are the distinct ones per layer and step. Quality is what
stock vLLM, exact, thinks of the answers: their perplexity, the share of their tokens that are its own first choice
given the text so far (top-1 agreement), with --kl the divergence of the distributions that they are from, and at
temperature 0 the share of an answer's tokens before the first that differs from that without drafts. At a temperature
above 0 every seed is a run of all prompts, and deviations are over seeds.

On a CPU, stock vLLM 0.32 samples wrong tokens with chains of drafts at temperatures above 0: use --chains "" there.

The paper's experts are in the GPU's memory; here they are loaded over a link. Budgets are lossy. Times are
[bold]scaled[/], see benchmarks/README.md. A turn takes 3 to 12 s: --prompts, --output-tokens and --kl bound the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from benchmarks.common import RESULTS, PlanError, Script, progress, show, wide, write_result
from benchmarks.papers.arms import SHOWN, Arm, budget_arms, rows, score, serve
from benchmarks.scaled.ladder import PACED, WATERFILL, disturbed, total
from benchmarks.scaled.proportions import Proportions, names
from benchmarks.scaled.scale import Cores, Scale, head, on
from benchmarks.serving import prompts
from benchmarks.serving.cases import PACKED, Case, Drafts, PackedFolder, Settings, sizes, split

EXAMPLES = """[bold]Examples[/]

moe_spec_table.py .cache/toy/local-mid --temperatures 0 --kl 3

moe_spec_table.py .cache/toy/local-mid --budgets 24 --trees 8,16,32,63 --votes path --temperatures 0

moe_spec_table.py .cache/real/target --machine rtx4090-int4 --slots 50% --cpu --dtype float32 --drafters eagle3,ngram \\
    --chains 4 --trees 16 --votes path --temperatures 0 --eagle3 .cache/real/eagle3

moe_spec_table.py .cache/toy/local-mid --chains "" --trees 63 --temperatures 1 --seeds 2 --prompts 4
"""
EAGLE3, NGRAM = "eagle3", "ngram"
app = Script(__doc__, EXAMPLES)


@app.main
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    machine: Annotated[str, typer.Option(help=f"Of {', '.join(names())}.")] = "rtx4090",
    slots: Annotated[str, typer.Option(help="Value of --spac-slots.")] = "25%",
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU computes a share of the missed experts.")] = False,
    budgets: Annotated[str, typer.Option(help="Experts per layer.")] = "16,24,32",
    ranking: Annotated[str, typer.Option(help="That needs no calibration.")] = "selected",
    coverage: Annotated[str, typer.Option(help="truncation, substitution or both.")] = "substitution",
    votes: Annotated[str, typer.Option(help="uniform, path or both.")] = "uniform,path",
    chains: Annotated[str, typer.Option(help="Draft tokens of chains.")] = "5",
    drafters: Annotated[str, typer.Option(help="Of the chains: eagle3, ngram or both.")] = EAGLE3,
    trees: Annotated[str, typer.Option(help="Nodes of draft trees.")] = "16,63",
    temperatures: Annotated[str, typer.Option(help="Of the answers.")] = "0,1",
    seeds: Annotated[int, typer.Option(min=2, help="Runs at each temperature above 0.")] = 5,
    count: Annotated[int, typer.Option("--prompts", min=2, help="Prompts of a run.")] = 8,
    kl: Annotated[int, typer.Option(min=0, help="Prompts answered once more at temperature 0, for divergences.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 48,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: MODEL-eagle3.")] = None,
    disk_dir: PackedFolder = PACKED,
    dtype: Annotated[str, typer.Option(help="Of all engines; float32 where bfloat16 is slow.")] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "scaled_moe_spec_toy.json",
) -> None:
    console = wide(160)
    drafts = Drafts(1, eagle3 or model.with_name(f"{model.name}-eagle3"), model)
    ways = ways_of(chains, trees, split(drafters))
    arms = arms_of(ways, split(budgets), split(coverage), split(votes), ranking)
    cores, real = Cores.here(), Proportions.of(machine)
    settings = Settings(
        model, drafts, prompt_tokens, output_tokens, dtype=dtype, disk_dir=disk_dir, timeout=timeout,
        environment=cores.environment(),
    )  # fmt: skip
    knobs = {"slots": slots, "policy": "reuse", **PACED, **(WATERFILL if cpu else {})}
    cases = [way.case(knobs) for way in ways]
    for case in cases:
        case.job(settings)  # refuses a missing head before anything is measured
    runs = runs_of(temperatures, seeds)
    asked = prompts.load(model, 1 + count, prompt_tokens, 0)
    result = head(machine, asked, settings) | {"slots": slots, "knobs": knobs}
    with progress() as bar:
        task = bar.add_task("all experts resident", total=2 * len(runs) * count * len(arms))

        def advance(what: str, steps: int) -> None:
            bar.update(task, advance=steps, description=what)

        scale = Scale.derive(real, settings, asked.ids, 1, cores)
        result["scale"] = scale.plain()
        batches = [[prompt] for prompt in asked.ids]
        with on(scale.machine, settings) as paced:
            turns = serve(cases, arms, runs, batches, paced, advance, kl)
        result["disturbed"] = disturbed(total([turn.answer["counters"]["own"] for turn in turns]), scale.machine)
        of = {arm.name: ways[arm.engine] for arm in arms}
        result["rows"] = [
            {**dataclasses.asdict(of[row["arm"]]), **row}
            for row in rows(arms, turns, score(turns, batches, settings, advance))
        ]
    write_result(output, result)
    title = f"{result['label']}, {slots} of the experts in slots, speed over that without drafts"
    show(title, result["rows"], "temperature", *SHOWN)
    if result["disturbed"]:
        console.print(f"[yellow]{escape(result['disturbed'])}[/]", highlight=False)
    console.print(f"wrote {output}", soft_wrap=True)


@dataclass(frozen=True)
class Way:
    """How an engine drafts; ``kind``: none, chain or tree."""

    kind: str
    drafts: int = 0
    drafter: str = EAGLE3

    @property
    def name(self) -> str:
        by = {EAGLE3: "", NGRAM: " by n-grams"}[self.drafter]
        return f"{self.kind} of {self.drafts}{by}" if self.drafts else "no drafts"

    def votes(self, asked: Sequence[str]) -> Sequence[str]:
        """Returns the votes of its budgets; n-grams have no probabilities, hence no votes by path."""
        return () if not self.drafts else asked if self.drafter == EAGLE3 else ["uniform"]

    def case(self, knobs: Mapping[str, str]) -> Case:
        """Returns the engine, with further ``knobs``; it verifies all drafts in every step."""
        drafted = {"guard": "off"} if self.drafts else {}
        drafted |= {"tree": str(self.drafts)} if self.kind == "tree" else {}
        return Case(self.name, {**knobs, **drafted}, self.drafter if self.drafts else "none", self.drafts or None)


def ways_of(chains: str, trees: str, drafters: Sequence[str] = (EAGLE3,)) -> list[Way]:
    """Returns no drafts, the chains of each drafter, and the trees.

    Raises:
        PlanError: a number or a drafter is none, or there are no drafts.
    """
    if odd := set(drafters) - {EAGLE3, NGRAM}:
        raise PlanError(f"--drafters {', '.join(sorted(odd))}: use {EAGLE3} or {NGRAM}")
    found = [Way("none")]
    for kind, numbers, by in (("chain", chains, drafters), ("tree", trees, (EAGLE3,))):
        counts = sizes(numbers, f"--{kind}s") if split(numbers) else []
        found += [Way(kind, number, drafter) for drafter in by for number in counts]
    if len(found) == 1:
        raise PlanError("name drafts: --chains 5 or --trees 16")
    return found


def arms_of(
    ways: Sequence[Way], budgets: Sequence[str], coverages: Sequence[str], votes: Sequence[str], ranking: str
) -> list[Arm]:
    """Returns an exact arm for each way to draft, and for each with drafts one per budget, coverage and its votes.

    Raises:
        ConfigError: a setting is not the plugin's.
    """
    found = []
    for number, way in enumerate(ways):
        found.append(Arm(f"{way.name}, exact" if way.drafts else way.name, (), {}, number))
        for vote in way.votes(votes):
            for arm in budget_arms(budgets, coverages, (), number, ranking=ranking, votes=vote):
                found.append(dataclasses.replace(arm, name=f"{way.name}, {arm.name}"))
    return found


def runs_of(temperatures: str, seeds: int) -> list[tuple[float, int]]:
    """Returns (temperature, number of the run) of all runs.

    Raises:
        PlanError: a temperature is none.
    """
    found = []
    for text in split(temperatures):
        try:
            temperature = float(text)
        except ValueError:
            temperature = -1.0
        if temperature < 0:
            raise PlanError(f"--temperatures {temperatures}: name numbers from 0 on, e.g. 0,1")
        found += [(temperature, seed) for seed in range(seeds if temperature else 1)]
    return found


if __name__ == "__main__":
    app()
