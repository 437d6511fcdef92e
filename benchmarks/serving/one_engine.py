"""One engine of ``on_gpu.py``: its job, and what is measured of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.agents.recorded import AGENTS, Recording
from benchmarks.agents.served import measures
from benchmarks.common import PlanError
from benchmarks.serving import prompts
from benchmarks.serving.cases import DRAFTS, Case, Drafts, Settings
from benchmarks.serving.processes import EngineError, LiveEngine
from benchmarks.shapes.profiled import divide
from benchmarks.shapes.shape import Shape
from vllm_spac.errors import SpacError

LENGTHS = (1, 5, 23, 64, 90, 150, 31, 8)  # of the prompts whose answers are compared
ANSWER, SHORT, REPEATS, WARM = 32, 40, 2, 8
BESIDE, PROFILED = 4, 16  # requests beside a long prompt; steps of a profile
_ROWS = 8192  # of a step, at most: the plugin's default on a GPU
_WIDE = 16  # requests: more of them get fewer tokens each
SLACK = 32  # tokens beyond prompt and answer, for drafts
_START = 30.0  # seconds that an engine is expected to take before one has been seen
_COUNTED = ("hits", "misses", "loads", "prefetches", "prefetch_hits", "cpu_experts", "bytes", "steps", "speculation")


class LeftOut(Exception):
    """An engine is not run; the message says why."""


@dataclass(frozen=True)
class Run:
    """One engine to run: ``share`` of the experts in slots."""

    part: str
    case: Case
    share: str

    @property
    def name(self) -> str:
        return self.case.at(self.share).name


@dataclass
class Clock:
    """The time that is left.

    Attributes:
        end: when everything must have ended; ``most``: seconds that one engine may take.
        fastest: seconds that the fastest engine took; None before the first: one that would have less is not started.
    """

    end: float
    most: float
    fastest: float | None = None

    def limit(self) -> float:
        """Returns when the next engine must have ended.

        Raises:
            LeftOut: there is too little time for it.
        """
        now, needed = time.monotonic(), self.fastest or min(_START, self.most)
        if self.end - now < needed:
            raise LeftOut(
                f"--minutes: {max(0.0, self.end - now):.0f} s are left, an engine takes {needed:.0f} s or more"
            )
        return min(self.end, now + self.most)


@dataclass(frozen=True)
class Asked:
    """What all engines share.

    Attributes:
        models: folder of the model by part; ``heads``: of its EAGLE-3 head; ``shapes``: those that are none on a disk.
        prompt_tokens: lengths of the long prompts.
        compare: prompts whose answers are compared; ``short`` and ``long``, some of each length: those that are timed.
        options: of every engine, beyond what the parts need.
        agents: what several agents ask; None: nobody asks.
    """

    models: Mapping[str, Path]
    heads: Mapping[str, Path]
    batches: tuple[int, ...]
    decode_tokens: int
    prompt_tokens: tuple[int, ...]
    dtype: str
    eager: bool
    gpu: bool
    at_once: int
    seed: int
    disk_dir: Path
    plugins: tuple[str, ...]
    options: Mapping[str, Any]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    compare: list[list[int]] = field(default_factory=list)
    short: list[list[int]] = field(default_factory=list)
    long: dict[int, list[list[int]]] = field(default_factory=dict)
    agents: Recording | None = None

    def with_prompts(self) -> Asked:
        """Returns the same with prompts."""
        model, seed = self.models, self.seed
        whole = prompts.load(model["tokens"], len(LENGTHS), max(LENGTHS), seed).ids
        return dataclasses.replace(
            self,
            compare=[ids[:length] for ids, length in zip(whole, LENGTHS, strict=True)],
            short=prompts.load(model["serving"], max(*self.batches, BESIDE), SHORT, seed).ids,
            long={
                tokens: prompts.load(model["serving"], 1 + REPEATS, tokens, seed + 1).ids
                for tokens in self.prompt_tokens
            },
        )

    def job(self, run: Run) -> dict:
        """Returns the job for ``engine.py``.

        Raises:
            LeftOut: it needs a GPU, or a file that was not given.
            PlanError: its drafts come from a model that is not there.
        """
        case, compared, together = run.case.at(run.share), run.part == "tokens", run.part == "agents"
        if case.offload and not self.gpu:
            raise LeftOut("stock vLLM offloads from a GPU, and there is none here")
        batches = (len(LENGTHS),) if compared else self.batches
        timed = max(SHORT, *self.prompt_tokens), self.decode_tokens
        longest, output = (max(LENGTHS), ANSWER) if compared else timed
        if together:
            assert self.agents is not None, "the part has requests"
            batches, longest, output = self.numbers, self.agents.context, 0
        model, shape = self.models[run.part], self.shapes.get(run.part)
        drafts = Drafts(DRAFTS, self.heads[run.part], model.parent / "draft")
        loaded = {"VLLM_PLUGINS": ",".join([*(["spac"] if case.knobs is not None else []), *self.plugins])}
        settings = Settings(
            model, drafts, longest, output, batches, self.seed, self.eager, self.dtype if compared else "auto",
            self.disk_dir, environment=loaded, checkpoint=None if shape is None else shape.checkpoint,
        )  # fmt: skip
        job = case.job(settings)
        context = longest + output + SLACK
        job["options"] |= {"max_model_len": context, "max_num_batched_tokens": min(max(1024, context), _ROWS)}
        if together:
            text = (model / "tokenizer.json").is_file()  # which a JSON schema needs
            job["options"] |= {"enable_prefix_caching": True, "skip_tokenizer_init": not text}
        elif not compared:
            job["options"]["max_num_seqs"] = max(*batches, BESIDE + 1)
        if shape is not None:
            job["options"]["load_format"] = "dummy"  # which engine.py replaces
        if self.gpu:
            job["options"] |= self._on_gpu(batches, job["speculative"], compared)
            if shape is not None:
                short = context if together else SHORT + output + SLACK
                held = shape.kv_bytes(context + 2 * max(*batches, BESIDE) * short)
                job["options"]["kv_cache_memory_bytes"] = max(2 << 30, held)
        job["options"] |= self.options
        job["spac"] = None if case.knobs is None else self.knobs(run)
        return job

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of agents: those of the batch sizes that are recorded."""
        return tuple(size for size in self.batches if size <= AGENTS) or (AGENTS,)

    def _on_gpu(self, batches: Sequence[int], speculative: dict | None, compared: bool) -> dict:
        """Returns the share of the GPU, and only those graphs that are replayed: each takes a while to capture."""
        found: dict[str, Any] = {"gpu_memory_utilization": 0.8 / self.at_once if compared else 0.8}
        found["kv_cache_memory_bytes"] = (1 if compared else 2) << 30
        if not self.eager:
            drafts = speculative["num_speculative_tokens"] if speculative else 0
            powers = [1 << n for n in range(max(batches).bit_length())]
            sizes = sorted({*powers, *batches, *(batch * (drafts + 1) for batch in batches)})
            found["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        return found

    def knobs(self, run: Run) -> dict[str, str]:
        """Returns the plugin's knobs."""
        assert run.case.knobs is not None, "stock has no knobs"
        found = {"slots": run.share, **run.case.knobs}
        if not self.gpu and "executor" not in found:
            found.setdefault("store", "host")  # a GPU's default
        if found.get("store") == "disk" or "executor" in found:  # workers have disks
            found["disk_dir"] = str(self.disk_dir)
        return found


def run_one(
    run: Run, asked: Asked, clock: Clock, note: Callable[[dict], None] = lambda row: None
) -> tuple[dict, list[list[int]]]:
    """Returns the row of one engine, and its answers; ``note``: is given what there is of it after each measurement."""
    case = run.case
    row: dict[str, Any] = {"part": run.part, "name": run.name, "speculation": case.speculation, "exact": case.exact}
    row |= {"slots": run.share} if case.has_share else {}
    said: list[list[int]] = []
    begin = time.monotonic()
    try:
        until, job = clock.limit(), asked.job(run)
        row["knobs"] = job["spac"]
        with closing(LiveEngine(job, case.knobs is None, until - time.monotonic())) as engine:
            row |= {"start_seconds": time.monotonic() - begin, **engine.ready}
            if run.part == "tokens":
                said = _compared(engine, asked, row, until)
            elif run.part == "agents":
                for answers in _together(engine, asked, row, until):
                    said += answers
                    note(row)
            else:
                for answers in _timed(engine, asked, case, row, until):
                    said += answers
                    note(row)
    except (LeftOut, PlanError) as error:
        return row | {"left_out": str(error)}, said
    except (EngineError, SpacError, OSError, ValueError) as error:
        row["error"] = str(error)[-4000:]
    row["seconds"] = time.monotonic() - begin
    if "error" not in row:
        clock.fastest = min(clock.fastest or row["seconds"], row["seconds"])
    return row, said


def _ask(engine: LiveEngine, until: float, ids: list[list[int]], tokens: int) -> dict:
    return _turn(engine, until, {"prompts": ids, "tokens": tokens})


def _compared(engine: LiveEngine, asked: Asked, row: dict, until: float) -> list[list[int]]:
    """Adds to ``row`` what was answered, and returns the answers."""
    measured = _ask(engine, until, asked.compare, ANSWER)
    said: list[list[int]] = measured["tokens"]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]
    row |= {"tokens": sum(map(len, said)), "digest": digest, **_chosen(measured)}
    return said


def _timed(engine: LiveEngine, asked: Asked, case: Case, row: dict, until: float) -> Iterator[list[list[int]]]:
    """Adds measurements to ``row``, and yields the answers of each; what was measured before an error stays."""
    row["decode"] = []
    for size in asked.batches:
        ids, tokens = asked.short[:size], max(WARM, asked.decode_tokens * _WIDE // max(size, _WIDE))
        _ask(engine, until, ids, WARM)
        best = min((_ask(engine, until, ids, tokens) for _ in range(REPEATS)), key=_per_token)
        seconds, moved = _per_token(best), best["counters"].pop("bytes", {})  # the prompts' bytes are among them
        row["decode"].append(
            {
                "batch": size,
                "tokens": tokens,
                "ms_per_token": 1e3 * seconds,
                "tokens_per_second": size / seconds,
                "bytes": moved,
                "bytes_per_token": sum(moved.values()) / (size * tokens),
            }
            | _chosen(best)
        )
        yield best["tokens"]
    row["prompts"] = []
    for length, ids in asked.long.items():
        _ask(engine, until, ids[-1:], 1)
        answers = [_ask(engine, until, [each], 1) for each in ids[:-1]]
        row["prompts"].append(
            {
                "tokens": length,
                "ms": [1e3 * answer["ttft"][0] for answer in answers],
                "bytes": [sum(answer["counters"].get("bytes", {}).values()) for answer in answers],
            }
        )
        yield [answer["tokens"][0] for answer in answers]
    length, ids = max(asked.long.items())
    turn = {"beside": asked.short[:BESIDE], "long": ids[:1], "tokens": length}
    row["beside"] = {"requests": BESIDE, "tokens": length, **_turn(engine, until, turn)}
    yield []
    row["profile"] = _profile(engine, asked, case, until)
    yield []


def _together(engine: LiveEngine, asked: Asked, row: dict, until: float) -> Iterator[list[list[int]]]:
    """Adds what several agents got to ``row``, and yields their answers; the first run counts for nothing."""
    model, recording, row["agents"] = asked.models["agents"], asked.agents, []
    assert recording is not None, "the part has requests"
    for run, count in enumerate((1, *asked.numbers)):
        lines = [[request.line for request in turns] for turns in recording.agents(model, count, run)]
        found = _turn(engine, until, {"agents": lines, "first": recording.prefix_of(model, run)})
        if run:
            served = sorted(found["served"], key=lambda answer: (answer["agent"], answer["turn"]))
            measured = measures(served)
            moved = sum(found["counters"].get("bytes", {}).values()) / measured["tokens"]
            row["agents"].append({"agents": count, **measured, "bytes_per_token": moved})
            yield [answer["tokens"] for answer in served]


def _turn(engine: LiveEngine, until: float, turn: dict) -> dict:
    engine.timeout = max(1.0, until - time.monotonic())
    return engine.ask(turn)


def _profile(engine: LiveEngine, asked: Asked, case: Case, until: float) -> dict:
    """Returns where the time of a step of one request goes; which bytes move is not known of stock's offloaders."""
    found = _turn(engine, until, {"profile": asked.short[:1], "steps": PROFILED})
    if (shape := asked.shapes.get("serving")) is None or case.offload or "left_out" in found:
        return found
    moved = {name: _each_step(value) for name, value in found.pop("counters").items()}
    if case.is_stock:
        moved = {"hits": shape.moe_layers * shape.checkpoint.top_k}
    return divide(found | {"counters": moved}, moved, shape.checkpoint.expert_bytes[-1], shape.step_bytes)


def _each_step(counted: Any) -> Any:
    """Divides numbers, or dictionaries of them, by the steps of a profile."""
    if isinstance(counted, dict):
        return {name: _each_step(value) for name, value in counted.items()}
    return counted / PROFILED


def _per_token(measured: dict) -> float:
    """Returns the median over requests of the seconds per token after the first."""
    return statistics.median(measured["tpot"])


def _chosen(measured: dict) -> dict:
    """Returns what the plugin was, and the counters that a row keeps."""
    counters = {name: value for name, value in measured["counters"].items() if name in _COUNTED}
    said = {name: measured["choices"][name] for name in ("mode", "execution", "store") if name in measured["choices"]}
    return said | {"counters": counters}
