"""Calculates what each way to choose drafts would give on recorded chains of the carved model. Nothing is measured.

A step takes 1 for each layer, --row more for each row, and the time of an expert for each that is missing: loads and
the CPU's share at once, in the proportions of --machines. Slots are filled by LRU in each layer, drafts of a head take
half a layer, n-grams nothing. Compared are as many drafts in every step, the chooser that serves, the same one without
knowing of missing experts (confidence against rows), and an oracle that verifies exactly the drafts that are right.
Steps vary by --noise; the time that is counted does not.

A target that drafts for itself, with the experts in slots alone, takes all layers for a draft. Meanwhile the link
reads what its routers name, as many experts as there is time for.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.progress import track
from safetensors.numpy import load_file

from benchmarks.common import RESULTS, Script, provenance, sha256, show, write_result
from benchmarks.scaled.proportions import Proportions
from vllm_spac.decisions.guard.chooser import Chooser, Drafted

EXAMPLE = """[bold]Example[/]

python benchmarks/real/fit/fit.py chains --dense .cache/real/dense --output chains.safetensors

python benchmarks/replay/drafts.py chains.safetensors
"""
DRAFTING = {"ngram": 0.0, "eagle3": 0.5, "dense": 3.0}  # in layers, assumed
SELF = "self"  # and the percentage of the experts that are in slots
app = Script(__doc__, EXAMPLE)


class Text(NamedTuple):
    """One text; arrays as of ``real/fit/chains.py``'s ``Chains``."""

    drafts: np.ndarray
    chances: np.ndarray
    right: np.ndarray
    experts: np.ndarray
    named: np.ndarray

    @property
    def layers(self) -> int:
        return self.experts.shape[2]


class Slots:
    """LRU slots of each layer."""

    def __init__(self, layers: int, count: int) -> None:
        self._count = count
        self._held = [OrderedDict.fromkeys(range(count)) for _ in range(layers)]

    def read(self, experts: np.ndarray, most: int) -> None:
        """Gives slots to the first ``most`` experts, of [rows, layers, top_k], that have none."""
        for layers in experts:
            for held, wanted in zip(self._held, layers.tolist(), strict=True):
                for expert in wanted:
                    most -= expert not in held
                    if most < 0:
                        return
                    held[expert] = None
                    held.move_to_end(expert)
                while len(held) > self._count:
                    held.popitem(last=False)

    def take(self, experts: np.ndarray) -> int:
        """Gives slots to the experts of a step, [rows, layers, top_k]; returns how many had none."""
        missed = 0
        for layer, held in enumerate(self._held):
            wanted = dict.fromkeys(experts[:, layer].ravel().tolist())
            missed += sum(expert not in held for expert in wanted)
            for expert in wanted:
                held[expert] = None
                held.move_to_end(expert)
            while len(held) > self._count:
                held.popitem(last=False)
        return missed


@dataclass
class Machine:
    """Seconds, in layers of one row with nothing missing."""

    miss: float
    row: float
    drafting: float
    noise: float
    read: float = 0.0
    """An expert over the link; 0 if nothing is read while drafts are made."""


@dataclass
class Served:
    """What a way to choose gave; ``seconds`` without noise."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    rows: int = 0

    def plain(self) -> dict[str, float]:
        return {
            "seconds": self.seconds / self.tokens,
            "tokens_per_step": self.tokens / self.steps,
            "rows": self.rows / self.steps,
        }


@dataclass
class Always:
    """So many drafts in every step; ``oracle``: those that are right."""

    count: int
    oracle: bool = False

    def draft(self, text: Text, place: int, most: int) -> tuple[int, int]:
        """Returns how many are verified, and how many were made."""
        there = min(self.count, most)
        if self.oracle:
            return int(text.right[place, :most].cumprod().sum()), most
        return there, there

    def learn(self, text: Text, place: int, kept: int, accepted: int, step: dict[str, Any]) -> None: ...


@dataclass
class Chosen:
    """``Chooser``; without ``bytes`` it takes a step for what it would be if nothing were missing."""

    most: int
    bytes: bool = True
    chooser: Chooser = field(init=False)

    def __post_init__(self) -> None:
        self.chooser = Chooser(self.most)

    def draft(self, text: Text, place: int, most: int) -> tuple[int, int]:
        chooser = self.chooser
        if not chooser.allows(1):
            return 0, 0
        chances, made = text.chances[place, :most].tolist(), most
        if most and not np.isnan(chances).any():
            made = next((n for n in range(1, most) if not chooser.goes_on([("", chances[:n])])), most)
        kept = chooser.keep("", Drafted(text.drafts[place, :made].tolist(), chances[:made]))
        return kept, made

    def learn(self, text: Text, place: int, kept: int, accepted: int, step: dict[str, Any]) -> None:
        if step["made"]:
            self.chooser.making(step["made"], max(step["drafting"], 1e-6))
        seconds, misses = (step["seconds"], step["misses"]) if self.bytes else (step["computing"], 0)
        self.chooser.took([kept], [1 + accepted], 1, seconds + step["drafting"], step["drafting"], misses)

    def answered(self, text: Text, place: int, accepted: int) -> None:
        most = text.drafts.shape[1]
        said = [int(text.drafts[place, n]) if text.right[place, n] else -7 for n in range(min(most, accepted + 1))]
        self.chooser.answered("", said)


def serve(texts: list[Text], slots: int, machine: Machine, way: Always | Chosen, rounds: int) -> Served:
    """Serves the texts ``rounds`` times, one after another, and counts the last one."""
    draw, served = random.Random(0), Served()
    for _ in range(rounds):
        served = Served()
        for text in texts:
            held = Slots(text.layers, slots)
            place = kept = made = 0
            while place < len(text.right):
                if machine.read:
                    held.read(text.named[place, :made], int(machine.drafting * made / machine.read))
                misses = held.take(text.experts[place, : 1 + kept])
                accepted = int(text.right[place, :kept].cumprod().sum())
                computing = text.layers * (1 + machine.row * (1 + kept))
                exact = computing + machine.miss * misses
                slow = draw.lognormvariate(0, machine.noise)
                if isinstance(way, Chosen):
                    way.answered(text, place, accepted)
                after, made, behind = place + 1 + accepted, 0, 0
                if after < len(text.right):
                    behind, made = way.draft(text, after, int((text.drafts[after] >= 0).sum()))
                step = {
                    "seconds": exact * slow, "computing": computing * slow, "misses": misses, "made": made,
                    "drafting": machine.drafting * made,
                }  # fmt: skip
                way.learn(text, place, kept, accepted, step)
                if place:  # the first one meets slots that nothing chose
                    served.seconds += exact + step["drafting"]
                    served.tokens, served.steps = served.tokens + 1 + accepted, served.steps + 1
                    served.rows += 1 + kept
                place, kept = after, behind
    return served


def texts_of(path: Path) -> dict[str, list[Text]]:
    """Drafter -> texts of a file of ``fit.py chains``."""
    tensors = load_file(path)
    names = sorted({name.split(".")[1] for name in tensors})
    count = 1 + max(int(name.split(".")[0]) for name in tensors)
    return {
        name: [Text(*(tensors[f"{number}.{name}.{part}"] for part in Text._fields)) for number in range(count)]
        for name in names
    }


def misses_at_once(real: Proportions, cpu: bool) -> float:
    """Layers that a missing expert takes: over the link, or over it and on the CPU side by side."""
    return 1 / (1 / real.load + 1 / real.cpu) if cpu else real.load


def points(machines: list[str], shares: list[float]) -> Iterator[tuple[str, float, float, float]]:
    """Yields the name of a machine, the layers that a missing expert and a read take there, and a share of slots."""
    for name in machines:
        for cpu in (True, False):
            for share in shares:
                where = f"{name}{' + CPU experts' if cpu else ''}"
                real = Proportions.of(name)
                yield where, misses_at_once(real, cpu), real.load, share


@app.main
def main(
    chains: Annotated[Path, typer.Argument(help="File of fit.py chains.", exists=True, dir_okay=False)],
    machines: Annotated[str, typer.Option(help="Of scaled/run.py.")] = "rtx4090-int4,rtx4090",
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "25,50",
    row: Annotated[float, typer.Option(min=0, help="Layers that a row takes beside the first.")] = 0.03,
    noise: Annotated[float, typer.Option(min=0, help="Standard deviation of the logarithm of a step's time.")] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all texts are served; the last one counts.")] = 2,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "real_drafts.json",
) -> None:
    known, rows = texts_of(chains), []
    experts, most = 64, next(iter(known.values()))[0].drafts.shape[1]
    every = list(points(machines.split(","), [float(share) for share in shares.split(",")]))
    for name, texts in known.items():
        own = name.removeprefix(SELF) if name.startswith(SELF) else ""
        for where, miss, load, share in track(every, name):
            if own and share != float(own):
                continue
            machine = Machine(miss, row, texts[0].layers if own else DRAFTING[name], noise, load if own else 0.0)
            ways: dict[str, Always | Chosen] = {str(count): Always(count) for count in range(most + 1)}
            ways |= {"chosen": Chosen(most), "rows only": Chosen(most, bytes=False)}
            ways["oracle"] = Always(most, oracle=True)
            slots = round(experts * share / 100)
            found = {way: serve(texts, slots, machine, how, rounds).plain() for way, how in ways.items()}
            none = found["0"]["seconds"]
            gain = {way: none / each["seconds"] for way, each in found.items()}
            best = max(range(most + 1), key=lambda count: gain[str(count)])
            rows.append(
                {"drafter": name, "machine": where, "share_percent": share, "gain": gain, "best_fixed": best}
                | {"chosen": found["chosen"], "at_best": found[str(best)], "at_four": found[str(most)]}
            )
    origin = {"chains": chains.name, "sha256": sha256(chains)}
    facts = {"label": "calculated", "row": row, "noise": noise, "rounds": rounds, "drafting": DRAFTING}
    write_result(output, facts | origin | {"rows": rows, "provenance": provenance()})
    columns = "share_percent", "best_fixed", f"gain.{most}", "gain.rows only", "gain.chosen", "gain.oracle"
    show("times the tokens/s of no drafts, calculated", rows, "drafter", "machine", *columns)


if __name__ == "__main__":
    app()
