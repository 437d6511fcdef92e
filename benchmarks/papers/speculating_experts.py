"""Speculating Experts on the carved model: what is known one layer ahead, and what executing it costs. Not timed.

    python benchmarks/papers/speculating_experts.py

Four parts:

- states: cosine similarity of what layer l knows with what the router of layer l + 1 reads (figure 3), recall of the
  experts that it chooses (4), and by their rank (5).
- estimators: the paper's (appendix A: one network, a layer embedding) and ours (a network per layer), trained on equal
  tokens: recall by layer (10), and by training tokens (9), in every fourth layer.
- executed: predictions decide which experts run, with predicted weights (table 1) or the router's among twice as many
  (`restricted`): perplexity, right next tokens, agreement and KL, of whole texts.
- calculated: the serving code on a virtual clock with two buffers, of which a layer has one while the other is read
  into, as in algorithm 1; nothing is read again, since what is named is executed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from benchmarks.common import RESULTS, ROOT, TRACES, Script, provenance, sha256, show, write_result
from benchmarks.real import held
from benchmarks.replay.policies import stack
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.predictor_file import Identity, Training
from vllm_spac.decisions.predictors._samples import Samples
from vllm_spac.decisions.predictors._trained import Gates, Material, Sizes, Trained
from vllm_spac.decisions.predictors.base import Guess, Predictor, PredictorInputs, Signal
from vllm_spac.methods.speculating_experts import neural_predictor
from vllm_spac.methods.speculating_experts.neural_predictor import Neural
from vllm_spac.methods.speculating_experts.quasi_hidden_predictor import mixing
from vllm_spac.methods.speculating_experts.speculated import SpeculatedExecution
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.evaluation import collection, engine
from vllm_spac.tools.evaluation.evaluated_model import EvaluatedModel
from vllm_spac.tools.evaluation.points import SPECULATED, Point
from vllm_spac.tools.evaluation.quality_run import Sweep
from vllm_spac.tools.traces.simulation import simulate

MODELS, WORK = Path(".cache") / "real", Path(".cache") / "speculating_experts"  # from the checkout's root
TARGET = ROOT / MODELS / "target"
OTHERS, HELD, EPSILON = 8, 384, 1e-5  # one text in so many is not fitted to; tokens of a held-out text; of norms
WIDE = (8, 12, 16, 24, 32)
STATES = {
    "residual": "the residual after attention, behind the norm of the next layer (the predictor gate)",
    "quasi": "the same with the default vectors: the quasi-hidden state",
    "shared": "and with the output of the shared expert, which is always in fast memory",
    "moe": "the residual after the layer, all experts have run: attention of the next layer is missing alone",
}
LATENT, INNER = 384, 1024  # 1.05 million parameters; the routers have 1.11, and the paper's 17 beside 12.6
BATCH, RATE, WARM, SNAPSHOTS = 2048, 1e-3, 100, 8
CURVE = (30, 100, 300)  # batches of a training of ours, of 512 tokens each; as many tokens are drawn for the paper's
EVERY = 4  # layers of that curve
OUR_BATCH = neural_predictor._BATCH
EXPERT, LAYERS = 9_437_184, 48  # Qwen3-30B-A3B in bf16: bytes of an expert, and layers
KV_TOKEN = 2 * 4 * 128 * 2 * LAYERS  # its bytes of a token of context, which a step reads
CASES = (  # machine, tokens of context, and whether as attained
    *((machine, context, False) for machine in ("rtx3090", "a100", "h200") for context in (1024, 65536)),
    ("rtx3090", 1024, True),
)
STEPS = 30  # of the trace
app = Script(__doc__)


# -- what layers know --------------------------------------------------------------------------------------------------


class Residuals:
    """Observes the model in this process: the root mean square of what each router's norm reads, and after the layer.

    Attributes:
        size: by layer, float [rows] of each forward.
        after: by layer, the residual after the experts, if ``whole``.
    """

    def __init__(self, worker: Any) -> None:
        self.whole = False
        blocks = worker.model_runner.get_model().model.layers
        self.size: list[list[Tensor]] = [[] for _ in blocks]
        self.after: list[list[Tensor]] = [[] for _ in blocks]
        for layer, block in enumerate(blocks):
            block.post_attention_layernorm.register_forward_hook(self._before(layer))
            block.register_forward_hook(self._behind(layer))

    def clear(self) -> None:
        for each in (*self.size, *self.after):
            each.clear()

    def sizes(self) -> Tensor:
        """float32 [L, rows] of all forwards since ``clear``."""
        return torch.stack([torch.cat(each) for each in self.size])

    def _before(self, layer: int) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, args: Any, output: Any) -> None:
            self.size[layer].append((output[1].float().square().mean(-1) + EPSILON).sqrt())

        return keep

    def _behind(self, layer: int) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, args: Any, output: Any) -> None:
            if self.whole:
                self.after[layer].append((output[0] + output[1]).clone())

        return keep


_observed: list[Residuals] = []


def _observe(worker: Any) -> None:
    _observed.append(Residuals(worker))


@dataclass(frozen=True, eq=False)
class Model:
    """What states are made of: routers and norms, mean outputs [L, N, d], and shared experts (gate, up, down)."""

    gates: Gates
    outputs: Tensor
    shared: list[tuple[Tensor, Tensor, Tensor]]

    def state(
        self, what: str, layer: int, hidden: Tensor, chosen: Tensor, size: Tensor, after: Tensor | None
    ) -> Tensor:
        """Returns float [rows, d], what the router of the layer after ``layer`` would read of ``what``.

        Args:
            hidden: [rows, d], what the router of ``layer`` reads.
            chosen: [rows, N], its routing weights.
            size: [rows], root mean square of the residual before its norm.
            after: [rows, d], the residual after the layer, for ``moe``.
        """
        norms = self.gates.norm
        stream = hidden.float() / norms[layer] * size[:, None]
        if what == "moe":
            assert after is not None
            stream = after.float()
        if what in ("quasi", "shared"):
            stream = stream + chosen @ self.outputs[layer]
        if what == "shared":
            gate, up, down = self.shared[layer]
            inner = functional.silu(hidden.float() @ gate.T) * (hidden.float() @ up.T)
            stream = stream + inner @ down.T
        return stream * (stream.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * norms[layer + 1]

    def scores(self, layer: int, state: Tensor) -> Tensor:
        """Returns float [rows, N] of the router of ``layer``."""
        return state @ self.gates.weight[layer].T + self.gates.bias[layer]


def shared_experts(layers: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Reads the shared experts of the carved model."""
    tensors = load_file(TARGET / "model.safetensors")
    named = "model.layers.{}.mlp.shared_experts.{}_proj.weight"
    parts = [[tensors[named.format(layer, part)].float() for part in ("gate", "up", "down")] for layer in range(layers)]
    return [(gate, up, down) for gate, up, down in parts]


class Ranks:
    """Counts over rows, by layer but the first: how many of the experts that a router chose a score names.

    Attributes:
        found: float64 [L, k], of each rank of the router's order, those among the first k named.
        wide: float64 [L, len(WIDE)], those among so many.
    """

    def __init__(self, layers: int, top_k: int) -> None:
        self.rows, self.cosine = 0, torch.zeros(layers, dtype=torch.float64)
        self.found = torch.zeros(layers, top_k, dtype=torch.float64)
        self.wide = torch.zeros(layers, len(WIDE), dtype=torch.float64)

    def add(self, layer: int, scores: Tensor, samples: Samples, state: Tensor | None = None) -> None:
        """Adds all rows of a layer, with the ``state`` [rows, d] that the scores are of."""
        order = samples.logits[layer].gather(1, samples.ids[layer].long()).argsort(1, descending=True)
        true = samples.ids[layer].long().gather(1, order)
        place = scores.argsort(dim=1, descending=True, stable=True).argsort(1).gather(1, true)  # of each chosen expert
        self.rows = samples.rows
        self.found[layer] = (place < samples.top_k).double().mean(0)
        self.wide[layer] = torch.stack([(place < wide).double().mean() for wide in WIDE])
        if state is not None:
            self.cosine[layer] = torch.cosine_similarity(state, samples.hidden[layer].float(), dim=1).double().mean()

    def recall(self, layers: Iterable[int]) -> float:
        """Over these layers."""
        return float(self.found[list(layers)].mean())

    def result(self) -> dict[str, Any]:
        found, layers = self.found[1:], range(1, len(self.found))
        facts = {"recall": self.recall(layers), "recall_by_layer": found.mean(1).tolist()}
        facts |= {"by_rank": found.mean(0).tolist(), "by_rank_and_layer": found.tolist()}
        facts |= {"wide": dict(zip(map(str, WIDE), self.wide[1:].mean(0).tolist(), strict=True))}
        if self.cosine.any():
            facts |= {"cosine": float(self.cosine[1:].mean()), "cosine_by_layer": self.cosine[1:].tolist()}
        return facts


# -- the paper's estimator ---------------------------------------------------------------------------------------------


class Estimator(torch.nn.Module):
    """Scores of the next router from a quasi-hidden state (Speculating Experts, appendix A): one for all layers.

    z = q @ W + e_l, z += up-SiLU-down(z), scores = LayerNorm(z) @ head, with a learned embedding e_l of the layer.
    """

    def __init__(self, width: int, layers: int, experts: int) -> None:
        super().__init__()
        self.project = torch.nn.Linear(width, LATENT)
        self.position = torch.nn.Embedding(layers, LATENT)
        self.up, self.down = torch.nn.Linear(LATENT, INNER), torch.nn.Linear(INNER, LATENT)
        self.norm, self.head = torch.nn.LayerNorm(LATENT), torch.nn.Linear(LATENT, experts)

    def forward(self, state: Tensor, layer: Tensor) -> Tensor:
        """Scores [rows, N] of states [rows, d] of ``layer``, int64 [rows] or [1]."""
        inner = self.project(state) + self.position(layer)
        inner = inner + self.down(functional.silu(self.up(inner)))
        return self.head(self.norm(inner))

    def about(self, layer: int, state: Tensor) -> Tensor:
        """Scores [rows, N] of ``layer`` from states [rows, d] of the one before."""
        with torch.no_grad():
            return self(state, torch.tensor([layer - 1]))


def estimate(
    states: Tensor, logits: Tensor, drawn: int, seconds: float, judge: Callable[[Estimator], float]
) -> tuple[Estimator, dict[str, Any]]:
    """Trains an estimator by the KL divergence to the routers' distributions.

    Args:
        states: bfloat16 [L - 1, rows, d], the quasi-hidden states of the layers.
        logits: float [L - 1, rows, N], of the routers after them.
        drawn: rows of each layer that are drawn, on average, with replacement.
        seconds: of this process's CPU time; no batch begins after it.
        judge: recall on other texts, asked ``SNAPSHOTS`` times.

    Returns:
        The estimator, and what the training was: among others the recall by rows drawn.
    """
    torch.manual_seed(0)
    layers, rows, width = states.shape
    made = Estimator(width, layers, logits.shape[2])
    optimiser = torch.optim.AdamW(made.parameters(), RATE, weight_decay=0.01)
    steps, done = layers * drawn // BATCH, 0
    curve: list[dict[str, float]] = []
    generator, begun = torch.Generator().manual_seed(0), time.process_time()
    while (share := max(done / steps, (time.process_time() - begun) / seconds)) < 1:
        optimiser.param_groups[0]["lr"] = RATE * min((done + 1) / WARM, 1 - share)
        layer = torch.randint(layers, (BATCH,), generator=generator)
        row = torch.randint(rows, (BATCH,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            scores = made(states[layer, row], layer)
        loss = -(logits[layer, row].softmax(-1) * scores.float().log_softmax(-1)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        done += 1
        if (len(curve) + 1) / SNAPSHOTS <= share:
            curve.append({"drawn": done * BATCH // layers, "recall": judge(made)})
    curve.append({"drawn": done * BATCH // layers, "recall": judge(made)})
    facts = {"parameters": sum(each.numel() for each in made.parameters()), "steps": done, "batch": BATCH}
    return made.requires_grad_(False), facts | {"cpu_seconds": time.process_time() - begun, "by_drawn": curve}


# -- executed ----------------------------------------------------------------------------------------------------------


class Executing(Predictor):
    """Predicts by ``way``, which can be changed between two texts; looks one layer ahead."""

    needs = frozenset({Signal.ROUTER_INPUT, Signal.ROUTING})
    reach = 1

    def __init__(self) -> None:
        self.way: Callable[[PredictorInputs], Iterable[Guess]] = lambda seen: ()

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        return self.way(seen)


def installed(executing: Executing) -> Callable[[Any], None]:
    """Returns what has a worker's speculated execution ask ``executing``."""

    def install(worker: Any) -> None:
        control = worker._spac_experts().serving.budget
        control._speculation = SpeculatedExecution(control.layers, executing, control.counters)

    return install


# -- calculated --------------------------------------------------------------------------------------------------------


def two_buffers(trace: Trace, machine: str, attained: bool, context: int, recall: float) -> dict[str, Any]:
    """Seconds per token of a machine, over those with loads on demand into one buffer.

    Args:
        attained: with what a machine attained of its data sheet, and its host's work.
        context: tokens whose KV cache a step reads.
        recall: of a predictor that is not executed: what it lacks is loaded on demand.
    """
    known = Costs.read(machine).as_attained() if attained else Costs.read(machine)
    rest = known.other + context * KV_TOKEN / known.fast.bytes_per_second
    costs = known.model_copy(update={"other": rest * trace.facts.layers / LAYERS})
    buffer, quarter = trace.facts.top_k, trace.facts.total // 4
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (buffer, {"fill": False}),
        "executed": (2 * buffer, {"fill": False, "prefetch": "oracle@reach=1"}),
        "exact": (2 * buffer, {"fill": False, "prefetch": f"oracle@reach=1@recall={recall:.3f}"}),
        "slots": (quarter, {"policy": "reuse"}),
        "slots, executed": (quarter, {"policy": "reuse", "prefetch": "oracle@reach=1"}),
    }
    found = {name: simulate(trace, slots, costs, expert_bytes=EXPERT, **more) for name, (slots, more) in ways.items()}
    base = found["one"].seconds
    copies = costs.loading(buffer, EXPERT) * trace.facts.layers * trace.steps
    return {
        "machine": machine,
        "attained": attained,
        "context": context,
        "copies": copies / base,
        "equation_1": max(copies, base - copies) / base,
        "ms": 1e3 * base / trace.steps * LAYERS / trace.facts.layers,
        "over_one": {name: each.seconds / base for name, each in found.items()},
        "hit_rate": found["slots"].hit_rate,
    }


# -- the run -----------------------------------------------------------------------------------------------------------


class Run:
    """The parts that need the model.

    Args:
        llm: of the carved model.
        fit, others, texts: token ids: trained on, chosen by, and reported on.
    """

    def __init__(self, llm: Any, fit: list[list[int]], others: list[list[int]], texts: list[list[int]]) -> None:
        self.llm, self.texts = llm, texts
        llm.collective_rpc(_observe)
        [self.observed] = _observed
        self.evaluated = EvaluatedModel(llm)
        facts = self.evaluated.facts()
        found, sizes, _ = self._read([*fit, *others], len(fit))
        gates = collection.gates_of(str(TARGET), facts["layers"], found.samples)
        assert not isinstance(gates, str), gates
        self.model = Model(gates, found.outputs, shared_experts(len(gates.norm)))
        self.fit, self.others = found.samples.texts(0, len(fit)), found.samples.texts(len(fit), len(fit) + len(others))
        self.sizes = {"fit": sizes[:, : self.fit.rows], "others": sizes[:, self.fit.rows :]}
        self.held, self.sizes["held"], self.after = self._held(texts)
        kept = self.fit
        shape = kept.layers, kept.experts, kept.top_k, kept.hidden.shape[2]
        material = Material(Sizes(*shape, 1), kept, self.others, gates, found.outputs)
        self.material, self.identity = material, Identity(facts["fingerprint"], facts["model"], tuple(facts["layers"]))

    def _read(self, texts: list[list[int]], fitted: int) -> tuple[collection.Collected, Tensor, list[Tensor]]:
        self.observed.clear()
        found = self.evaluated.collect(texts, fitted, lambda rows: None)
        return found, self.observed.sizes(), [torch.cat(each) for each in self.observed.after if each]

    def _held(self, texts: list[list[int]]) -> tuple[Samples, Tensor, list[Tensor]]:
        self.observed.whole = True
        found, sizes, after = self._read(texts, 0)
        self.observed.whole = False
        return found.samples, sizes, after

    def states(self, what: str, layer: int, of: str) -> Tensor:
        """Returns float [rows, d], what ``layer`` knows of the next router's input in the texts ``of``."""
        samples: Samples = getattr(self, of)
        chosen = mixing(samples.ids[layer], samples.weights[layer], samples.experts)
        after = self.after[layer] if what == "moe" else None
        return self.model.state(what, layer, samples.hidden[layer], chosen, self.sizes[of][layer], after)

    def told(
        self, scores: Callable[[int, Tensor], Tensor], what: str, of: str = "held", layers: Iterable[int] | None = None
    ) -> Ranks:
        """What ``scores`` (number of a layer, state) of the states ``what`` tell about some layers, or all."""
        samples: Samples = getattr(self, of)
        found = Ranks(samples.layers, samples.top_k)
        for layer in range(1, samples.layers) if layers is None else layers:
            state = self.states(what, layer - 1, of)
            found.add(layer, scores(layer, state), samples, state)
        return found

    def own(self) -> list[float]:
        """Cosine similarity of the router inputs of neighbouring layers as they are, by layer but the first."""
        pairs = zip(self.held.hidden[:-1], self.held.hidden[1:], strict=True)
        return [float(torch.cosine_similarity(a.float(), b.float(), dim=1).mean()) for a, b in pairs]

    def trained(self, only: list[str]) -> dict[str, Trained]:
        """The predictors of ``vllm-spac predictors train``, with those that they use."""
        training = Training(self.material, self.identity, "", only=only)
        for _ in training.run():
            pass
        file = training.result()
        return {name: file.build(name) for name in file.names}

    def ranked(self, predictor: Predictor, of: str = "held") -> Ranks:
        """What a predictor tells one layer ahead."""
        samples: Samples = getattr(self, of)
        found = Ranks(samples.layers, samples.top_k)
        for layer in range(samples.layers - 1):
            for guess in predictor.guesses(samples.inputs(layer, slice(0, samples.rows), predictor.needs)):
                found.add(layer + 1, guess.scores[:, : samples.experts], samples)
        return found

    def estimators(self, neural: Trained, seconds: float) -> tuple[Estimator, dict[str, Any]]:
        """Trains the paper's estimator and ours by more and more rows; returns the last of the former, and recalls.

        ``neural``: ours, after the last of ``CURVE``.
        """
        layers = range(1, self.held.layers, EVERY)
        states = torch.stack([self.states("quasi", layer, "fit").bfloat16() for layer in range(self.held.layers - 1)])
        curve: list[dict[str, Any]] = []
        for batches in CURVE:
            made, how = estimate(
                states,
                self.fit.logits[1:],
                batches * OUR_BATCH,
                seconds,
                lambda made: self.told(made.about, "quasi", layers=layers).recall(layers),
            )
            ours = neural if batches == CURVE[-1] else self.neural(batches, layers)
            recalls = {"one": how["by_drawn"][-1]["recall"], "per_layer": self.ranked(ours).recall(layers)}
            curve.append({"drawn": batches * OUR_BATCH} | how | recalls)
            print(curve[-1], flush=True)
        return made, {"layers": list(layers), "curve": curve}

    def neural(self, batches: int, layers: Iterable[int]) -> Trained:
        """Our estimator of some layers, after so many batches; it knows nothing about the others."""
        shapes = Neural.specs(self.material.sizes)
        made: dict[str, Tensor] = {}
        usual, neural_predictor._STEPS = neural_predictor._STEPS, batches
        for layer in layers:
            made |= Neural.train(layer - 1, self.material, {})
        neural_predictor._STEPS = usual
        rest = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in shapes.items() if name not in made}
        return Neural(self.material.sizes, made | rest, {})

    # -- executed

    def scored(self, ways: dict[str, Callable[[PredictorInputs], Iterable[Guess]]]) -> dict[str, Any]:
        """Quality of the held texts when each of ``ways`` decides what is executed."""
        executing = Executing()
        self.llm.collective_rpc(installed(executing))
        sweep = Sweep(self.llm, self.texts, self.observed.clear)
        found: dict[str, Any] = {"exact": sweep.score({}, reference=True), "points": []}
        for name, way in ways.items():
            executing.way = way
            for mode in ("predicted", "restricted"):
                settings = Point(SPECULATED, mode).settings("all", window=1)
                found["points"].append({"way": name, "mode": mode} | sweep.score(settings))
                print(found["points"][-1], flush=True)
        return found

    def by_state(
        self, scores: Callable[[int, Tensor], Tensor], what: str = "quasi"
    ) -> Callable[[PredictorInputs], list[Guess]]:
        """Predicts the next layer by ``scores`` (its number, the state), with the state ``what``."""

        def way(seen: PredictorInputs) -> list[Guess]:
            if seen.layer < 0 or seen.layer + 1 == self.held.layers:
                return []
            assert seen.hidden is not None and seen.ids is not None and seen.weights is not None
            chosen = mixing(seen.ids, seen.weights, self.held.experts)
            size = self.observed.size[seen.layer][-1][: len(seen.hidden)]
            state = self.model.state(what, seen.layer, seen.hidden, chosen, size, None)
            return [Guess((seen.layer + 1) * self.held.experts, scores(seen.layer + 1, state), logits=True)]

        return way


def chosen_by_layer(
    better: list[bool],
    one: Callable[[PredictorInputs], Iterable[Guess]],
    other: Callable[[PredictorInputs], Iterable[Guess]],
) -> Callable[[PredictorInputs], Iterable[Guess]]:
    """Predicts by ``one`` about the layers in which it is ``better``, and by the ``other`` else."""
    return lambda seen: one(seen) if seen.layer + 1 < len(better) and better[seen.layer + 1] else other(seen)


@app.main
def main(
    fitted: Annotated[int, typer.Option(min=16, help="Texts that are trained on, or chosen by.")] = 56,
    length: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 512,
    count: Annotated[int, typer.Option("--texts", min=1, help="Held-out texts.")] = 10,
    seconds: Annotated[float, typer.Option(min=1, help="CPU time of a training, at most.")] = 600.0,
    trace: Annotated[Path, typer.Option(help="Routing of the calculation.")] = TRACES / "real" / "none1.trace",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "real_speculating_experts.json",
) -> None:
    origin = provenance()
    files = held.beside(TARGET)
    known = [each["prompt_token_ids"] for each in held.windows(files, "fit", fitted, length)]
    texts = [each["prompt_token_ids"] for each in held.windows(files, "held", count, HELD)]
    others = known[OTHERS - 1 :: OTHERS]
    fit = [each for number, each in enumerate(known) if number % OTHERS != OTHERS - 1]
    spac = {"slots": "100%", "store": "disk", "disk_dir": str(ROOT / WORK / "packed"), "guard": "off"}
    result: dict[str, Any] = {"provenance": origin, "toy_model": False}
    with engine.engine(str(TARGET), spac, max(length, HELD) + 1, tokenizer=False, gpu_memory_utilization=0.2) as llm:
        run = Run(llm, fit, others, texts)
        route, layers = run.model.scores, range(run.held.layers)
        ours = run.trained(["gate", "quasi_hidden"])
        ours["neural"] = run.neural(CURVE[-1], layers[1:])
        one, result["training"] = run.estimators(ours["neural"], seconds)
        told = {what: run.told(route, what) for what in STATES} | {"one": run.told(one.about, "quasi")}
        told |= {name: run.ranked(each) for name, each in ours.items()}
        usual = run.told(route, "quasi", "others").found.mean(1)
        better = {
            "one": (run.told(one.about, "quasi", "others").found.mean(1) > usual).tolist(),
            "neural": (run.ranked(ours["neural"], "others").found.mean(1) > usual).tolist(),
        }
        router, estimator, neural = run.by_state(route), run.by_state(one.about), ours["neural"].guesses
        ways = {
            "router": router,
            "estimator": estimator,
            "hybrid": chosen_by_layer(better["one"], estimator, router),
            "shared": run.by_state(route, "shared"),
            "neural": neural,
            "neural hybrid": chosen_by_layer(better["neural"], neural, router),
        }
        result |= {
            "texts": {"fit": run.fit.rows, "others": run.others.rows, "held": run.held.rows},
            "states": STATES,
            "told": {name: ranks.result() for name, ranks in told.items()},
            "cosine_as_it_is": run.own(),
            "estimator_in": {name: [layer for layer in layers if each[layer]] for name, each in better.items()},
            "executed": run.scored(ways),
        }
    decoded = stack(Trace.load(trace), len(layers), STEPS)
    recall = result["told"]["quasi"]["recall"]
    result["traces"] = {f"real/{trace.stem}": {"sha256": sha256(trace), "steps": decoded.steps}}
    result["calculated"] = [
        two_buffers(decoded, machine, attained, context, recall) for machine, context, attained in CASES
    ]
    write_result(output, result)
    show("one layer ahead", [{"by": name} | each for name, each in result["told"].items()], "by", "recall", "cosine")
    columns = "way", "mode", "perplexity_change", "accuracy", "agreement", "kl"
    show("executed", result["executed"]["points"], *columns)
    shown = "machine", "attained", "context", "copies", "equation_1", "over_one.executed", "over_one.slots"
    show("calculated: time per token over loads on demand", result["calculated"], *shown)


if __name__ == "__main__":
    app()
