"""A server for hours: the same tokens as stock vLLM's throughout, and no process of it grows.

    python tests/soak/soak.py --steps 100000 --minutes 60

A quarter of the experts of the toy model (float32) is in slots, the others on disk; ngram drafts under ``guard=on``.
With V2's runner (``make soak RUNNER=v2``), whose guard leaves choosing to the device, drafts are those of an EAGLE-3
head, and the requests that it remembers may not exceed those that can run at once: it must forget each that ended.
Clients send requests that stock vLLM answered before, in a mix of kinds; some leave in the middle. In turns, budgets
are switched on and off through ``POST /spac/budget`` meanwhile: answers are compared if no budget was in force at any
time of the request.

Every second, resident bytes, file descriptors and threads of all processes of the server are sampled. The run fails if
one of them has a trend over the later half of the steps (see ``trend``). Bounds: for 10^5 steps, 32 MiB, 3 descriptors
and 3 threads, and in proportion for fewer, but not below 8 MiB and 2, which a short run cannot tell from one-time
allocations. With V2's runner it is 64 MiB: Triton's interpreter runs its steps, which are a hundred times fewer, and
pages of the KV cache are touched all along. 32 MiB are 336 bytes per step: less than one small tensor or a row of
routing that is kept for each step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "soak"), str(ROOT / "tests" / "integration")]

import exchange  # noqa: E402
import httpx  # noqa: E402
import serving  # noqa: E402
from exchange import PROMPTS, Request, chat, complete  # noqa: E402
from tqdm import tqdm  # noqa: E402
from trend import WARM_UP, Trend, trend  # noqa: E402

from benchmarks import common  # noqa: E402

CLIENTS = 8
ABORTS = 0.15  # of the requests
EXACT_SECONDS, LOSSY_SECONDS = 40, 8  # a turn
SAMPLE_SECONDS = 1.0
BUDGETS = (
    {"budget": 8, "when": "all"},
    {"budget": 12, "when": "decode", "coverage": "truncation"},
    {"mass": 0.6, "when": "all"},
    {"budget": 16, "when": "verify", "ranking": "router"},
    {"budget": 8, "when": "all", "ranking": "router", "coverage": "truncation"},
)
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
# a 10^5 steps; never less than
LIMITS = {"rss": (32 << 20, (64 if V2 else 8) << 20), "fds": (3, 2), "threads": (3, 2)}
REMEMBERED = 5 * CLIENTS  # requests that are there at once: one of a client is up to five of vLLM's
LONG = {"max_tokens": 120, "ignore_eos": True}


def requests() -> list[Request]:
    """What is asked, whose answers depend on nothing but the tokens."""
    plain = [complete(prompt, max_tokens=count) for prompt in PROMPTS for count in (4, 40)]
    others = [
        *(complete(prompt, **LONG) for prompt in PROMPTS[::3]),
        *(complete(prompt, stream=True, stream_options={"include_usage": True}) for prompt in PROMPTS[1::4]),
        *(chat(prompt, max_tokens=30) for prompt in PROMPTS[2::5]),
        *(chat(prompt, stream=True, max_tokens=30) for prompt in PROMPTS[3::6]),
        *(complete(prompt, n=2) for prompt in PROMPTS[::6]),
        *(complete(prompt, logprobs=2) for prompt in PROMPTS[1::6]),
        *(complete(prompt, echo=True, max_tokens=8) for prompt in PROMPTS[2::6]),
        *(complete(prompt, prompt_logprobs=1, max_tokens=4) for prompt in PROMPTS[3::8]),
        *(complete(prompt, stop=["self", "\n\n"], max_tokens=60) for prompt in PROMPTS[::5]),
        *(complete(prompt, stop_token_ids=list(range(200, 260)), max_tokens=60) for prompt in PROMPTS[1::5]),
        *(complete(prompt, repetition_penalty=1.2, frequency_penalty=0.3) for prompt in PROMPTS[2::7]),
        *(complete(prompt, max_tokens=1) for prompt in PROMPTS[::4]),
        *(complete([5 + (i * k) % 900 for i in range(504)], max_tokens=8) for k in (1, 3, 7)),
        *(complete(PROMPTS[k : k + 5], max_tokens=12) for k in (0, 7, 14)),
        complete(""),
        complete([5] * 600),
    ]
    if not V2:  # whose kernel for grammars Triton's interpreter cannot run: stock's engine ends
        others.append(complete("import os", structured_outputs={"regex": "[0-9a-f]{6}"}))
    return plain + others


def compared(answer: dict) -> dict:
    """The part of an answer that is tokens, or why it was refused."""
    if answer["status"] != 200:
        return answer
    choices = [
        {key: choice.get(key) for key in ("text", "token_ids", "finish_reason", "message")}
        for choice in answer["choices"]
    ]
    return {"choices": choices, "usage": answer["usage"]}


def stock_answers(asked: Sequence[Request]) -> list[dict]:
    """What stock vLLM says to each, one by one; a server that is gone afterwards."""
    scratch = tempfile.TemporaryDirectory(prefix="spac-soak-")
    with scratch as folder, serving.started(Path(folder)) as stock, exchange.client(stock.url) as http:
        return [compared(exchange.ask(http, each)) for each in tqdm(asked, desc="Stock vLLM", unit="request")]


@dataclass
class Tally:
    """What clients have seen."""

    compared: int = 0
    aborted: int = 0
    lossy: int = 0  # answered while a budget was in force at some time
    lossy_differ: int = 0
    wrong: list[dict] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return self.compared + self.aborted + self.lossy


class Clients:
    """Threads that ask one request after the other until they are stopped, or find something wrong.

    Attributes:
        tally: what they have seen.
    """

    def __init__(self, url: str, asked: Sequence[Request], answers: Sequence[dict], seed: int) -> None:
        self.tally = Tally()
        self._url, self._asked, self._answers = url, asked, answers
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._turn = 0  # odd while a budget may be in force
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(f"{seed}-{n}"),)) for n in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def budget_changes(self) -> None:
        """To be called before one is switched on, and after it was switched off."""
        self._turn += 1

    @property
    def failed(self) -> bool:
        return bool(self.tally.wrong or self.tally.errors)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, rng: random.Random) -> None:
        with exchange.client(self._url) as http:
            while not self._stop.is_set() and not self.failed:
                index = rng.randrange(len(self._asked))
                try:
                    if rng.random() < ABORTS:
                        self._abort(http, rng)
                    else:
                        self._compare(http, index)
                except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                    with self._lock:
                        self.tally.errors.append(f"{type(error).__name__}: {error}")

    def _compare(self, http: httpx.Client, index: int) -> None:
        before = self._turn
        found, expected = compared(exchange.ask(http, self._asked[index])), self._answers[index]
        exact = before % 2 == 0 and self._turn == before
        with self._lock:
            if not exact:
                self.tally.lossy += 1
                self.tally.lossy_differ += found != expected
            elif found == expected:
                self.tally.compared += 1
            else:
                self.tally.wrong.append({"asked": self._asked[index].json, "expected": expected, "found": found})

    def _abort(self, http: httpx.Client, rng: random.Random) -> None:
        request = complete(rng.choice(PROMPTS), stream=True, **LONG)
        patience = rng.choice([0, 1, 2, 8, 20])
        with http.stream("POST", request.path, json=request.json) as response:
            for seen, _ in enumerate(exchange.events(response)):
                if seen >= patience:
                    break
        with self._lock:
            self.tally.aborted += 1


class Watch:
    """Samples of a server's processes over its steps."""

    def __init__(self, server: serving.Server) -> None:
        self.samples: list[dict] = []
        self.remembered = 0  # requests, by V2's guard, at most
        self._server = server
        self._start = time.monotonic()

    def sample(self) -> int:
        """Take one; returns the steps of the engine."""
        stats = self._server.stats()
        steps = sum(stats["steps"].values())
        found = serving.resources(self._server)
        self.samples.append(
            {"seconds": time.monotonic() - self._start, "steps": steps, "total": serving.total(found), "by": found}
        )
        self.remembered = max(self.remembered, stats.get("device_chooser", {}).get("remembered", 0))
        return steps

    def trends(self) -> dict[str, Trend]:
        """Of the whole server."""
        return {what: self._trend(what, [sample["total"] for sample in self.samples]) for what in LIMITS}

    def by_process(self) -> dict[str, dict[str, float]]:
        """Growth of each process behind the warm-up, for whoever looks for a leak."""
        names = set.intersection(*(set(sample["by"]) for sample in self.samples))
        return {
            name: {what: self._trend(what, [s["by"][name] for s in self.samples]).growth for what in LIMITS}
            for name in sorted(names)
        }

    def _trend(self, what: str, counts: Sequence[dict]) -> Trend:
        steps = [sample["steps"] for sample in self.samples]
        rate, least = LIMITS[what]
        limit = max(least, rate * (1 - WARM_UP) * (steps[-1] - steps[0]) / 1e5)
        return trend(steps, [count[what] for count in counts], limit)


def soak(
    server: serving.Server, clients: Clients, watch: Watch, goal: int, minutes: float, bar: Callable[[int], object]
) -> int:
    """Until ``goal`` steps are done or the time is over, or something is wrong; returns how often budgets changed."""
    end, turns = time.monotonic() + 60 * minutes, 0
    try:
        while _watch(clients, watch, EXACT_SECONDS, end, goal, bar):
            clients.budget_changes()
            _set_budget(server, BUDGETS[turns % len(BUDGETS)])
            turns += 1
            more = _watch(clients, watch, LOSSY_SECONDS, end, goal, bar)
            _set_budget(server, {})
            clients.budget_changes()
            if not more:
                break
    finally:
        clients.stop()
    return turns


def _watch(clients: Clients, watch: Watch, seconds: float, end: float, goal: int, bar: Callable[[int], object]) -> bool:
    """Sample for so many seconds, at most until ``end``; whether there is more to do."""
    until = min(end, time.monotonic() + seconds)
    while not clients.failed and time.monotonic() < until:
        steps = watch.sample()
        bar(steps)
        if steps >= goal:
            return False
        time.sleep(SAMPLE_SECONDS)
    return not clients.failed and time.monotonic() < end


def _set_budget(server: serving.Server, body: dict) -> None:
    answer = httpx.post(f"{server.url}/spac/budget", json=body, timeout=120)
    assert answer.status_code == 200, answer.text


def problems(clients: Tally, trends: dict[str, Trend], stats: dict, turns: int, remembered: int) -> list[str]:
    """What is wrong with a run, a line each; also what was not tried, for then nothing was shown."""
    found = []
    if clients.wrong:
        found.append(f"{len(clients.wrong)} answers are not stock's, the first: {json.dumps(clients.wrong[0])}")
    if clients.errors:
        found.append(f"{len(clients.errors)} requests failed, the first: {clients.errors[0]}")
    for what, each in trends.items():
        if each.grows:
            found.append(f"{what} grow by {each.growth:.0f} (at least {each.low:.0f}, allowed {each.limit:.0f})")
    if remembered > REMEMBERED:
        found.append(f"the guard remembers {remembered} requests, and at most {REMEMBERED} were there at once")
    if V2:
        guarded = {
            "the guard remembered no request": remembered,
            "too few requests to tell whether they are forgotten": clients.answered > 2 * REMEMBERED,
        }
    else:
        guarded = {"the guard chose one length only": len(stats["guard"]["steps"]) > 1}
    tried = {
        "no answer was compared": clients.compared,
        "no request was aborted": clients.aborted,
        "no budget was in force": turns and clients.lossy_differ,
        "no expert lost its slot": stats["misses"] > stats["slots"],
        "nothing was verified": stats["steps"].get("verify", 0),
        **guarded,
    }
    return found + [text for text, count in tried.items() if not count]


def run(goal: int, minutes: float, seed: int) -> dict:
    """One soak: the result, whose ``problems`` should be empty."""
    asked = requests()
    answers = stock_answers(asked)
    with tempfile.TemporaryDirectory(prefix="spac-soak-") as scratch:
        drafts = serving.EAGLE3 if V2 else serving.NGRAM
        flags = [*serving.offloaded(Path(scratch, "disk")), "--spac-http", "control", *drafts]
        with serving.started(Path(scratch), *flags) as server:
            clients, watch = Clients(server.url, asked, answers, seed), Watch(server)
            with tqdm(total=goal, desc="Soak", unit="step", smoothing=0.02) as bar:

                def show(steps: int) -> None:
                    tally, total = clients.tally, watch.samples[-1]["total"]
                    bar.set_postfix_str(f"{tally.compared} equal, {tally.aborted} aborted, {total['rss'] >> 20} MiB")
                    bar.update(steps - bar.n)

                try:
                    turns = soak(server, clients, watch, goal, minutes, show)
                    serving.settle(server)
                    watch.sample()
                    stats = server.stats()
                except (OSError, httpx.HTTPError, AssertionError):
                    sys.stderr.write(server.log.read_text()[-5000:])
                    raise
    trends = {} if clients.failed else watch.trends()
    return {
        "what": "soak on the toy model" + ", V2's runner" * V2,
        "problems": problems(clients.tally, trends, stats, turns, watch.remembered),
        "seconds": watch.samples[-1]["seconds"],
        "steps": watch.samples[-1]["steps"],
        "budget_turns": turns,
        "requests": asdict(clients.tally),
        "remembered": watch.remembered,
        "trends": {what: asdict(each) | {"grows": each.grows} for what, each in trends.items()},
        "growth_by_process": watch.by_process() if trends else {},
        "stats": stats,
        "samples": watch.samples[:: max(1, len(watch.samples) // 400)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=100_000, help="engine steps after which it ends")
    parser.add_argument("--minutes", type=float, default=60, help="time after which it ends, if that is earlier")
    output = common.RESULTS / ("soak_toy_v2.json" if V2 else "soak_toy.json")
    parser.add_argument("--output", type=Path, default=output, help="the result")
    parser.add_argument("--seed", type=int, default=0, help="of the mix of requests")
    options = parser.parse_args()
    common.exit_on_sigterm()
    result = run(options.steps, options.minutes, options.seed)
    common.write_result(options.output, result | {"provenance": common.provenance()})
    tally = result["requests"]
    print(
        f"{result['steps']} steps in {result['seconds'] / 60:.0f} min: {tally['compared']} answers equal to stock's, "
        f"{tally['aborted']} aborted, {tally['lossy_differ']} of {tally['lossy']} changed by budgets"
    )
    for what, each in result["trends"].items():
        growth = f"{each['growth']:+.0f} ({each['low']:+.0f} … {each['high']:+.0f})"
        print(f"{what}: {growth} behind the warm-up, allowed {each['limit']:.0f}")
    sys.exit("\n".join(result["problems"]) or 0)


if __name__ == "__main__":
    main()
