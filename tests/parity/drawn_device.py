"""Settings of a GPU drawn at random, each in one engine where the device decides: `drawn_device.py JSON` runs one.

By V2's runner and, for most, in emulated full CUDA graphs (``full_graphs``). A setting has a model and the format of
its experts, slots, a policy, a predictor, a budget of all experts, drafts, a guard, CPU experts, graphs, and requests.
Tokens are those of stock vLLM, eager and without drafts: of quantised experts, with the weights that their codes mean.
Of MXFP4, whose biases vLLM rounds, they are those of the plugin with a slot for each expert.

In float32, but that scales of INT4 have the 16 bits of rows. There a near-tie of the two best tokens may turn: an
answer is compared up to the first token whose two best were closer than ``CLOSE``.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import engines
import forked
import full_graphs
import graph_runs
import quantised
import torch
from compare import copied
from graph_runs import TOY
from safetensors.torch import load_file, save_file

COUNT = 200  # of seeds
FILE = "FILE"  # stands for the file of trained predictors
TOYS = {
    "bf16": None,
    "int4": quantised.ONLY_OURS["int4 by 32"],
    "gptq": quantised.SCHEMES["gptq by 32"],
    "awq": quantised.SCHEMES["awq by 32"],
    "fp8": quantised.ONLY_OURS["fp8 by channel"],
    "int8": quantised.SCHEMES["int8"],
    "nvfp4": quantised.ONLY_OURS["nvfp4"],
}
TINY = {"fp8 by block": "fp8", "mxfp4": "mxfp4"}  # of random weights, for which nothing but n-grams drafts
FORMATS = (*TOYS, *TINY)
DRAFTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": graph_runs.NGRAM,
    "chain": graph_runs.EAGLE3 | {"num_speculative_tokens": 4},
    "chain of 2": graph_runs.EAGLE3 | {"num_speculative_tokens": 2},
    "tree": graph_runs.EAGLE3,
    "copy": {"method": "draft_model", "model": copied(TOY / "target"), "num_speculative_tokens": 3},
    "draft model": {"method": "draft_model", "model": str(TOY / "draft"), "num_speculative_tokens": 3},
}
TREES = ("16", "7@depth=3@width=3", "12@depth=2")
POLICIES = ("reuse", "reuse@half_lives=(2, 8, 32)", "lru", "lfu", "utility", "utility@recycle=True")
PREDICTORS = ("gate", f"quasi_hidden@file={FILE}", f"neural@file={FILE}", f"hybrid@file={FILE}")
BUDGETS = ("64", "64@when=all", "64@ranking=router", "64@coverage=truncation", "1.0@when=all")
HALVES = ("int4", "gptq", "awq")  # in float16
CLOSE = 30 * 2**-11  # in log-probability: 30 times the rounding of a logit
LENGTHS = (*graph_runs.LENGTHS, 96, 150)  # of prompts: 150 rows and more borrow slots
TOKENS = 16
OPTIONS: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": None, "enable_prefix_caching": False}
OPTIONS |= {"kv_cache_memory_bytes": 96 << 20}


@dataclass(frozen=True)
class Setting:
    """What an engine is started with.

    Attributes:
        form: the format of its experts.
        spac: the knobs.
        graphs: of decode steps; else eager.
        requests: that run at once, at most.
        chunk: rows of a forward, at most.
        asked: numbers of prompts.
        tokens: of each answer.
    """

    form: str
    spac: dict[str, str]
    drafts: str
    graphs: bool
    requests: int
    chunk: int
    asked: tuple[int, ...]
    tokens: int


def drawn(seed: int) -> Setting:
    """The setting of a seed, which an engine may refuse."""
    rng = random.Random(seed)
    form = rng.choice(("bf16",) * 5 + FORMATS[1:])
    toy, graphs = form in TOYS, rng.random() < 0.7
    drafts = rng.choice([name for name in DRAFTS if name != "copy"] if toy else ("none", "ngram"))
    spac = {"plane": "pointers", "slots": rng.choice(("2.1%", "9", "10%", "25%", "25%", "50%", "80%", "100%"))}
    spac["policy"] = rng.choice(POLICIES)
    if rng.random() < 0.4:
        files = toy and form == "bf16"
        spac["prefetch"] = rng.choice(PREDICTORS if files else PREDICTORS[:1])
    if drafts == "draft model" and rng.random() < 0.5:
        spac["prefetch"], drafts = rng.choice(("draft_gate", "draft_gate@k=4", "draft_gate@cutoff=3")), "copy"
    if drafts == "tree":
        spac["tree"] = rng.choice(TREES)
    if rng.random() < 0.4:
        spac["budget"] = rng.choice(BUDGETS)
        if rng.random() < 0.5 and drafts not in ("none", "ngram"):
            spac["budget"] += rng.choice(("@votes=path", "@votes=path@alpha=1.0"))
    spac["guard"] = rng.choice(("off", "on", "on@cut=always", "on@cut=always"))
    if rng.random() < 0.4:
        spac["cpu_experts"] = rng.choice(("1", "2", "auto", "waterfill@admit=False"))
    asked = tuple(sorted(rng.sample(range(len(LENGTHS)), rng.randint(2, 4))))
    return Setting(form, spac, drafts, graphs, rng.choice((1, 2, 4)), rng.choice((64, 256)), asked, rng.choice((8, 16)))


def prompts(form: str) -> list[list[int]]:
    """Pieces of the toy's text, of ``LENGTHS``; tiny models have no text, and fewer tokens."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(TOY / "target" / "tokenizer.json")).encode(Path(json.__file__).read_text()).ids
    if form in TINY:
        ids = [token % 500 + 5 for token in ids]
    return [ids[61 * i : 61 * i + length] for i, length in enumerate(LENGTHS)]


# --- models -----------------------------------------------------------------------------------------------------------


def write(form: str, folder: Path, meant: bool = False) -> Path:
    """The checkpoint of a format; ``meant``: with the weights that its codes mean, float32."""
    if form in TINY:
        return quantised.write(TINY[form], folder / "model", torch.float32 if meant else None)
    scheme = TOYS[form]
    if scheme is None:
        return TOY / "target"
    assert scheme.projection is not None
    made: dict[str, torch.Tensor] = {}
    for name, weight in load_file(TOY / "target" / "model.safetensors").items():
        if not quantised._is_expert(name):
            made[name] = weight
            continue
        parts = scheme.projection(weight)
        if meant:
            made[name] = quantised.meant(scheme, weight, parts).float()
        else:
            made |= {name.removesuffix("weight") + last: part.contiguous() for last, part in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for file in (TOY / "target").iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_text(file.read_text())
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    if not meant:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.entry}))
    return folder


@dataclass(frozen=True)
class Answers:
    """Tokens of prompts, and by how much each was better than the next best, in log-probability."""

    tokens: list[list[int]]
    gaps: list[list[float]]

    def of(self, setting: Setting) -> list[list[int]]:
        """What a setting has to say, without what is behind a near-tie."""
        found = []
        for number in setting.asked:
            tokens, gaps = (each[number][: setting.tokens] for each in (self.tokens, self.gaps))
            close = [at for at, gap in enumerate(gaps) if gap < CLOSE and setting.form in HALVES]
            found.append(tokens[: close[0]] if close else tokens)
        return found


class Models:
    """Checkpoints below a folder, and what they say without slots and drafts; each is made once."""

    def __init__(self, folder: Path, trained: Path | None) -> None:
        self._trained = trained
        self.path = functools.cache(lambda form, meant=False: write(form, folder / f"{form} {meant}", meant))
        self.expected = functools.cache(self._expected)

    def _expected(self, form: str) -> Answers:
        eager, ours = Setting(form, {}, "none", False, 4, 256, tuple(range(len(LENGTHS))), TOKENS), form == "mxfp4"
        said = start(self.path(form, not ours), eager, {"plane": "pointers", "slots": "100%"} if ours else None)
        assert len({tuple(tokens) for tokens in said["said"]}) > 4, "this model says the same to everything"
        return Answers(said["said"], said["gaps"])

    def run(self, setting: Setting) -> dict[str, Any]:
        """What an engine says, or why it was ``refused``."""
        spac = {knob: value.replace(FILE, str(self._trained)) for knob, value in setting.spac.items()}
        return start(self.path(setting.form), setting, spac)


def start(model: Path, setting: Setting, spac: dict[str, str] | None) -> dict[str, Any]:
    asked = {"model": str(model), "setting": asdict(setting), "spac": spac}
    return forked.answer(forked.run([__file__, json.dumps(asked)], timeout=600))


def outcome(models: Models, seed: int) -> dict[str, Any]:
    """The setting of a seed; what it was ``refused`` for, or what it said that is ``wrong``; and how much was done."""
    setting = drawn(seed)
    found, line = models.run(setting), {"seed": seed, **asdict(setting)}
    if "refused" in found:
        return line | {"refused": found["refused"]}
    expected, stats = models.expected(setting.form).of(setting), found["stats"]
    said = [tokens[: len(known)] for tokens, known in zip(found["said"], expected, strict=True)]
    line["wrong"] = None if said == expected else [found["said"], expected]
    done = {"hits": stats["hits"], "misses": stats["misses"], "replays": found["replays"]}
    return line | done | {"tokens_compared": sum(map(len, expected)), "steps": stats["steps"]}


def sizes(setting: Setting) -> list[int]:
    """Rows of the steps that are captured: of so many requests at once, each with all of its drafts, or with none."""
    tree = setting.spac.get("tree", "").partition("@")[0]
    drafts = int(tree) if tree else (DRAFTS[setting.drafts] or {}).get("num_speculative_tokens", 0)
    return sorted({requests * rows for requests in range(1, setting.requests + 1) for rows in (1, 1 + drafts)})


def main(asked: dict[str, Any], look: Callable[[Any], Any] = lambda llm: None) -> dict[str, Any]:
    """``look`` is called with the engine when it has answered."""
    setting = Setting(**asked["setting"])
    quantised.allow_float32()
    dtype = "float16" if setting.form in HALVES else "float32"
    options = OPTIONS | {"dtype": dtype, "max_num_seqs": setting.requests, "max_num_batched_tokens": setting.chunk}
    drafts = DRAFTS[setting.drafts]
    if drafts is not None:
        options["speculative_config"] = drafts
    if setting.graphs:
        full_graphs.install()
        if "cut" not in setting.spac.get("guard", ""):  # whose launches must not be the first of their kind
            leave_out_warm_up()
        options |= full_graphs.options()
        options["compilation_config"] |= {"cudagraph_capture_sizes": sizes(setting)}
    if asked["spac"] is not None:
        graph_runs.plan_by_turns()
        graph_runs.cut_by_turns()
    texts = prompts(setting.form)
    try:
        import vllm_spac
        from vllm_spac.errors import SpacError

        with engines.engine(asked["model"], asked["spac"], **options) as llm:
            said, gaps = answers(llm, [texts[number] for number in setting.asked], setting.tokens, not asked["spac"])
            stats, looked = vllm_spac.stats(llm)["workers"][0] if asked["spac"] is not None else {}, look(llm)
    except SpacError as error:
        return {"refused": str(error)}
    return {"said": said, "gaps": gaps, "stats": stats, "replays": full_graphs.CudaGraph.replays, "looked": looked}


def leave_out_warm_up() -> None:
    """Half of an engine's time goes to vLLM's warm-up, of kernels that are interpreted here."""
    from vllm.v1.worker import gpu_worker

    gpu_worker.warmup_kernels = lambda *args, **named: None


def answers(llm: Any, texts: list[list[int]], tokens: int, gaps: bool) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens, and by how much each was better than the next best: 0 where nobody asks."""
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=2 if gaps else None
    )
    said, apart = [], []
    for output in llm.generate([{"prompt_token_ids": text} for text in texts], asked, use_tqdm=False):
        answer = output.outputs[0]
        said.append(list(answer.token_ids))
        best = [sorted((found.logprob for found in place.values()), reverse=True) for place in answer.logprobs or ()]
        apart.append([first - second for first, second, *_ in best])
    return said, apart


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What came of settings, as lines of ``outcome``: numbers of them by what they had."""
    ran = [line for line in lines if "refused" not in line]

    def count(values: Iterable[str]) -> dict[str, int]:
        return dict(sorted(Counter(values).items()))

    return {
        "of": COUNT,
        "ran": len(ran),
        "wrong": sum(line["wrong"] is not None for line in ran),
        "tokens_compared": sum(line["tokens_compared"] for line in ran),
        "replays": sum(line["replays"] for line in ran),
        "refused": count(line["refused"] for line in lines if "refused" in line),
        "formats": count(line["form"] for line in ran),
        "drafts": count(line["drafts"] for line in ran),
        "graphs": count("full" if line["graphs"] else "none" for line in ran),
        "knobs": count(knob for line in ran for knob in line["spac"]),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
