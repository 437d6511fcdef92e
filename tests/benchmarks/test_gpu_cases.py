"""The script that makes a GPU's figures: its engines are what this plugin and this vLLM take, and none ends unseen."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner
from vllm.engine.arg_utils import EngineArgs

from benchmarks.agents.recorded import Recording
from benchmarks.common import TOY, PlanError
from benchmarks.serving import cases, on_gpu, one_engine, processes
from benchmarks.serving.cases import STOCK
from benchmarks.shapes.shape import Shape
from vllm_spac.config.config import SpacConfig
from vllm_spac.storage.checkpoint.headers import Checkpoint

RUNS = on_gpu.runs(on_gpu.PARTS, [], ["25%", "20%"])
each_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.part} {run.name}")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Settings for a model whose files are named and not read."""
    checkpoint = Checkpoint("toy", 64, 8, dict.fromkeys(range(6), 2**30), 0)
    monkeypatch.setattr(cases, "read_checkpoint", lambda folder: checkpoint)
    for folder in ("model", "eagle3"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    return one_engine.Asked(
        models=dict.fromkeys(on_gpu.PARTS, tmp_path / "model"),
        heads=dict.fromkeys(on_gpu.PARTS, tmp_path / "eagle3"),
        batches=(1, 4),
        decode_tokens=8,
        prompt_tokens=(90,),
        dtype="float32",
        eager=False,
        gpu=True,
        at_once=2,
        seed=0,
        disk_dir=tmp_path / "packed",
        plugins=(),
        options={},
        compare=[[1, 2], [3]],
        short=[[1]] * 4,
        long={90: [[1] * 90, [2] * 90]},
        agents=Recording.fitting(1024),
    )


def test_names_are_unique() -> None:
    assert max(Counter((run.part, run.name) for run in RUNS).values()) == 1
    assert [run.case.name for run in RUNS].count(STOCK) == len(on_gpu.PARTS)
    assert {run.part for run in RUNS} == set(on_gpu.PARTS)


@each_run
@pytest.mark.parametrize("gpu", [True, False])
def test_each_engine_is_what_the_plugin_and_vllm_take(run, gpu, asked) -> None:
    asked, case = replace(asked, gpu=gpu), run.case
    if case.offload and not gpu:
        with pytest.raises(one_engine.LeftOut, match="GPU"):
            asked.job(run)
        return
    job = asked.job(run)
    assert set(job["options"]) <= {field.name for field in fields(EngineArgs)}
    assert ("offload_backend" in job["options"]) == (case.offload is not None)
    assert (job["speculative"] is None) == (case.speculation == "none")
    if case.knobs is None:
        assert job["spac"] is None and job["environment"]["VLLM_PLUGINS"] == ""
        return
    config = SpacConfig.parse(job["spac"])
    assert config.lossy != case.exact
    assert config.parsed_slots.share is not None, "else engines with other memory would be compared"
    if config.tree_nodes:
        assert job["speculative"]["num_speculative_tokens"] == config.tree_nodes
    if gpu and "plane" not in case.knobs and not config.has_workers:
        device = SpacConfig.parse({**job["spac"], "plane": "pointers"})
        assert device.store_on("cuda") == config.store_on("cuda") == "host", "a GPU would not take its defaults"


def test_graphs_are_those_that_are_replayed(asked) -> None:
    (run,) = [run for run in RUNS if run.name == "ptr, eagle3"]
    sizes = asked.job(run)["options"]["compilation_config"]["cudagraph_capture_sizes"]
    assert {1, 4, 5, 20} <= set(sizes), "batches, and batches of chains of four drafts"
    assert "compilation_config" not in replace(asked, eager=True).job(run)["options"]


def test_files_that_are_not_there_leave_engines_out(asked, tmp_path) -> None:
    bare = replace(asked, heads=dict.fromkeys(on_gpu.PARTS, tmp_path / "none"))
    why = {}
    for run in RUNS:
        try:
            bare.job(run)
        except (one_engine.LeftOut, PlanError) as error:
            why[run.name] = str(error)
    assert {name for name in why if "eagle3" in why[name]} == {
        run.name for run in RUNS if run.case.speculation == "eagle3"
    }


def test_other_plugins_and_options_reach_every_engine(asked) -> None:
    more = replace(asked, plugins=("kit",), options=on_gpu.parsed_options(["attention_backend=X", "seed=3"]))
    for run in RUNS:
        job = more.job(run)
        assert job["environment"]["VLLM_PLUGINS"] == ("kit" if run.case.knobs is None else "spac,kit")
        assert (job["options"]["attention_backend"], job["options"]["seed"]) == ("X", 3)


def test_stocks_offloading_keeps_as_many_bytes() -> None:
    """Six layers of 1 GiB, a quarter of it on the GPU: 4.5 GiB outside, or three layers of four."""
    checkpoint = Checkpoint("toy", 64, 8, dict.fromkeys(range(6), 2**30), 0)
    uva, prefetch = (cases.Case(STOCK, None, offload=by, share="25%") for by in ("uva", "prefetch"))
    assert uva.stock_options(checkpoint)["cpu_offload_gb"] == 4.5
    options = prefetch.stock_options(checkpoint)
    assert (options["offload_group_size"], options["offload_num_in_group"]) == (4, 3)


def test_the_toys_have_room_for_a_long_prompt() -> None:
    """vLLM refuses an engine whose context is longer than the model's."""
    given = {name: each.default for name, each in inspect.signature(on_gpu.main).parameters.items()}
    config = json.loads((TOY / "models" / "target" / "config.json").read_text())
    longest = int(on_gpu.DEFAULTS.prompt_tokens)
    assert longest + given["decode_tokens"] + one_engine.SLACK <= config["max_position_embeddings"]


def test_sides_take_the_place_of_the_table() -> None:
    """In each part, beside stock; what is lossy need not give its tokens."""
    found = on_gpu.runs(on_gpu.PARTS, [], ["20%"], ["spac policy=lru", "spac slots=10% budget=16@when=decode"])
    assert [(run.part, run.name) for run in found[:3]] == [
        ("tokens", STOCK), ("tokens", "spac policy=lru"), ("tokens", "spac slots=10% budget=16@when=decode")
    ]  # fmt: skip
    assert [run.case.knobs["slots"] for run in found[1:3]] == ["20%", "10%"] and len(found) == 3 * len(on_gpu.PARTS)
    assert [run.case.exact for run in found[:3]] == [True, True, False]
    with pytest.raises(PlanError, match="use stock or spac"):
        on_gpu.runs(on_gpu.PARTS, [], ["20%"], ["vllm"])


@pytest.mark.parametrize("text", ["", "25%,many"])
def test_slots_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--slots"):
        cases.slot_counts(text)


def test_engines_are_chosen_by_name() -> None:
    assert [run.name for run in on_gpu.runs(["serving"], ["ptr"], ["25%", "20%"])] == ["stock", "ptr 25%", "ptr 20%"]
    for part, only, shares in (
        (["speed"], [], ["25%"]),
        (["tokens"], ["ptr"], ["25%"]),
        (["tokens"], [], ["8"]),
    ):
        with pytest.raises(PlanError):
            on_gpu.runs(part, only, shares)
    listed = CliRunner().invoke(on_gpu.app, ["--list"])
    assert listed.exit_code == 0 and all(run.name in listed.output for run in RUNS)


def test_tokens_until_the_first_difference_of_each_answer() -> None:
    assert on_gpu.agreed([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == 1 + 2
    rows = [{"part": "tokens", "name": name, "exact": name != "cut"} for name in ("stock", "same", "other", "cut")]
    said = {("tokens", name): ids for name, ids in (("same", [[1, 2]]), ("other", [[1, 3]]), ("cut", [[2, 2]]))}
    on_gpu.judge(rows, said | {("serving", "stock"): [[1, 2]]})
    assert "verdict" not in rows[1], "stock has not answered this part yet"
    on_gpu.judge(rows, said | {("tokens", "stock"): [[1, 2]]})
    assert [(row["as_stock"], row["verdict"]) for row in rows[1:]] == [(2, "same"), (1, "differs"), (0, "lossy")]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes the place of ``engine.py``: it answers as often as its job's ``seed`` says, and then ends or sleeps."""
    answer = {"tokens": [[1, 2]], "ttft": [0.5], "tpot": [0.25], "choices": {"mode": "exact"}}
    answer["counters"] = {"bytes": {"host": 640}}
    answer["served"] = [{"agent": 0, "turn": 0, "asked": 0.0, "times": [1.0, 2.0], "tokens": [1, 2]}]
    script = tmp_path / "engine.py"
    script.write_text(
        'import json, sys, time\njob = json.load(open(sys.argv[1]))\nprint(\'{"graphs": "NONE"}\', flush=True)\n'
        f"answer = {answer!r}\n"
        "for number, line in enumerate(sys.stdin):\n"
        "    if number == job['seed']:\n"
        "        sys.exit('out of luck')\n"
        "    if job['options'].get('sleep'):\n"
        "        time.sleep(60)\n"
        "    print(json.dumps(answer), flush=True)\n"
    )
    monkeypatch.setattr(processes, "ENGINE", script)
    return script


def clock(most: float = 1000.0):
    """With time enough on a busy machine."""
    return one_engine.Clock(time.monotonic() + 10_000, most)


def test_what_was_measured_before_an_error_stays(engine, asked) -> None:
    (run,) = [run for run in RUNS if run.name == "slots"]
    row, _ = one_engine.run_one(run, replace(asked, seed=100), clock())
    assert "error" not in row and row["graphs"] == "NONE"
    assert [(each["batch"], each["ms_per_token"], each["bytes_per_token"]) for each in row["decode"]] == [
        (1, 250.0, 640 / 8),
        (4, 250.0, 640 / 32),
    ]
    assert row["prompts"] == [{"tokens": 90, "ms": [500.0], "bytes": [640]}]
    assert row["beside"]["requests"] == 4 and row["profile"]["ttft"] == [0.5]
    row, _ = one_engine.run_one(run, replace(asked, seed=4), clock())
    assert "out of luck" in row["error"] and [each["batch"] for each in row["decode"]] == [1]


def test_agents_are_measured_at_each_number(engine, asked) -> None:
    """The first run, with one agent, counts for nothing; what is read is divided by the tokens of all."""
    (run,) = [run for run in RUNS if (run.part, run.name) == ("agents", "ptr 25%")]
    model = asked.models | {"agents": TOY / "models" / "target"}
    row, said = one_engine.run_one(run, replace(asked, models=model, seed=100), clock())
    assert "error" not in row and said == [[1, 2], [1, 2]]
    measured = [
        (each["agents"], each["tokens_per_s"], each["longest_gap"], each["bytes_per_token"]) for each in row["agents"]
    ]
    assert measured == [(1, 1.0, 1.0, 320.0), (4, 1.0, 1.0, 320.0)]


def test_a_profile_is_divided_by_what_moves(asked) -> None:
    """Stock reads what a token chose, the plugin what it hit, and of stock's offloaders nothing is known."""
    shape = Shape.parse("tiny")
    asked = replace(asked, shapes={"serving": shape})
    steps, rates = one_engine.PROFILED, {"link": 1e9, "hbm": 1e9}
    counters = {"hits": 3 * steps, "bytes": {"host": 5_000_000 * steps}}
    profile = SimpleNamespace(ask=lambda turn: {"rates": rates, "counters": counters}, timeout=0)
    found = {
        name: one_engine._profile(profile, asked, case, time.monotonic() + 9)
        for name, case in {run.case.name: run.case for run in RUNS if run.part == "serving"}.items()
    }
    assert found["ptr"]["link_ms"] == 5.0 and found["ptr"]["counters"]["hits"] == 3
    (expert,), others = shape.checkpoint.expert_bytes, shape.checkpoint.other_bytes - 2 * 4096 * 256
    assert found["ptr"]["hbm_bytes"] == 3 * expert + others
    assert (found["stock"]["link_ms"], found["stock"]["hbm_bytes"]) == (0, 2 * 4 * expert + others)
    assert "hbm_bytes" not in found["stock uva"]


def test_an_engine_over_its_time_is_a_row(engine, asked) -> None:
    """The engine's own limit, not all that is left for the others."""
    hanging = replace(asked, options={"sleep": 1}, seed=100)
    row, said = one_engine.run_one(RUNS[0], hanging, clock(2.0))
    limit = re.search(r"no answer after (\d+) s", row["error"])
    assert limit and int(limit[1]) <= 2 and not said


def test_what_does_not_fit_is_named(engine, asked, tmp_path) -> None:
    late = clock()
    late.fastest = 1e6
    output, about = tmp_path / "result.json", {"provenance": on_gpu.provenance()}
    rows = on_gpu.execute(RUNS[:2], asked, late, about, output)
    written = json.loads(output.read_text())
    assert written["tokens"] == [] and [each["name"] for each in written["left_out"]] == ["stock", "default"]
    assert all("--minutes" in row["left_out"] for row in rows)


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_result_is_written_after_each_measurement(engine, asked, tmp_path, monkeypatch, at_once) -> None:
    written, stopped, write = [], [], on_gpu.write_result

    def noted(path: Path, payload: dict) -> None:
        write(path, payload)
        written.append(len(payload["tokens"]) + len(payload["serving"]))
        stopped.extend(row["name"] for row in payload["serving"] if row.get("error") == "stopped here")

    monkeypatch.setattr(on_gpu, "write_result", noted)
    todo = [run for run in RUNS if run.part in on_gpu.ASKED and run.name in ("stock", "host", "slots")]
    about = {"provenance": on_gpu.provenance()}
    rows = on_gpu.execute(todo, replace(asked, at_once=at_once, seed=100), clock(), about, tmp_path / "result.json")
    assert written == sorted(written) and set(written) == {1, 2, 3, 4}
    assert [stopped.count(name) for name in ("stock", "slots")] == [5, 5], "two batches, a prompt, beside it, a profile"
    assert {row["name"]: row.get("verdict") for row in rows if row["part"] == "tokens"} == {
        "stock": None,
        "host": "same",
    }


def test_a_result_is_resumed(engine, asked, tmp_path) -> None:
    """Rows with an error, and what was left out, run again; a later row is compared with an earlier stock's answers."""
    todo = [run for run in RUNS if run.part in on_gpu.ASKED and run.name in ("stock", "slots")]
    output = tmp_path / "result.json"
    about = {"provenance": on_gpu.provenance(), "seed": 0}
    assert on_gpu.finished(output, about) == ([], [])
    asked = replace(asked, seed=100)
    on_gpu.execute(todo, asked, clock(), about, output)
    first = json.loads(output.read_text())
    first["serving"][1] |= {"error": "stopped here"}
    first["serving"].append({"name": "table", "error": "out of luck"})
    output.write_text(json.dumps(first))
    done, origins = on_gpu.finished(output, about)
    assert [(row["part"], row["name"]) for row in done] == [("tokens", "stock"), ("serving", "stock")]
    assert origins == [about["provenance"]]
    done[0]["marked"] = True
    rows = on_gpu.execute(todo, asked, clock(), about, output, done)
    written = json.loads(output.read_text())
    assert written["tokens"][0]["marked"] and [row["name"] for row in written["serving"]] == ["stock", "slots"]
    assert rows[-1]["verdict"] == "same"
    with pytest.raises(PlanError, match="--resume: .* has another seed"):
        on_gpu.finished(output, about | {"seed": 1})


def test_an_unforeseen_error_beside_others_is_a_row() -> None:
    def one(run):
        raise RuntimeError("not foreseen")

    rows = [row for row, _ in on_gpu.side_by_side(RUNS[:3], one, 2)]
    assert sorted(row["name"] for row in rows) == sorted(run.name for run in RUNS[:3])
    assert all("not foreseen" in row["error"] for row in rows)
