"""MoE-Spec with every expert in fast memory, on the carved model: table 1, figures 5 to 7, tasks. Nothing is timed.

    python benchmarks/papers/moe_spec_resident.py

Computed in torch from the model's artefact, greedily, in bfloat16 (float32 where a CPU has none). A prompt and its
context are never budgeted.

- trees: answers to held-out prompts of several kinds of text. In each step a drafter, the EAGLE-3 head or the dense
  parent, grows a tree; the model verifies it with each layer's experts cut to a budget, and its keys stay as they
  are, as in serving. Counted are emitted tokens per step, and distinct experts per layer. CALCULATED from these: the
  time of a step that costs what its experts' bytes cost, with Qwen3-30B-A3B's experts and layers.
- texts: held-out texts in windows of the rows of such a step, read under each ranking and budget: perplexity, KL,
  first choices, and words that are guessed whole (cloze).
- choices: which of four continuations of a context is the likeliest; all four are branches of one budgeted tree.
- layers: error of a layer's output if experts are left out (figure 6), on the model's own streams.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer
from torch import Tensor
from vllm_spac.kernels.reference.shortlist import selected_first, shortlist, sorted_by

from benchmarks.common import RESULTS, ROOT, Script, provenance, show, write_result
from benchmarks.real import artefact, held
from benchmarks.real.fit.carve import CarvedLayer, weights_of
from benchmarks.real.fit.eagle import DEPTHS, Eagle
from benchmarks.real.fit.llama import COMPUTE, Llama, normed, rotated
from benchmarks.scaled.proportions import EXPERT_PARAMETERS, LAYERS
from vllm_spac.config.tree_shape import DynamicShape
from vllm_spac.decisions.costs import Costs
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking
from vllm_spac.methods.moe_spec.router_ranking import Router
from vllm_spac.methods.moe_spec.selected_ranking import Selected
from vllm_spac.methods.moe_spec.static_ranking import Static
from vllm_spac.methods.trees.levels import Chosen, Growth
from vllm_spac.tools.evaluation.scoring import Scores

MODELS = ROOT / ".cache" / "real"
KINDS = ("code", "chat", "handbook", "prose")
NODES, PROMPT, CONTEXT, CHOICE = 63, 64, 64, 16
ROWS = 1 + NODES
BUDGETS = (48, 32, 24, 16)
HEAD_BYTES = 2 * 145_000_000  # of Qwen3-30B-A3B's EAGLE-3 head with 32,000 output rows: read once per level of a tree
PAPER = {"tokens": 2.86, "speed": 1.74}  # its table 1, EAGLE-3 on Qwen3-30B-A3B at temperature 0, mean of five tasks
app = Script(__doc__)


class Arm(NamedTuple):
    """What verify steps are cut to; without a budget, to nothing."""

    ranking: str = "exact"
    budget: int = 0
    coverage: str = "substitution"


EXACT = Arm()


class Target:
    """The carved model, whose routed experts are cut as ``arm`` says while it is set, and counted.

    Attributes:
        rows: of a step; longer inputs are several steps, of as many rows each.
        layers, distinct, dropped: of all steps since ``reset``: layers, experts that rows used, and the share of the
            routing weights that was outside.
        mass: float64 [N], the share of the routers' scores that the best 1 .. N experts of a layer had, summed.
    """

    def __init__(self) -> None:
        self.model = Llama(MODELS / "dense")
        found = artefact.load(artefact.PATH)["target"]
        pairs = zip(self.model.layers, found.layers, strict=True)
        self.carved = [CarvedLayer(layer, experts, found.numbers["top_k"]) for layer, experts in pairs]
        self.experts, self.rows = len(found.layers[0].router), ROWS
        self._holders = [each._holders.to(COMPUTE) for each in self.carved]
        self.arm: Arm | None = None
        self.counts = torch.zeros(len(self.carved), self.experts, dtype=torch.long)  # of the calibration
        self.watch: Callable[[int, Tensor, Tensor, Tensor], None] | None = None  # sees layers: h, logits and weights
        self.reset()

    def reset(self) -> None:
        self.layers, self.distinct, self.dropped = 0, 0, 0.0
        self.mass = torch.zeros(self.experts, dtype=torch.float64)

    def ffn(self, number: int, h: Tensor) -> Tensor:
        layer = self.carved[number]

        def choice(logits: Tensor, top_k: int) -> Tensor:
            if self.arm is None and self.watch is None:
                return weights_of(logits, top_k)
            parts = zip(h[0].split(self.rows), logits[0].split(self.rows), strict=True)
            return torch.cat([self._cut(number, *part, top_k) for part in parts])[None]

        return layer.output(layer.neurons(h, choice)[0])

    def _cut(self, number: int, h: Tensor, logits: Tensor, top_k: int) -> Tensor:
        """Weights of one step's rows, float32 [rows, N]."""
        natural, arm = weights_of(logits, top_k), self.arm
        if self.watch is not None:
            self.watch(number, h, logits, natural)
        if arm is None:
            return natural
        selected = (natural > 0).any(0)
        inside, weights = selected, natural
        if arm.budget:
            inside = self.inside(number, arm, h, logits, natural)
            kept = logits.masked_fill(~inside, -torch.inf)
            weights = weights_of(kept, top_k) if arm.coverage == "substitution" else natural * inside
        self.layers += 1
        self.distinct += int((weights > 0).any(0).sum())
        self.dropped += float(1 - (natural * inside).sum() / natural.sum())
        scores = logits.double().softmax(-1).sum(0).sort(descending=True).values.cumsum(0)
        self.mass += scores / scores[-1]
        return weights

    def inside(self, number: int, arm: Arm, h: Tensor, logits: Tensor, natural: Tensor) -> Tensor:
        """The shortlist of a layer, bool [N], as serving makes it."""
        if arm.ranking == "oracle":
            order = least_residual(self.gram(number, h, natural), arm.budget)
            return torch.zeros(self.experts, dtype=torch.bool).index_fill(0, order, True)
        context = LayerContext(layer=number, ids=logits.topk(self.carved[number].top_k).indices)
        scores = self.ranking(arm.ranking).scores(logits.softmax(-1).double(), context)
        return shortlist(scores, (natural > 0).any(0), torch.tensor(arm.budget))[0]

    def ranking(self, name: str) -> Ranking:
        return {"router": Router, "selected": Selected}[name]() if name != "static" else Static(counts=self.counts)

    def gram(self, number: int, h: Tensor, natural: Tensor) -> Tensor:
        """Inner products of the experts' contributions to all rows, float32 [N, N] (Eq. 6, with mixing weights)."""
        layer = self.carved[number]
        active = F.silu(F.linear(h, layer._layer.gate)) * F.linear(h, layer._layer.up)
        row, expert = natural.nonzero(as_tuple=True)
        parts = layer.output((active[row] * self._holders[number][expert]).float()).float()
        vectors = torch.zeros(self.experts, len(h), parts.shape[1])
        vectors[expert, row] = parts * natural[row, expert, None]
        return vectors.flatten(1) @ vectors.flatten(1).T

    def read(self, ids: Tensor, arm: Arm | None) -> Tensor:
        """Logits behind each token of a text [tokens], float32 [tokens, V]."""
        self.arm = arm
        logits = self.model.logits(self.model.hidden(ids[None], self.ffn)[0])
        self.arm = None
        return logits

    def calibrate(self, texts: Sequence[Tensor]) -> None:
        """Counts selections for ``static`` (Eq. 4)."""

        def count(number: int, h: Tensor, logits: Tensor, natural: Tensor) -> None:
            self.counts[number] += (natural > 0).sum(0)

        self.watch = count
        for ids in texts:
            self.read(ids, None)
        self.watch = None


def least_residual(gram: Tensor, budget: int) -> Tensor:
    """Greedy choice of the vectors whose sum is closest to the sum of all, from inner products alone (Eq. 6).

    Each step adds the i with the smallest ||o - sum_{j in S + i} v_j||^2, that is with the largest
    2 <o, v_i> - <v_i, v_i> - 2 sum_{j in S} <v_i, v_j>: O(N) per step.

    Args:
        gram: float [N, N], <v_i, v_j>.

    Returns:
        int64 [budget], in the order of the steps, ties by the lowest id.
    """
    inner = gram.double()
    gain, order = 2 * inner.sum(1) - inner.diagonal(), []
    for _ in range(budget):
        order.append(int(gain.argmax()))
        gain -= 2 * inner[order[-1]]
        gain[order[-1]] = -torch.inf
    return torch.tensor(order)


class Reader:
    """Keys and values of what a model has read, and rows that follow, of which each sees what a mask says."""

    def __init__(self, model: Llama, ffn: Callable[[int, Tensor], Tensor]) -> None:
        self._model, self._ffn, self._rotations = model, ffn, model.rotations(512)
        empty = torch.zeros(model.shape.kv_heads, 0, model.shape.head, dtype=COMPUTE)
        self._keys, self._values = [empty] * model.shape.layers, [empty] * model.shape.layers

    @property
    def length(self) -> int:
        return self._keys[0].shape[1]

    def read(self, ids: Tensor, places: Tensor | None = None, sees: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Reads rows [n].

        Args:
            places: positions, int64 [n]; by default behind what was read, one after the other.
            sees: bool [n, m], which of the last m rows, these included, each row sees, beside all before them; by
                default those up to itself.

        Returns:
            The residual stream after the last layer [n, hidden], and those that an EAGLE-3 head reads [n, 3, hidden].
        """
        model, shape, count = self._model, self._model.shape, len(ids)
        places = self.length + torch.arange(count) if places is None else places
        sees = torch.ones(count, count, dtype=torch.bool).tril() if sees is None else sees
        mask = F.pad(sees, (self.length + count - sees.shape[1], 0), value=True)
        cos, sin = (table[places] for table in self._rotations)
        x, streams = F.embedding(ids, model.embedding)[None], []
        for number, layer in enumerate(model.layers):
            if number in DEPTHS:
                streams.append(x[0])
            heads = F.linear(normed(x, layer.attention_norm, shape.epsilon), layer.qkv)
            q, k, v = (
                heads.view(count, -1, shape.head).transpose(0, 1).split([shape.heads, shape.kv_heads, shape.kv_heads])
            )
            self._keys[number] = torch.cat([self._keys[number], rotated(k, cos, sin)], 1)
            self._values[number] = torch.cat([self._values[number], v], 1)
            mixed = F.scaled_dot_product_attention(
                rotated(q, cos, sin)[None],
                self._keys[number][None],
                self._values[number][None],
                attn_mask=mask[None, None],
                enable_gqa=True,
            )
            x = x + F.linear(mixed[0].transpose(0, 1).flatten(1)[None], layer.o)
            x = x + self._ffn(number, model.ffn_input(number, x))
        return x[0], torch.stack([*streams, x[0]], 1)

    def keep(self, places: Tensor) -> None:
        """Forgets all but ``places``, int64, of what was read."""
        self._keys = [each[:, places] for each in self._keys]
        self._values = [each[:, places] for each in self._values]


# -- trees -------------------------------------------------------------------------------------------------------------

Level = Callable[[Tensor, Tensor, int, Tensor], Tensor]
"""(tokens [F], parent [F] in the level before, level, sees [F, drafted so far]) -> logits [F, V]."""


def grown(shape: DynamicShape, logits: Tensor, level: Level) -> Chosen:
    """A tree behind the last token, whose next token has ``logits`` [V]."""
    growth, sees = Growth(shape, logits.log_softmax(-1)[None]), torch.zeros(1, 0, dtype=torch.bool)
    while not growth.over:
        tokens, parent = growth.tokens[0], growth.parent[0]
        sees = torch.cat([sees[parent], torch.eye(len(tokens), dtype=torch.bool)], 1)
        growth.add(level(tokens, parent, growth.level, sees).log_softmax(-1)[None])
    return growth.chosen()


class ByHead:
    """Grows trees with the EAGLE-3 head."""

    def __init__(self, target: Target) -> None:
        self._model = target.model
        self._head = Eagle.of(self._model, artefact.load_head().weights, artefact.load_vocabulary())

    def tree(self, shape: DynamicShape, ids: Tensor, streams: Tensor) -> Chosen:
        head, model = self._head, self._model
        every = torch.arange(len(ids) - 1)
        x, q, keys, values = head.begun(F.embedding(ids[None, 1:], model.embedding), head.read(streams[None]), every)
        x = head.finished(x, F.scaled_dot_product_attention(q, keys, values, is_causal=True))[:, -1:]

        def level(tokens: Tensor, parent: Tensor, number: int, sees: Tensor) -> Tensor:
            nonlocal x, keys, values
            rows = torch.full_like(tokens, len(every) - 1 + number)
            x, q, k, v = head.begun(F.embedding(tokens[None], model.embedding), head.left(x[:, parent]), rows)
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            mask = F.pad(sees, (len(every), 0), value=True)[None, None]
            x = head.finished(x, F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))
            return self._logits(x)[0]

        return grown(shape, self._logits(x)[0, 0], level)

    def _logits(self, x: Tensor) -> Tensor:
        """Of all tokens, float32 [..., V]; -inf of those that the head does not draft."""
        drafted = self._head.logits(x)
        every = drafted.new_full((*x.shape[:-1], len(self._model.embedding)), -torch.inf)
        return every.index_copy(-1, self._head.vocabulary, drafted)


class ByParent:
    """Grows trees with the dense parent."""

    def __init__(self, target: Target) -> None:
        self._model, self._reader = target.model, Reader(target.model, target.model.ffn)

    def tree(self, shape: DynamicShape, ids: Tensor, streams: Tensor) -> Chosen:
        reader, model = self._reader, self._model

        def level(tokens: Tensor, parent: Tensor, number: int, sees: Tensor) -> Tensor:
            places = torch.full_like(tokens, len(ids) - 1 + number)
            return model.logits(reader.read(tokens, places, sees)[0])

        found = grown(shape, model.logits(reader.read(ids[reader.length :])[0][-1]), level)
        reader.keep(torch.arange(len(ids)))
        return found


DRAFTERS: dict[str, type[ByHead] | type[ByParent]] = {"eagle3": ByHead, "dense": ByParent}


def lineage(parents: Tensor) -> Tensor:
    """bool [n, n]: which rows each row of a tree follows, itself included; parents int64 [n], before their children."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for row in range(1, len(parents)):
        sees[row] |= sees[parents[row]]
    return sees


class Answer(NamedTuple):
    """A prompt of ``begun`` tokens and what was said to it, in how many steps.

    Attributes:
        layers, distinct, dropped, mass: those of ``Target``.
        first: tokens that are the exact model's first choice behind the text so far.
        loss: the exact model's, summed.
    """

    ids: Tensor
    begun: int
    steps: int
    layers: int
    distinct: int
    dropped: float
    mass: Tensor
    first: int
    loss: float


def answered(target: Target, drafter: str, prompt: Tensor, tokens: int, arm: Arm) -> Answer:
    """Says at least ``tokens`` tokens behind ``prompt`` [tokens], with one tree per step."""
    shape, model = DynamicShape(NODES), target.model
    reader, drafts, ids, steps = Reader(model, target.ffn), DRAFTERS[drafter](target), prompt, 0
    streams = reader.read(prompt[:-1])[1]
    target.reset()
    while len(ids) < len(prompt) + tokens:
        tree, base = drafts.tree(shape, ids, streams), reader.length
        sees = lineage(tree.parents[0])
        rows, places = torch.cat([ids[-1:], tree.tokens[0]]), base + sees.sum(1) - 1
        target.arm = arm
        x, read = reader.read(rows, places, sees)
        target.arm = None
        best, path, said = model.logits(x).argmax(-1), [0], []
        while True:
            said.append(best[path[-1]])
            child = ((tree.parents[0] == path[-1]) & (rows == said[-1])).nonzero()
            if not len(child):
                break
            path.append(int(child[0, 0]))
        kept = torch.tensor(path)
        reader.keep(torch.cat([torch.arange(base), base + kept]))
        ids, streams, steps = torch.cat([ids, torch.stack(said)]), torch.cat([streams, read[kept]]), steps + 1
    logits, answer = target.read(ids, None)[len(prompt) - 1 : -1], ids[len(prompt) :]
    counted = target.layers, target.distinct, target.dropped, target.mass.clone()
    loss = -float(logits.log_softmax(-1).gather(1, answer[:, None]).sum())
    return Answer(ids, len(prompt), steps, *counted, int((logits.argmax(-1) == answer).sum()), loss)


def trees(target: Target, prompts: dict[str, list[Tensor]], tokens: int, arms: dict[str, list[Arm]]) -> list[dict]:
    """A row for each drafter, arm and kind of text, and for all kinds."""
    rows = []
    for drafter, mine in arms.items():
        exact: dict[str, list[Answer]] = {}
        for arm in mine:
            found = {
                kind: [answered(target, drafter, prompt, tokens, arm) for prompt in each]
                for kind, each in prompts.items()
            }
            exact = exact or found
            for kind in (*found, "all"):
                answers = found[kind] if kind in found else [one for each in found.values() for one in each]
                base = exact[kind] if kind in exact else [one for each in exact.values() for one in each]
                rows.append({"drafter": drafter, "kind": kind} | arm._asdict() | facts(answers, base))
                print({name: value for name, value in rows[-1].items() if name != "mass"}, file=sys.stderr, flush=True)
    return rows


def facts(answers: list[Answer], exact: list[Answer]) -> dict[str, Any]:
    said, steps = [len(each.ids) - each.begun for each in answers], [each.steps for each in answers]
    mean = sum(said) / sum(steps)
    spread = [emitted - mean * count for emitted, count in zip(said, steps, strict=True)]  # of a ratio of sums
    layers = sum(each.layers for each in answers)
    equal = 0
    for each, other in zip(answers, exact, strict=True):
        length = min(len(each.ids), len(other.ids))
        equal += int((each.ids[each.begun : length] == other.ids[each.begun : length]).cumprod(0).sum())
    return {
        "tokens": sum(said),
        "steps": sum(steps),
        "acceptance_length": mean,
        "acceptance_error": math.sqrt(sum(each**2 for each in spread) * len(said) / max(1, len(said) - 1)) / sum(steps),
        "distinct": sum(each.distinct for each in answers) / layers,
        "dropped": sum(each.dropped for each in answers) / layers,
        "mass": (sum((each.mass for each in answers), torch.zeros(())) / layers).tolist(),
        "first_choices": sum(each.first for each in answers) / sum(said),
        "perplexity": math.exp(sum(each.loss for each in answers) / sum(said)),
        "before_the_first_that_differs": equal / sum(said),
    }


def calculated(rows: list[dict], profiles: Sequence[str], top_k: int) -> list[dict]:
    """Times of steps on machines of ``profiles``, by the bytes of their experts, and speeds over others.

    ``fixed`` is what a step takes beside its experts: by the profile; or so long that the exact tree of the head is as
    fast, over no drafts, as the paper's, at the tokens per step that it reports.
    """
    found = []
    for profile in profiles:
        costs = Costs.read(profile)
        levels, rate = DynamicShape(NODES).depth, costs.fast.bytes_per_second
        seconds = {"expert": LAYERS * 2 * EXPERT_PARAMETERS / rate, "eagle3": levels * HEAD_BYTES / rate}
        seconds["dense"] = levels * costs.draft
        base = next(row for row in rows if (row["drafter"], row["kind"], row["budget"]) == ("eagle3", "all", 0))
        alone = top_k * seconds["expert"]
        whole = base["distinct"] * seconds["expert"] + seconds["eagle3"]
        fitted = (PAPER["speed"] * whole - PAPER["tokens"] * alone) / (PAPER["tokens"] - PAPER["speed"])
        for name, fixed in (("profile", costs.other), ("paper", fitted)):
            for row in rows:
                exact = next(
                    each
                    for each in rows
                    if not each["budget"] and all(each[of] == row[of] for of in ("drafter", "kind"))
                )
                step, other = (
                    fixed + seconds[row["drafter"]] + each["distinct"] * seconds["expert"] for each in (row, exact)
                )
                over_none = row["acceptance_length"] * (fixed + alone) / step
                of = {each: row[each] for each in ("drafter", "kind", "ranking", "budget")}
                found.append(
                    {"machine": profile, "fixed": name, "fixed_ms": 1e3 * fixed}
                    | of
                    | {
                        "step_ms": 1e3 * step,
                        "none_ms": 1e3 * (fixed + alone),
                        "over_none": over_none,
                        "over_exact": row["acceptance_length"] / exact["acceptance_length"] * other / step,
                    }
                )
    return found


# -- texts, choices, layers --------------------------------------------------------------------------------------------


def windows(side: str, count: int, length: int) -> dict[str, list[Tensor]]:
    """Kind of text -> ``count`` windows of ``length`` tokens; ``side``: fit or held."""
    return {
        kind: [torch.from_numpy(ids[place * (len(ids) - length) // count :][:length]).long() for place in range(count)]
        for kind, ids in held.texts(held.beside(MODELS / "dense"), side).items()
        if kind in KINDS
    }


def branches(ids: Tensor) -> Tensor:
    """Four continuations of a text's first ``CONTEXT`` tokens, [4, CHOICE]; the first one is what follows."""
    return torch.stack([ids[CONTEXT * each :][:CHOICE] for each in (1, 2, 3, 4)])


def words(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last place of each whole word of a text behind its first ``PROMPT`` tokens."""
    pieces = [tokenizer.id_to_token(each) or "" for each in ids]
    first = [piece[:1] == "Ġ" and piece[1:].isalpha() for piece in pieces]  # Ġ, a space, is itself a letter to Python
    more = [piece.isalpha() and piece[:1] != "Ġ" for piece in pieces]
    for begin in (place for place, yes in enumerate(first) if yes):
        end = next((place for place in range(begin + 1, len(pieces)) if not more[place]), len(pieces))
        if begin >= PROMPT and end < len(pieces):
            yield begin, end - 1


def change(ours: Sequence[bool], exact: Sequence[bool]) -> dict[str, float]:
    """Share of tasks that are right, its difference from exact and the standard error of that, in pairs."""
    gaps = torch.tensor(ours, dtype=torch.float64) - torch.tensor(exact, dtype=torch.float64)
    return {
        "right": sum(ours) / len(ours),
        "change": float(gaps.mean()),
        "change_error": float(gaps.std() / math.sqrt(len(gaps))),
    }


def read_texts(target: Target, texts: dict[str, list[Tensor]], arms: Sequence[Arm], tokenizer: Tokenizer) -> list[dict]:
    """A row for each arm: scores over all texts, and words that are guessed whole."""
    every = [ids for each in texts.values() for ids in each]
    exact = [target.read(ids, None) for ids in every]
    whole = [list(words(tokenizer, ids.tolist())) for ids in every]
    rows, known = [], list[bool]()
    for arm in (EXACT, *arms):
        target.reset()
        scores, guessed = Scores(), list[bool]()
        for ids, reference, mine in zip(every, exact, whole, strict=True):
            logits = target.read(ids, arm)
            scores.add(logits[:-1], reference[:-1], ids[1:])
            hit = (logits[:-1].argmax(-1) == ids[1:]).tolist()
            guessed += [all(hit[begin - 1 : end]) for begin, end in mine]
        known = known or guessed
        counted = {"distinct": target.distinct / target.layers, "dropped": target.dropped / target.layers}
        rows.append(arm._asdict() | scores.snapshot() | counted | {"words": len(known)} | change(guessed, known))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def chosen(target: Target, texts: dict[str, list[Tensor]], arms: Sequence[Arm]) -> list[dict]:
    """A row for each arm: how often the continuation that follows is the likeliest of four from the same text."""
    model, right, layers = target.model, defaultdict[Arm, list[bool]](list), defaultdict[Arm, list[float]](list)
    for ids in (ids for each in texts.values() for ids in each):
        context = ids[:CONTEXT]
        four = branches(ids)
        reader = Reader(model, target.ffn)
        reader.read(context[:-1])
        rows = torch.cat([context[-1:], four[:, :-1].flatten()])
        before = torch.arange(len(rows)) - 1
        before[1 :: CHOICE - 1] = 0
        sees, base = lineage(before), reader.length
        for arm in (EXACT, *arms):
            target.arm = arm
            target.reset()
            logits = model.logits(reader.read(rows, base + sees.sum(1) - 1, sees)[0]).log_softmax(-1)
            target.arm = None
            reader.keep(torch.arange(base))
            behind = torch.cat([logits[:1].expand(4, 1, -1), logits[1:].view(4, CHOICE - 1, -1)], 1)
            likely = behind.gather(2, four[:, :, None])[..., 0].sum(1)
            right[arm].append(int(likely.argmax()) == 0)
            layers[arm].append(target.distinct / target.layers)
    return [
        arm._asdict() | {"tasks": len(each), "distinct": sum(layers[arm]) / len(each)} | change(each, right[EXACT])
        for arm, each in right.items()
    ]


def left_out(target: Target, texts: dict[str, list[Tensor]]) -> dict[str, list[float]]:
    """By ranking: squared error of a layer's routed output over its square, with the best 1 .. N experts (figure 6)."""
    errors = {name: torch.zeros(target.experts) for name in ("oracle", "selected", "router", "static")}
    steps = 0

    def watch(number: int, h: Tensor, logits: Tensor, natural: Tensor) -> None:
        nonlocal steps
        steps += 1
        gram, used = target.gram(number, h, natural), (natural > 0).any(0)
        context = LayerContext(layer=number, ids=logits.topk(target.carved[number].top_k).indices)
        for name, sums in errors.items():
            if name == "oracle":
                order = least_residual(gram, target.experts)
            else:
                order = selected_first(
                    sorted_by(target.ranking(name).scores(logits.softmax(-1).double(), context)), used
                )
            out = torch.ones(target.experts, target.experts).triu(1)[:, order.argsort()]  # a row for each budget
            sums += ((out @ gram) * out).sum(1) / gram.sum()

    target.watch = watch
    for ids in (each[0] for each in texts.values()):
        target.read(ids, None)
    target.watch = None
    return {name: (sums / steps).tolist() for name, sums in errors.items()}


@app.main
def main(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each kind of text.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 48,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each kind, of four steps.")] = 2,
    tasks: Annotated[int, typer.Option(min=2, help="Choices of each kind.")] = 8,
    profiles: Annotated[str, typer.Option(help="Machines that speeds are calculated for.")] = "a100,h100",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "real_moe_spec_resident.json",
) -> None:
    origin, target = provenance(), Target()
    files, tokenizer = held.beside(MODELS / "dense"), Tokenizer.from_file(str(MODELS / "dense" / "tokenizer.json"))

    every, tight = [Arm("router", budget) for budget in BUDGETS], BUDGETS[1:]
    arms = {"eagle3": [EXACT, *every], "dense": [EXACT, Arm("router", 24)]}
    ways = [Arm(name, budget) for name in ("router", "selected", "static") for budget in tight]
    others = [Arm("router", 24, "truncation"), Arm("oracle", 24), Arm("oracle", 24, "truncation")]
    result: dict[str, Any] = {
        "provenance": origin,
        "toy_model": False,
        "experts": target.experts,
        "top_k": target.carved[0].top_k,
        "rows": ROWS,
        "prompts": {"kinds": KINDS, "of_each": prompts, "tokens": PROMPT, "answer": tokens},
        "paper": PAPER,
        "head_bytes": HEAD_BYTES,
        "choice": CHOICE,
    }
    with torch.inference_mode():
        rows = result["trees"] = trees(target, asked(files, prompts), tokens, arms)
        result["calculated"] = calculated(rows, profiles.split(","), target.carved[0].top_k)
        write_result(output, result)
        target.calibrate([ids for each in windows("fit", 4, 256).values() for ids in each])
        some = windows("held", texts, 4 * ROWS)
        result["left_out"] = left_out(target, some)
        result["texts"] = read_texts(target, some, [*ways, *others], tokenizer)
        write_result(output, result)
        result["choices"] = chosen(target, windows("held", tasks, 4 * CONTEXT + CHOICE), ways)
    write_result(output, result)
    names = "drafter", "kind", "ranking", "budget"
    show("trees of 63", rows, *names, "acceptance_length", "distinct", "first_choices", "perplexity")
    show("calculated", result["calculated"], "machine", "fixed", *names, "step_ms", "over_none", "over_exact")


def asked(files: list[Path], count: int) -> dict[str, list[Tensor]]:
    """Kind of text -> held-out prompts: windows of ``PROMPT`` tokens, and whole questions."""
    kinds = held.kinds(files, 5 * count)
    every = held.prompts(MODELS / "dense", files, 5 * count, PROMPT, 5)
    return {
        kind: [torch.tensor(each) for name, each in zip(kinds, every, strict=True) if name == kind] for kind in KINDS
    }


if __name__ == "__main__":
    app()
