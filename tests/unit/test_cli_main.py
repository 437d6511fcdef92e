"""The command ``vllm-spac``: what it prints, what it refuses, and what it does not touch."""

from __future__ import annotations

import fcntl
import json
import pwd
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_spac import __version__
from vllm_spac.cache import sizing
from vllm_spac.cli import stats
from vllm_spac.cli.main import app
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.former import FORMER_COMMANDS
from vllm_spac.config.types import SlotCount, flag
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import ConfigError, StoreError
from vllm_spac.recording.metrics import summary
from vllm_spac.storage import disk
from vllm_spac.storage.checkpoint import headers, packed_folder
from vllm_spac.system import machine
from vllm_spac.system.files import partial_of
from vllm_spac.tools.machine import gather, installation
from vllm_spac.tools.machine.facts import Installation, Library, System
from vllm_spac.tools.machine.server_stats import RequestNumbers, WaitShares

FINGERPRINT = "0123456789abcdef" * 2
EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 16, 4
W_E = 3 * HIDDEN * INNER * 2  # bytes of an expert: three bf16 matrices
TWO_OF_EIGHT = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}


def run(*arguments, code: int = 0, **options) -> str:
    """Output of the command on a wide terminal, with lines of text joined."""
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "VLLM_API_KEY": None, "OPENAI_API_KEY": None}
    result = CliRunner().invoke(app, [str(a) for a in arguments], env=environment, **options)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """``inspected(model)`` -> what ``check MODEL`` prints, on a machine that is made up and healthy."""
    library = Library("2.13.0", "==2.13.0", fits=True)
    monkeypatch.setattr(installation, "installation", lambda: Installation("0.32.0", libraries={"torch": library}))
    machine = System(frozenset(range(8)), None, (0,), 64 << 30, 60 << 30, None, None, "always")
    monkeypatch.setattr(gather, "system", lambda: machine)

    def check(model: object, code: int = 0) -> str:
        given = ["check", str(model), "--disk-dir", str(tmp_path / "packed")]
        done = CliRunner().invoke(app, given, env={"COLUMNS": "2000", "NO_COLOR": "1"})
        assert done.exit_code == code, done.output
        return " ".join(done.output.split())

    return check


def test_version_and_help():
    assert run("--version") == f"vllm-spac {__version__}"
    for name in ("check", "stats", "packed"):
        assert name in run("--help")
        assert f"Examples vllm-spac {name}" in run(name, "--help")


def test_nine_commands_are_shown_and_the_others_say_what_replaces_them() -> None:
    commands = vars(typer.main.get_command(app))["commands"]
    names = [name for name, command in commands.items() if not command.hidden]
    assert len(names) == 9 and commands["knobs"].hidden
    for former, replaced in FORMER_COMMANDS.items():
        said = run(*former.split(), code=2)
        assert f"vllm-spac {former} is gone" in said and replaced.split()[-1] in said.replace("│", "")
        if replaced.startswith("use vllm-spac "):
            first, *more = (part for part in replaced.removeprefix("use vllm-spac ").split() if part != "MODEL")
            assert first in names and run(first, *(part for part in more if part[0] != "-"), "--help")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--kernels --measure", "--kernels and --measure are checks of their own; name one"),
        ("--store host", "--store is of --measure; add it"),
        ("--seconds 3", "--seconds is of --kernels or --engines; add it"),
        ("--engines --disk", "--disk is of a check without --engines, not of --engines"),
        ("--measure --json", "--json is of "),
        ("--revision main", "name one"),
        ("--yes", "add --fix"),
    ],
)
def test_options_of_another_check_are_refused(options: str, said: str) -> None:
    assert said in run("check", *options.split(), code=1)


TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "none1.trace"


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("knobs", [flag(name) for name in SpacConfig.model_fields]),
        (f"plan {TOY} --machine rtx4090 --fast-memory 1GiB", ["tokens/s", "limited", "first token"]),
        (f"trace show {TRACE}", ["layers", "hits of LRU", "experts"]),
        (f"trace simulate {TRACE} --profile rtx4090 --slots 25% --execution both --policy lru", ["TPOT", "bound"]),
    ],
)
def test_nothing_is_cut_at_80_columns(command, parts):
    """That tables are no wider is tested in ``test_tables.py``."""
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0 and "…" not in result.output, result.output
    assert [part for part in parts if part not in result.output] == []


def write_model(folder: Path, names: dict[str, tuple[int, ...]], **config) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "num_hidden_layers": 3, **config}))
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in names.items()}
    save_file(tensors, folder / "a.safetensors")
    return folder


def one_by_one(layers=(1, 2), experts=EXPERTS, stem="mlp") -> dict[str, tuple[int, ...]]:
    """A dense first layer, shared experts and a router: none of them is a routed expert."""
    names = {"model.embed_tokens.weight": (32, HIDDEN), "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN)}
    for layer in layers:
        prefix = f"model.layers.{layer}.{stem}"
        names[f"{prefix}.gate.weight"] = (EXPERTS, HIDDEN)
        names[f"{prefix}.shared_experts.up_proj.weight"] = (INNER, HIDDEN)
        for expert in range(experts):
            for part, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                names[f"{prefix}.experts.{expert}.{part}_proj.weight"] = shape
    return names


def fused(layers=(0, 1, 2)) -> dict[str, tuple[int, ...]]:
    parts = {"gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER), "down_proj": (EXPERTS, INNER, HIDDEN)}
    names = {f"model.layers.{layer}.mlp.experts.{part}": shape for layer in layers for part, shape in parts.items()}
    return names | {"lm_head.weight": (32, HIDDEN)}


@pytest.mark.parametrize(
    ("names", "config", "layers"),
    [
        (one_by_one(), TWO_OF_EIGHT, 2),
        (one_by_one(stem="moe"), {"num_local_experts": 8, "moe_topk": 2}, 2),
        (fused(), {"n_routed_experts": 8, "moe_top_k": [2, 2]}, 3),
        (fused(), {"text_config": TWO_OF_EIGHT}, 3),
    ],
)
def test_check_reads_sizes(inspected, tmp_path, names, config, layers):
    folder = write_model(tmp_path, names, **config)
    found = headers.read_checkpoint(folder)
    assert (found.experts, found.top_k, len(found.layer_bytes)) == (EXPERTS, TOP_K, layers)
    assert found.expert_bytes == [W_E]
    assert sum(found.layer_bytes.values()) + found.other_bytes == sum(2 * torch.Size(s).numel() for s in names.values())
    assert "supported: vllm serve" in inspected(folder)


def test_check_counts_slots_as_the_plugin_does(inspected, tmp_path):
    folder = write_model(tmp_path, one_by_one(), **TWO_OF_EIGHT)
    found = headers.read_checkpoint(folder)
    shape = MoEShape(("1", "2"), EXPERTS, TOP_K, {"w": TensorSpec((W_E // 2,), torch.bfloat16)})
    smallest = found.smallest_percent()
    for percent in range(smallest, 101):
        assert found.slots(percent) == [(sizing.resolve(SlotCount.parse(f"{percent}%"), shape, 1 << 30), W_E)]
    with pytest.raises(ConfigError):
        sizing.resolve(SlotCount.parse(f"{smallest - 1}%"), shape, 1 << 30)
    assert f"smallest --spac-slots: {smallest}%" in inspected(folder)


@pytest.mark.parametrize(
    ("quantisation", "flags"),
    [
        ({}, ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, " --moe-backend triton"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
            " --quantization moe_wna16 --moe-backend triton",
        ),
        ({"quant_method": "awq", "bits": 4, "zero_point": True}, " --quantization moe_wna16 --moe-backend triton"),
        ({"quant_method": "mxfp4"}, " --spac-plane pointers --moe-backend marlin"),
    ],
    ids=["none", "fp8", "gptq", "awq", "mxfp4"],
)
def test_check_says_how_to_serve(inspected, tmp_path, quantisation, flags):
    folder = write_model(tmp_path, one_by_one(), **TWO_OF_EIGHT, quantization_config=quantisation)
    said, command = inspected(folder), f"vllm serve {folder} --plugin spac --spac-slots 25%"
    if quantisation:
        assert said.endswith(f"supported on a GPU: {command}{flags} supported on a CPU: {command}")
    else:
        assert said.endswith(f"supported: {command}")


def test_check_leaves_draft_layers_out(tmp_path):
    folder = write_model(tmp_path, one_by_one((1, 2, 3)), **TWO_OF_EIGHT)
    found = headers.read_checkpoint(folder)
    assert list(found.layer_bytes) == [1, 2] and found.draft_bytes == EXPERTS * W_E


def test_check_reads_only_files_of_the_index(tmp_path):
    folder = write_model(tmp_path, one_by_one(), **TWO_OF_EIGHT)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    save_file({"copy": torch.zeros(1000)}, folder / "consolidated.safetensors")
    assert headers.read_checkpoint(folder).other_bytes < 4000


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        ({"lm_head.weight": (2, 2)}, {}, "is a dense model"),
        ({"lm_head.weight": (2, 2)}, {"num_experts": None}, "is a dense model"),
        (one_by_one(), {"num_experts": 8}, "does not say how many experts a token uses"),
        (one_by_one(experts=7), TWO_OF_EIGHT, "7 experts"),
        ({"a": (2,)}, TWO_OF_EIGHT, "none of its tensors is one"),
        (one_by_one(), TWO_OF_EIGHT | {"quantization_config": {"quant_method": "quark"}}, "quantised experts (quark)"),
    ],
)
def test_check_refuses_with_the_reason(inspected, tmp_path, names, config, message):
    assert message in inspected(write_model(tmp_path, names, **config), code=1)


def test_check_refuses_what_is_no_checkpoint(inspected, tmp_path):
    assert "is not a folder" in inspected(tmp_path / "absent", code=1)
    assert "is a folder without config.json" in inspected(tmp_path, code=1)
    (tmp_path / "config.json").write_text('{"num_experts": 8, "moe_topk": 2}')
    assert "name a folder with its *.safetensors" in inspected(tmp_path, code=1)
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 16)
    assert "is not a complete safetensors file" in inspected(tmp_path, code=1)
    assert "is not a folder" in inspected("x" * 5000, code=1)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the machine does not know, as in containers with a number of their own."""

    def unknown(uid: int):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)


@pytest.mark.parametrize(
    "command",
    [
        *(
            "packed",
            "check --measure --expert-bytes 10000",
            "check",
            "cluster show",
            "cluster stop",
            "cluster start --file /nowhere/cluster.json",
        ),
        *("cluster start", f"plan {TOY} --machine here", f"tune {TOY}", f"tune {TOY} --prompts ~/texts.txt"),
        f"quality sweep {TOY} --budgets 2 --prompts ~/texts.txt",
    ],
)
def test_a_user_without_a_home_folder_reads_one_sentence(homeless, command: str) -> None:
    assert "not know whose home folder that is; write the path out, or set HOME" in run(*command.split(), code=1)


def test_a_user_without_a_home_folder_can_name_the_others(homeless, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--spac-disk-dir .*set HOME"):
        _ = SpacConfig().folder
    assert SpacConfig(disk_dir=tmp_path).folder == tmp_path
    assert machine.command(["plan", f"{tmp_path}/a"], tmp_path) == "plan a"
    assert "tokens/s" in run("plan", TOY, "--machine", "rtx4090", "--fast-memory", "1GiB")


# -- stats --


@pytest.mark.parametrize("name", ["packed", "check"])
@pytest.mark.parametrize("folder", ["~nouser", "x" * 5000])
def test_a_folder_that_no_machine_has(name, folder):
    options = ["--measure", "--expert-bytes", "10000"] if name == "check" else []
    assert "--disk-dir" in run(name, "--disk-dir", folder, *options, code=1)


WORKER = {"mode": "exact", "slots": 16, "expert_bytes": 2048, "hits": 3, "misses": 1, "stall_seconds": 0.5}
WORKER |= {"bytes": {"disk": 3 << 20}, "steps": {"prefill": 1, "decode": 1234}}


@pytest.fixture
def asked() -> list[str | None]:
    """The keys that servers of ``serve`` were sent."""
    return []


@pytest.fixture
def serve(asked):
    """``serve(status, body, headers)`` -> URL of a server that always gives this answer."""
    servers = []

    def start(status: int, body: str = json.dumps({"workers": [WORKER]}), headers: dict[str, str] | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.headers["Authorization"])
                self.send_response(status if self.path == "/spac/stats" else 500)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body.encode())

            log_message = lambda *args: None  # noqa: E731

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_stats_shows_what_matters_of_each_worker_in_words(serve):
    """And nothing that has not happened."""
    text = run("stats", serve(200, json.dumps({"workers": [WORKER, {**WORKER, "hits": 1}]})) + "/")
    for part in ("hit rate │ 75.0% │ 50.0%", "experts loaded │ 3.0 MiB", "waiting for experts │ 0.4 ms per step"):
        assert part in text
    assert "_" not in text and "CPU" not in text and "read ahead" not in text
    everything = run("stats", "--all", serve(200, json.dumps({"workers": [WORKER, {**WORKER, "cpu_late": 0}]})))
    for part in ("bytes: disk │ 3.0 MiB", "steps: decode │ 1,234", "stall seconds │ 0.500", "cpu late │ │ 0"):
        assert part in everything


def test_a_worker_in_ten_rows_at_most():
    """Of one that does all that a worker can do; counters that are zero give no row."""
    worker = WORKER | {"experts": 64, "resident": 12, "slot_bytes": 32768, "store": "disk", "host_experts": 20}
    worker |= {"cpu_experts": 1, "prefetches": 8, "prefetch_hits": 6, "policy": "reuse", "guard": {"draft_length": 3}}
    assert summary(worker, tokens=12, waited=0.25) == {
        "mode": "exact",
        "experts in fast memory": "12 of 64, 32.0 KiB",
        "the others": "disk, 20 of them in host memory",
        "hit rate": "75.0%",
        "experts loaded": "256.0 KiB per generated token",
        "waiting for experts": "0.4 ms per step, now 25% of the time",
        "computed on the CPU": "25.0% of experts",
        "read ahead": "8 experts, 75% used",
    }
    failed = summary(worker | {"read_retries": 1, "prefetch_failed": 2, "stopped": {"trace": "disk full"}})
    assert failed["reads that failed"] == "3" and failed["recordings that stopped"] == "trace"
    assert failed["experts loaded"] == "3.0 MiB"
    assert (
        summary({name: 0 for name in worker if name not in ("bytes", "steps", "guard", "mode", "store", "policy")})
        == {}
    )


def test_the_share_of_the_last_minute_that_layers_waited():
    waits = WaitShares()
    assert waits.add([1.0, 2.0], now=100.0) == (None, None)
    assert waits.add([2.0, 2.0], now=110.0) == (0.1, 0.0)
    assert waits.add([12.0, 2.0], now=165.0) == (pytest.approx(10 / 55), 0.0), "of the last minute"
    assert waits.add([0.0, 0.0], now=170.0) == (None, None), "the server was started again"


REQUESTS = {"running": 2, "waiting": 1, "tokens": 1000, "first_token_seconds": 1.0, "first_tokens": 4}
REQUESTS |= {"token_seconds": 0.1, "finished": 2}


def test_requests_of_the_last_minute():
    numbers = RequestNumbers()
    first = numbers.add(REQUESTS, now=100.0)
    assert (
        first["tokens/s, all requests"] == "-" and first["requests running"] == "2" and first["requests waiting"] == "1"
    )
    assert first["time to first token"] == "250.0 ms" and first["time per token of a request"] == "50.0 ms"
    then = numbers.add(REQUESTS | {"tokens": 1300, "first_token_seconds": 1.3, "first_tokens": 5}, now=110.0)
    assert then["tokens/s, all requests"] == "30.0" and then["tokens generated"] == "1,300"
    assert then["time to first token"] == "300.0 ms", "of the one request since"
    assert then["time per token of a request"] == "50.0 ms", "none has finished since: of all before"
    later = numbers.add(REQUESTS | {"tokens": 1600}, now=165.0)
    assert later["tokens/s, all requests"] == f"{300 / 55:.1f}", "the first reading is more than a minute old"
    again = numbers.add(REQUESTS | {"tokens": 10}, now=170.0)
    assert again["tokens/s, all requests"] == "-", "the server was started again"
    assert numbers.add(None) == {}, "--disable-log-stats"
    nobody = dict.fromkeys(REQUESTS, 0)
    assert RequestNumbers().add(nobody)["time to first token"] == "-"


def test_stats_shows_requests(serve, monkeypatch):
    """While some run, of two readings, which give a speed."""
    waits = []
    monkeypatch.setattr(stats.time, "sleep", waits.append)
    text = run("stats", serve(200, json.dumps({"workers": [WORKER, WORKER], "requests": REQUESTS})))
    for part in ("requests running │ 2 │ │", "time to first token │ 250.0 ms │ │", "hit rate │ 75.0% │ 75.0%"):
        assert part in text, text
    assert waits == [1.0] and "tokens/s, all requests │ 0.0 │ │" in text
    idle = run(
        "stats", serve(200, json.dumps({"workers": [WORKER], "requests": REQUESTS | {"running": 0, "waiting": 0}}))
    )
    assert len(waits) == 1 and "requests" not in idle.replace("all requests", "")
    for wrong in ([], {"tokens": "x"}, REQUESTS | {"finished": None}, {}):
        assert "error: " in run("stats", serve(200, json.dumps({"workers": [WORKER], "requests": wrong})), code=1)


def test_stats_watches_until_interrupted(serve, monkeypatch):
    waits = iter([0.5, 0.5])

    def sleep(seconds):
        if seconds != next(waits, None):
            raise KeyboardInterrupt

    monkeypatch.setattr(stats.time, "sleep", sleep)
    assert "75.0%" in run("stats", serve(200, json.dumps({"workers": [WORKER]})), "--watch", "--interval", 0.5)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, '{"detail": "Not Found"}', "runs without spac; start it with --plugin spac"),
        (500, "oops", "answers 500"),
        (200, "[]", "is not vllm serve"),
    ],
)
def test_stats_says_what_is_wrong(serve, status, body, message):
    assert message in run("stats", serve(status, body), code=1)
    assert "no server answers at http://127.0.0.1:9" in run("stats", "127.0.0.1:9", code=1)


@pytest.mark.parametrize(
    "workers",
    [
        {},
        "x",
        [1],
        [[]],
        [{"hits": "x", "misses": 1}],
        [{"bytes": {"disk": "x"}}],
        [{"slot_bytes": None}],
        [{"slot_bytes": 10**400}],
        [{"stall_seconds": []}],
        [{"bytes": {"a": 1, "b": {}}}],
    ],
    ids=str,
)
def test_stats_of_something_else_are_one_line(serve, workers):
    assert "error: " in run("stats", serve(200, json.dumps({"workers": workers})), code=1)
    assert "error: " in run("stats", serve(200, "[" * 100_000), code=1)


def test_stats_prints_what_a_server_says_and_does_not_obey_it(serve):
    odd = {"mode": "\x1b[2J[red]exact", "a\nb\x1b]0;owned\x07": {"\u202ekey": "[link=http://x]y[/link]"}}
    text = run("stats", "--all", serve(200, json.dumps({"workers": [odd]})))
    assert not set(text) & set("\x1b\x07\u202e")
    for part in (r"\x1b[2J[red]exact", r"a\nb\x1b]0;owned\x07: \u202ekey", "[link=http://x]y[/link]"):
        assert part in text


def test_a_key_goes_to_the_server_that_was_named_and_to_no_other(serve, asked):
    second = f"http://{serve(200)}/spac/stats"
    assert "75.0%" in run("stats", serve(302, headers={"Location": second}), "--api-key", "secret")
    assert asked == ["Bearer secret", None]


def test_stats_says_that_a_key_is_wanted(serve):
    url = serve(401)
    assert "wants a key; name its own with --api-key or VLLM_API_KEY" in run("stats", url, code=1)
    assert "refuses this key" in run("stats", url, "--api-key", "x", code=1)
    assert "no HTTP header can carry" in run("stats", url, "--api-key", "x\ny", code=1)


@pytest.fixture
def store(tmp_path) -> disk.DiskStore:
    """Two layers of two experts, written by the plugin's own store."""
    shape = MoEShape(("model.layers.3.e", "model.layers.5.e"), 2, 1, {"w": TensorSpec((40, 64), torch.bfloat16)})
    store = disk.DiskStore(shape, FINGERPRINT, tmp_path / "packed")
    for key in range(shape.total):
        store.put(key, {"w": torch.full((40, 64), key, dtype=torch.bfloat16)})
    return store


def test_packed_names_models(store):
    root = store.folder.parent
    assert f"{FINGERPRINT} ? " in run("packed", "--disk-dir", root), "packed by a version that wrote no names"
    for model in ("org/Toy-MoE", "another name of the same experts"):
        packed_folder.write_model(store.folder, model)
    assert f"{FINGERPRINT} org/Toy-MoE 2 " in run("packed", "--disk-dir", root)
    packed_folder.write_model(store.folder / "absent", "toy")  # as where a folder is read-only
    run("packed", "--disk-dir", root, "--delete", FINGERPRINT, "--yes")
    assert not store.folder.exists()


def test_a_name_is_written_through_no_link(store, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (store.folder / "model").symlink_to(tmp_path / "mine")
    packed_folder.write_model(store.folder, "toy")
    assert (tmp_path / "mine").read_text() == "mine"
    assert "mine" not in run("packed", "--disk-dir", store.folder.parent).replace(str(tmp_path), "")


def test_packed_verifies(store):
    assert "all 4 files are as they were packed" in run("packed", "--disk-dir", store.folder.parent, "--verify")
    assert "no packed experts" in run("packed", "--disk-dir", store.folder / "absent", "--verify")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda store: flip(store.path(2), packed_folder.HEADER + 9), "(checksum)"),
        (lambda store: flip(store.path(2), 9), "no header of format"),
        (lambda store: store.path(2).write_bytes(b""), "no header of format"),
        (lambda store: store.path(2).write_bytes(store.path(3).read_bytes()), "holds expert 1"),
        (lambda store: store.path(2).write_bytes(store.path(2).read_bytes()[:-1]), "(checksum)"),
    ],
)
def test_packed_finds_damage(store, damage, message):
    damage(store)
    text = run("packed", "--disk-dir", store.folder.parent, "--verify", code=1)
    assert message in text and str(store.path(2)) in text and "1 files are damaged" in text


def test_packed_repairs(store):
    """What is damaged is gone, and what was set aside: the next start packs exactly what is missing."""
    root, whole = store.folder.parent, store.path(1).read_bytes()
    assert "all 4 files are as they were packed" in run("packed", "--disk-dir", root, "--repair")
    for key in (0, 2):
        flip(store.path(key), packed_folder.HEADER + 9)
    store.path(3).with_suffix(".corrupt").write_bytes(b"x")
    with pytest.raises(StoreError):
        store.read(0, {"w": torch.empty(40, 64, dtype=torch.bfloat16)})
    assert (store.folder / packed_folder.MARK).exists()
    text = run("packed", "--disk-dir", root, "--repair")
    assert f"{store.path(2)} is not what was packed (checksum)" in text and "deleted 1 damaged files" in text
    assert sorted(path for path in store.folder.rglob("*") if path.is_file()) == [store.path(1), store.path(3)]
    assert store.path(1).read_bytes() == whole
    again = disk.DiskStore(store.shape, FINGERPRINT, root)
    assert [again.holds(key) for key in range(4)] == [False, True, False, True]


@pytest.mark.parametrize("strange", [False, True], ids=["in use", "with a strange file"])
def test_packed_repairs_nothing(store, strange):
    root = store.folder.parent
    flip(store.path(2), packed_folder.HEADER + 9)
    if strange:
        (store.folder / "notes.txt").touch()
    with open(root / f"{FINGERPRINT}.lock", "w") as lock:
        if not strange:
            fcntl.flock(lock, fcntl.LOCK_SH)  # a server
        text = run("packed", "--disk-dir", root, "--repair", code=1)
    assert ("was not written by packing" if strange else "in use") in text and "nothing was deleted" in text
    assert store.path(2).exists()


def test_packed_deletes_one_folder(store):
    root = store.folder.parent
    (store.folder / packed_folder.MARK).touch()
    store.path(0).with_suffix(".corrupt").write_bytes(b"x")
    partial_of(store.path(0), 123).write_bytes(b"x")
    (root / f"{FINGERPRINT}.lock").touch()
    kept = disk.DiskStore(store.shape, FINGERPRINT[::-1], root)
    assert "Aborted" in run("packed", "--disk-dir", root, "--delete", FINGERPRINT, input="n\n", code=1)
    assert store.path(0).exists()
    assert "deleted" in run("packed", "--disk-dir", root, "--delete", FINGERPRINT, input="y\n")
    assert [path.name for path in root.iterdir()] == [kept.folder.name]


def outside(store) -> Path:
    """A folder elsewhere with a file that nobody may touch."""
    (folder := store.folder.parents[1] / "outside").mkdir()
    (folder / "expert-0009.safetensors").write_text("mine")
    return folder


EXPERT = Path("layer-000", "expert-0009.safetensors")
STRANGE = {
    "linked-layer": lambda folder, other: (folder / "layer-007").symlink_to(other),
    "linked-file": lambda folder, other: (folder / EXPERT).symlink_to(other / EXPERT.name),
    "file": lambda folder, other: (folder / "notes.txt").write_text("mine"),
    "folder": lambda folder, other: (folder / "layer-000" / "more").mkdir(),
    "no-headers": lambda folder, other: [path.write_bytes(b"mine") for path in folder.glob("*/*")],
}


@pytest.mark.parametrize("spoil", STRANGE.values(), ids=STRANGE)
def test_packed_deletes_nothing_that_it_does_not_know(store, spoil):
    spoil(store.folder, other := outside(store))
    before = sorted(store.folder.rglob("*"))
    run("packed", "--disk-dir", store.folder.parent, "--delete", FINGERPRINT, "--yes", code=1)
    assert sorted(store.folder.rglob("*")) == before
    assert (other / "expert-0009.safetensors").read_text() == "mine"


def test_packed_follows_no_link_and_no_path(store):
    root, other = store.folder.parent, outside(store)
    (root / FINGERPRINT[::-1]).symlink_to(other)
    assert FINGERPRINT[::-1] not in run("packed", "--disk-dir", root)
    for name in (FINGERPRINT[::-1], "../outside", ".", ""):
        assert "has no packed experts" in run("packed", "--disk-dir", root, "--delete", name, "--yes", code=1)
    assert (other / "expert-0009.safetensors").exists()


def test_packed_deletes_nothing_in_use(store):
    with open(store.folder.parent / f"{FINGERPRINT}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use" in run("packed", "--disk-dir", store.folder.parent, "--delete", FINGERPRINT, "--yes", code=1)
    assert store.path(0).exists()
