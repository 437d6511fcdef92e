"""What drafts bring, by their drafter's cost and strength, with and without the CPU's share and a budget. CALCULATED.

    python benchmarks/real/fit/chains.py --dense .cache/real/dense --output .cache/real/chains.safetensors
    python benchmarks/papers/drafts_account.py .cache/real/chains.safetensors

Recorded is what each drafter of the carved model drafts behind every token of what that says, and the experts of each
draft. A way to choose makes steps of it, which the serving code replays on a virtual clock, over pointers
(``vllm_spac/tools/traces``): decode alone, one request at a time, experts of Qwen3-30B-A3B's size, costs of a profile
in proportion to the layers. A draft takes its drafter's weights once over fast memory, and the launches of its layers.

Drafters: n-grams; the head as it is; *a strong head*, ASSUMED: it drafts what the dense parent does, up to ``STRONG``
drafts, which is what published heads bring, at a head's cost; the parent at its own cost. Ways: always 4 drafts; those
that the chooser of serving keeps, knowing nothing in advance; n-grams or the head's as ``lookups`` of serving decides.
Then the head's first draft is always made, since its own keys have to go on. A budget cuts each layer of a step to the
B experts that most rows selected, and replaces the others: LOSSY, and the drafts that the budgeted model would accept
are taken for the exact model's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from benchmarks.common import RESULTS, Script, progress, provenance, sha256, show, write_result
from benchmarks.papers.drafters import FREE, HEAD, PARENT, Drafter
from benchmarks.papers.five_papers import BUDGETS, budgeted, cut
from benchmarks.real.fit import chains
from benchmarks.scaled.proportions import EXPERT_PARAMETERS, LAYERS
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.guard.chooser import Chooser, Drafted
from vllm_spac.decisions.guard.lookups import Lookups
from vllm_spac.recording.trace_file import ACCEPTED, DRAFT, REJECTED, ROW_KINDS, STEP_KINDS, Trace, TraceFacts
from vllm_spac.tools.traces.simulation import simulate

STRONG = 3  # drafts of the parent that a strong head is assumed to make
FORMATS = {"bf16": 16.0, "int4": 4.5}  # bits of a weight, scales included
POINTS = (  # formats of experts, their share in slots, whether rates are those that a machine attains, or data sheets
    ("int4", 0.25, True),
    ("int4", 0.5, True),
    ("bf16", 0.25, True),
    ("bf16", 0.5, True),
    ("int4", 0.25, False),
)
PLACES = 64  # of each text, behind which chains are served
app = Script(__doc__)


DRAFTERS = {
    "n-grams": Drafter("ngram", FREE),
    "head": Drafter("eagle3", HEAD),
    "head, chosen": Drafter("eagle3", HEAD, chosen=True),
    "n-grams, else head": Drafter("eagle3", HEAD, before="ngram"),
    "n-grams, else head, chosen": Drafter("eagle3", HEAD, before="ngram", chosen=True),
    "strong head": Drafter("dense", HEAD, most=STRONG),
    "strong head, chosen": Drafter("dense", HEAD, most=STRONG, chosen=True),
    "n-grams, else strong head, chosen": Drafter("dense", HEAD, most=STRONG, before="ngram", chosen=True),
    "parent": Drafter("dense", PARENT),
}
LOSSY = {  # that also run with budgets; B = 24 cuts next to nothing of as few rows as are chosen
    "head": BUDGETS,
    "head, chosen": BUDGETS[1:],
    "n-grams, else head, chosen": BUDGETS[1:],
    "strong head": BUDGETS,
    "strong head, chosen": BUDGETS[1:],
    "parent": BUDGETS,
}
EXPERTS = 64


class Text(NamedTuple):
    """Chains of one drafter behind each place of a text; arrays as of ``chains.Chains``."""

    drafts: np.ndarray
    chances: np.ndarray
    right: np.ndarray
    experts: np.ndarray

    def length(self, place: int) -> int:
        """Returns how many drafts there are behind ``place``."""
        return int((self.drafts[place] >= 0).cumprod().sum())


class Step(NamedTuple):
    """A step of a text: which drafter's chain, how many drafts of it were verified, accepted and made."""

    text: Text
    place: int
    kept: int
    accepted: int
    made: int


class Machine(NamedTuple):
    """A machine: a profile, an expert's format, and whether its peaks or what it attains of them."""

    profile: str
    format: str
    attained: bool

    @property
    def name(self) -> str:
        return f"{self.profile}, {self.format}{', attained' if self.attained else ''}"

    @property
    def expert_bytes(self) -> int:
        return int(EXPERT_PARAMETERS * FORMATS[self.format] / 8)

    def costs(self, layers: int) -> Costs:
        """Returns the costs of a model of ``layers`` layers, in proportion, with nothing for drafts."""
        known = Costs.read(self.profile)
        known = (known.as_attained() if self.attained else known).with_experts(self.format)
        other = (known.other + known.vllm.step + known.host_work.step) * layers / LAYERS + layers * known.vllm.layer
        return known.model_copy(update={"other": other, "draft": 0.0})


class _Slots:
    """LRU slots of each layer, of which a chooser learns what drafts cost."""

    def __init__(self, layers: int, count: int) -> None:
        self._count = count
        self._held = [OrderedDict.fromkeys(range(count)) for _ in range(layers)]

    def take(self, experts: np.ndarray) -> int:
        """Gives slots to the experts of a step, [rows, layers, top_k]; returns how many had none."""
        missed = 0
        for layer, held in enumerate(self._held):
            for expert in dict.fromkeys(experts[:, layer].ravel().tolist()):
                missed += expert not in held
                held[expert] = None
                held.move_to_end(expert)
            while len(held) > self._count:
                held.popitem(last=False)
        return missed


class Steps:
    """Decides the steps of all texts, one after another, as serving would.

    Args:
        seconds: of a step without misses, of a row more, of a miss, and of a draft.
        budget: experts of each layer; 0: exact.
    """

    def __init__(
        self, drafter: Drafter, slots: int, seconds: tuple[float, float, float, float], budget: int = 0
    ) -> None:
        self._drafter, self._slots, self._seconds, self._budget = drafter, slots, seconds, budget
        self._chooser = Chooser(drafter.most, Lookups())

    def of(self, known: dict[str, list[Text]]) -> Iterator[Step]:
        """Yields the steps; ``known``: the chains of each drafter, by text."""
        behind = known[self._drafter.chains]
        first = known[self._drafter.before] if self._drafter.before else behind
        for number, each in enumerate(zip(first, behind, strict=True)):
            yield from self._of(number, *each)

    def _of(self, number: int, before: Text, behind: Text) -> Iterator[Step]:
        place, request = 0, str(number)
        held, chooser = _Slots(behind.experts.shape[2], self._slots), self._chooser
        lookups = chooser.lookups
        assert lookups is not None
        while place < len(behind.right):
            found = [] if before is behind else before.drafts[place, : before.length(place)].tolist()
            looked = lookups.chooses(request, found, int(behind.drafts[place, 0]))
            text = before if looked else behind
            length = min(len(found) if looked else self._drafter.most, text.length(place))
            kept, made = self._kept(text, place, length, request, looked)
            accepted = int(text.right[place, :kept].cumprod().sum())
            step = Step(text, place, kept, accepted, made)
            chooser.observe_tokens(request, said(step, (before, behind)))
            if self._drafter.chosen:
                self._learn(held, step)
            yield step
            place += 1 + accepted
        chooser.remove([request])

    def _kept(self, text: Text, place: int, length: int, request: str, looked: bool) -> tuple[int, int]:
        """Returns how many drafts are verified, and how many the drafter made."""
        chooser = self._chooser
        if not self._drafter.chosen:
            return length, 1 if looked else length
        if not chooser.allows(1):
            return 0, 0
        chances, made = text.chances[place, :length].tolist(), length
        if length and not np.isnan(chances).any():
            made = next((n for n in range(1, length) if not chooser.goes_on([(request, chances[:n])])), length)
        kept = chooser.keep(request, Drafted(text.drafts[place, :made].tolist(), chances[:made]), looked)
        return kept, 1 if looked else made

    def _learn(self, held: _Slots, taken: Step) -> None:
        chooser, (step, row, miss, draft) = self._chooser, self._seconds
        text, place, kept, accepted, made = taken
        experts = text.experts[place, : 1 + kept]
        if self._budget:
            layers = range(experts.shape[1])
            experts = np.stack([cut(experts[:, layer], EXPERTS, self._budget) for layer in layers], axis=1)
        misses, drafting = held.take(experts), made * draft
        if made:
            chooser.observe_drafter(made, max(drafting, 1e-9))
        chooser.end_step([kept], [1 + accepted], 1, step + kept * row + misses * miss + drafting, drafting, misses)


def said(step: Step, texts: Sequence[Text]) -> list[int]:
    """Returns the tokens that a step emits, as far as any of these chains has them right; else -7."""

    def token(depth: int) -> int:
        known = (text.drafts[step.place, depth] for text in texts if text.right[step.place, depth])
        return int(next(known, -7))

    return [token(depth) for depth in range(min(1 + step.accepted, step.text.drafts.shape[1]))]


def traced(steps: Sequence[Step], facts: TraceFacts) -> Trace:
    """Returns the routing trace of these steps, of one request."""
    rows = [1 + step.kept for step in steps]
    kinds, accepted, ids = list[int](), list[int](), list[np.ndarray]()
    for step in steps:
        kinds += [ROW_KINDS.index("verify" if step.kept else "decode")] + [DRAFT] * step.kept
        accepted += [ACCEPTED] * (1 + step.accepted) + [REJECTED] * (step.kept - step.accepted)
        ids.append(step.text.experts[step.place, : 1 + step.kept].transpose(1, 0, 2).reshape(-1, facts.top_k))
    kind = np.array(kinds, dtype=np.uint8)
    names = [STEP_KINDS.index("verify" if step.kept else "decode") for step in steps]
    return Trace.of(
        facts,
        step_kind=np.array(names, dtype=np.uint8),
        step_rows=np.array(rows, dtype=np.uint32),
        step_tokens=np.array([1 + step.accepted for step in steps], dtype=np.uint32),
        row_kind=kind,
        row_back=(kind == DRAFT).astype(np.uint8),
        row_accepted=np.array(accepted, dtype=np.uint8),
        record_step=np.repeat(np.arange(len(steps), dtype=np.uint32), facts.layers),
        record_layer=np.tile(np.arange(facts.layers, dtype=np.uint16), len(steps)),
        ids=np.concatenate(ids),
    )


_known: dict[str, list[Text]] = {}  # of this process


def _load(path: Path) -> None:
    torch.set_num_threads(1)
    for name, texts in chains.read(path).items():
        _known[name] = [Text(*(tensor[:PLACES].numpy() for tensor in each)) for each in texts]


def rows_of(machine: Machine, share: float, cpu: bool, name: str, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the rows of a drafter, or of none (``name`` is empty), for each budget; 0: exact."""
    experts = _known["eagle3"][0].experts
    facts = TraceFacts(experts.shape[2], EXPERTS, experts.shape[3], machine.expert_bytes, "carved")
    costs, slots = machine.costs(facts.layers), round(share * facts.total)
    drafter = DRAFTERS.get(name, Drafter("eagle3", FREE, most=0))
    rates, drafting = costs.rates(machine.expert_bytes), drafter.cost.seconds(costs) * facts.layers / LAYERS
    miss = 1 / (1 / rates.stream + 1 / rates.cpu) if cpu else rates.stream
    seconds = costs.other + facts.layers * facts.top_k * rates.fast, facts.top_k * rates.fast, miss, drafting
    found = []
    for budget in budgets:
        steps = [*Steps(drafter, slots // facts.layers, seconds, budget).of(_known)]
        exact = traced(steps, facts)
        tokens, made = int(exact.step_tokens.sum()), sum(step.made for step in steps)
        trace = budgeted(exact, budget) if budget else exact
        balancer = "waterfill" if cpu else "none"
        outcome = simulate(trace, slots, costs, execution="pointers", policy="reuse", balancer=balancer)
        found.append(
            {
                "machine": machine.name,
                "slots": share,
                "cpu": cpu,
                "drafter": name or "none",
                "seconds_per_draft": drafting,
                "tokens_per_step": tokens / exact.steps,
                "rows_per_step": float(exact.step_rows.mean()),
                "budget": budget or None,
                "hit_rate": outcome.hit_rate,
                "tokens_per_s": tokens / (outcome.seconds + made * drafting),
            }
        )
    return found


@app.main
def main(
    recorded: Annotated[Path, typer.Argument(help="File of fit/chains.py.", exists=True, dir_okay=False)],
    profile: Annotated[str, typer.Option(help="Of the machine.")] = "rtx4090",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "drafts_account.json",
) -> None:
    known = [(Machine(profile, form, attained), share) for form, share, attained in POINTS]
    points = [(*each, cpu) for each, cpu in product(known, (False, True))]
    cases = [(*point, name, [0, *LOSSY.get(name, ())]) for point in points for name in ("", *DRAFTERS)]
    rows: list[dict[str, Any]] = []
    pool = ProcessPoolExecutor(2, get_context("spawn"), _load, (recorded,))
    with pool, progress() as bar:
        task = bar.add_task("replaying", total=len(cases))
        for found in pool.map(rows_of, *zip(*cases, strict=True)):
            rows += found
            bar.advance(task)
    none = {(row["machine"], row["slots"], row["cpu"]): row for row in rows if row["drafter"] == "none"}
    for row in rows:
        row["over_no_drafts"] = row["tokens_per_s"] / none[row["machine"], row["slots"], row["cpu"]]["tokens_per_s"]
        row["over_no_drafts_no_cpu"] = row["tokens_per_s"] / none[row["machine"], row["slots"], False]["tokens_per_s"]
    how = {"how": "calculated", "chains": {"sha256": sha256(recorded), "texts": len(chains.read(recorded)["ngram"])}}
    write_result(output, {"provenance": provenance()} | how | {"rows": rows})
    show("calculated", rows, "machine", "slots", "cpu", "drafter", "budget", "tokens_per_s", "over_no_drafts")


if __name__ == "__main__":
    app()
