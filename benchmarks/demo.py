"""Compares a toy model with a quarter of its experts in fast memory with the same model on stock vLLM.

    make demo                                  the comparison
    .venv/bin/python benchmarks/demo.py --serve    leave the server running

Starts ``vllm serve`` twice, one after the other, on the loopback interface, and ends with exit code 1 if the
tokens differ. The plugin verifies drafts and stock has none, so their steps have other numbers of rows; where the
rounding of bfloat16 kernels depends on that (a CPU with AMX), a near-tie may resolve differently in stock vLLM too.
Hence float32.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_spac.tools.machine.server_stats import RequestNumbers

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "benchmarks" / "toy" / "models"
LOGS = ROOT / ".cache" / "demo"
NAME = "toy"
DRAFT_TOKENS = 4
PROMPTS = (
    'def read_file(path):\n    """Return the text of a file."""\n    with open(',
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "import os\nimport sys\n\ndef main(argv=None):\n    if argv is None:\n",
    "    try:\n        value = self._cache[key]\n    except KeyError:\n",
)
STATS_KEYS = (
    *("mode", "store", "policy", "slots", "experts", "slot_bytes", "expert_bytes"),
    *("hits", "misses", "loads", "bytes", "stall_seconds", "waves", "steps"),
)

console = Console(highlight=False)
# Requests to the loopback interface must not go through a proxy set in the environment.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(Exception):
    """The demo cannot continue; the message is the reason."""


@dataclass(frozen=True)
class Reply:
    """One completion; ``tokens`` is None if the server does not report token ids."""

    text: str
    tokens: list[int] | None


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


# --- the two servers -------------------------------------------------------------------------------------------------


def common_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the arguments of both servers: they fit in a few GB of free memory and compile nothing."""
    return [
        *("--served-model-name", NAME),
        *("--max-model-len", "512"),
        *("--max-num-seqs", "16"),
        *("--gpu-memory-utilization", str(options.memory)),
        *("--dtype", options.dtype),
        "--enforce-eager",
    ]


def spac_arguments(options: argparse.Namespace) -> list[str]:
    plugin = ["--plugin", "spac", "--spac-slots", options.slots, "--spac-store", "disk", "--spac-tuned", "off"]
    return [*([] if options.control else plugin), "--speculative-config", json.dumps(speculation(options.draft))]


def speculation(draft: Path) -> dict[str, Any]:
    if (draft / "config.json").exists():
        return {"method": "eagle3", "model": str(draft), "num_speculative_tokens": DRAFT_TOKENS}
    return {
        "method": "ngram",
        "num_speculative_tokens": DRAFT_TOKENS,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


def environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return offline | {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}


def spac_server(options: argparse.Namespace) -> Server:
    arguments = [str(options.model), *spac_arguments(options), *common_arguments(options)]
    title = "control (vLLM with speculative decoding)" if options.control else f"spac (slots: {options.slots})"
    return Server(title, arguments, environment(), options.timeout)


def stock_server(options: argparse.Namespace) -> Server:
    # An empty list of allowed plugins: none is loaded, as if not installed.
    env = environment() | {"VLLM_PLUGINS": ""}
    return Server("stock vLLM", [str(options.model), *common_arguments(options)], env, options.timeout)


# --- completions -----------------------------------------------------------------------------------------------------


def complete(
    server: Server, prompt: str, tokens: int, show: bool, arrived: Callable[[int], None] | None = None
) -> Reply:
    """Requests one greedy completion, streamed to the terminal if ``show``; ``arrived``: told how many tokens came."""
    ids: list[int] = []
    text, reported = "", True
    direct = openai.DefaultHttpxClient(trust_env=False)
    base = f"{server.url}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=300, http_client=direct) as client:
        stream = client.completions.create(
            model=NAME,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.text
                part = (choice.model_extra or {}).get("token_ids")
                reported = reported and part is not None
                ids += part or []
                if arrived is not None:
                    arrived(len(ids))
                if show:
                    console.print(choice.text, end="", markup=False, style="green")
    return Reply(text, ids if reported else None)


def complete_all(server: Server, tokens: int, show: bool) -> list[Reply]:
    replies = []
    for number, prompt in enumerate(PROMPTS, 1):
        if show:
            console.rule(f"toy model, prompt {number} of {len(PROMPTS)}", align="left", style="dim")
            console.print(prompt, end="", markup=False, style="dim")
        try:
            replies.append(complete(server, prompt, tokens, show))
        except openai.OpenAIError as error:
            time.sleep(2)  # a server that dies takes a moment to be reaped
            server.check_alive()
            raise DemoError(f"{server.title}: prompt {number} failed: {error}\n{server._last_words()}") from error
        if show:
            console.print()
    return replies


def difference(ours: Reply, stock: Reply) -> str | None:
    """Returns where two replies diverge, or None; by token ids, or by text if a server reports no ids."""
    if ours.tokens is None or stock.tokens is None:
        return None if ours.text == stock.text else "texts differ"
    if ours.tokens == stock.tokens:
        return None
    pairs = zip(ours.tokens, stock.tokens, strict=False)
    shorter = min(len(ours.tokens), len(stock.tokens))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return f"from token {place + 1}"


# --- reports ---------------------------------------------------------------------------------------------------------


def comparison(ours: list[Reply], stock: list[Reply]) -> tuple[Table, bool]:
    table = Table(title="toy model: the plugin against stock vLLM, greedy", title_justify="left")
    for column in ("prompt", "compared", "equal"):
        table.add_column(column)
    equal = True
    for prompt, a, b in zip(PROMPTS, ours, stock, strict=True):
        parted = difference(a, b)
        equal = equal and parted is None
        compared = "texts" if a.tokens is None or b.tokens is None else f"{len(b.tokens)} token ids"
        table.add_row(
            escape(prompt.strip().splitlines()[0]), compared, "[green]yes" if parted is None else f"[red]no, {parted}"
        )
    return table, equal


def counters(server: Server) -> list[tuple[str, str]]:
    """Returns rows from ``GET /spac/stats``; a missing key is reported, not skipped."""
    try:
        found = json.loads(server.get("/spac/stats"))
        workers, requests = found["workers"], RequestNumbers().add(found["requests"])
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise DemoError(f"GET /spac/stats: {error!r}; did the plugin load? See {server.log}") from error
    rows = [(name, requests[name]) for name in ("time to first token", "time per token of a request")]
    for number, worker in enumerate(workers):
        prefix = f"worker {number}: " if len(workers) > 1 else ""
        rows += [(prefix + title, value) for title, value in worker_rows(worker)]
    return rows


def worker_rows(worker: dict[str, Any]) -> list[tuple[str, str]]:
    missing = [key for key in STATS_KEYS if key not in worker]
    if missing:
        return [("[yellow]not in /spac/stats", ", ".join(missing)), ("/spac/stats", escape(json.dumps(worker)))]
    needed = worker["hits"] + worker["misses"]
    share = f" ({worker['hits'] / needed:.0%})" if needed else ""
    moved = ", ".join(f"{size(count)} from {path}" for path, count in worker["bytes"].items() if count)
    steps = ", ".join(f"{count} {kind}" for kind, count in worker["steps"].items() if count)
    return [
        ("mode, store, policy", f"{worker['mode']}, {worker['store']}, {worker['policy']}"),
        ("experts in fast memory", f"{worker['slots']} of {worker['experts']} ({size(worker['slot_bytes'])})"),
        ("hits", f"{worker['hits']:,} of {needed:,}{share}"),
        ("misses", f"{worker['misses']:,}, {worker['loads']:,} loads"),
        ("bytes moved", moved or "none"),
        ("layers waited for loads", f"{worker['stall_seconds']:.2f} s"),
        ("forwards", f"{steps or 'none'}; {worker['waves']:,} waves"),
    ]


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def acceptance(server: Server, method: str) -> tuple[str, str]:
    """Returns a row with the mean tokens per verify step: one, plus the accepted draft tokens."""
    totals: dict[str, float] = {}
    try:
        text = server.get("/metrics").decode()
    except OSError as error:
        raise DemoError(f"GET /metrics: {error!r}; see {server.log}") from error
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    drafts = totals.get("vllm:spec_decode_num_drafts_total")
    accepted = totals.get("vllm:spec_decode_num_accepted_tokens_total")
    title = f"acceptance length ({method}, {DRAFT_TOKENS} draft tokens)"
    if drafts is None or accepted is None:
        return title, "[yellow]not in /metrics"
    return title, f"{1 + accepted / drafts:.2f} over {drafts:.0f} drafts" if drafts else "nothing was drafted"


def own_command(options: argparse.Namespace) -> str:
    """Returns the command that starts this server from the checkout."""
    arguments = [*spac_arguments(options), *common_arguments(options)]
    words = [str(part).replace(f"{ROOT}/", "") for part in (options.model, *arguments)]
    return f"VLLM_CPU_KVCACHE_SPACE=1 .venv/bin/vllm serve {shlex.join(words)}"


# --- the two ways to run ---------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> int:
    with spac_server(options) as server:
        ours = complete_all(server, options.tokens, show=True)
        rows = [] if options.control else counters(server)
        rows.append(acceptance(server, speculation(options.draft)["method"]))
    with stock_server(options) as server, console.status("stock vLLM: the same prompts"):
        stock = complete_all(server, options.tokens, show=False)
    table, equal = comparison(ours, stock)
    console.print("\n", table, sep="")
    numbers = Table(title="toy model: counters", title_justify="left", show_header=False)
    for row in rows:
        numbers.add_row(*row)
    console.print(numbers)
    console.print("Start this server yourself:")
    console.print(own_command(options), markup=False, soft_wrap=True, style="bold")
    if not equal:
        console.print(f"[red]The tokens differ.[/] Logs: {LOGS}")
        if options.dtype != "float32":
            console.print(
                f"In {options.dtype} stock vLLM may differ from itself as much: compare with --dtype float32."
            )
    return 0 if equal else 1


def serve(options: argparse.Namespace) -> int:
    with spac_server(options) as server:
        body = json.dumps({"model": NAME, "prompt": "def main(", "max_tokens": 32, "temperature": 0})
        request = f"curl {server.url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        console.print(f"toy model at {server.url}; Ctrl-C ends it. Try:")
        console.print(f"{request}\ncurl {server.url}/spac/stats", markup=False, soft_wrap=True, style="bold")
        with server.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            while True:
                console.print(log.read().decode(errors="replace"), end="", markup=False, soft_wrap=True)
                server.check_alive()
                time.sleep(0.5)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="leave the server running in the foreground")
    parser.add_argument("--model", type=Path, default=MODELS / "target", help="the toy checkpoint")
    parser.add_argument("--draft", type=Path, default=MODELS / "eagle3", help="EAGLE-3 head; n-grams if missing")
    parser.add_argument("--slots", default="25%", help="experts in fast memory (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per prompt (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of both servers (default: %(default)s, see above)")
    parser.add_argument("--memory", type=float, default=0.3, help="--gpu-memory-utilization (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a server may take to start")
    parser.add_argument("--control", action="store_true", help="without the plugin: speculative decoding alone")
    options = parser.parse_args(arguments)
    options.model, options.draft = options.model.resolve(), options.draft.resolve()
    return options


def on_signal(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def main() -> int:
    options = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):  # end through the context managers, so that no server stays behind
        signal.signal(number, on_signal)
    try:
        if not (options.model / "config.json").exists():
            raise DemoError(f"no toy model in {options.model}: see benchmarks/toy")
        return serve(options) if options.serve else compare(options)
    except DemoError as error:
        console.print(f"[red]demo:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\ndemo: stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
