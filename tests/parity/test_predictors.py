"""Predictors of the toy model: trained, measured and served with, each time in a process of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import engines
import forked
import pytest
import torch
from compare import METHODS, compare
from exactness import FLOAT32, assert_same_tokens
from safetensors.torch import load_file, save_file

import vllm_spac
from vllm_spac.config.config import SpacConfig
from vllm_spac.decisions.predictor_file import PredictorFile
from vllm_spac.integration.loading import ahead

MODELS = Path(__file__).parents[2] / "benchmarks" / "toy" / "models"
TEXTS = Path(__file__).parents[2] / "benchmarks" / "toy" / "texts.py"
LAYERS, EXPERTS, TOP_K = 6, 64, 8
OPTIONS = {"dtype": "bfloat16", "gpu_memory_utilization": 0.2}
ENGINE = ("--engine", json.dumps(OPTIONS))


def command(program: list, code: int = 0) -> str:
    """What a program prints, both streams."""
    done = forked.run(program, {"COLUMNS": "200", "NO_COLOR": "1"}, timeout=500)
    assert done.returncode == code, done.stderr[-4000:] + done.stdout
    return done.stdout + done.stderr


def vllm_spac_command(*arguments, code: int = 0) -> str:
    """Networks are trained in a tenth of the steps, which otherwise take longer than all else here."""
    neural = "from vllm_spac.methods.speculating_experts import neural_predictor as n; n._STEPS = 60"
    program = f"{neural}; from vllm_spac.cli.main import app; app()"
    return command(["-c", program, *arguments], code)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Folder with predictors, and held-out texts."""
    folder = tmp_path_factory.mktemp("trained")
    command([TEXTS, folder / "train.jsonl", "--training", "--count", "16"])
    command([TEXTS, folder / "held.jsonl", "--count", "4"])
    said = vllm_spac_command(
        *("predictors", "train", MODELS / "target", "--prompts", folder / "train.jsonl", "--reach", "2"),
        *("--output", folder / "p.safetensors", "--disk-dir", folder, "--slots", "60%", *ENGINE),
    )
    assert "2,688 tokens of 14 texts" in said and "left out" not in said
    assert not (folder / "p.safetensors.progress").exists()
    return folder


def test_recall_on_held_out_text(trained: Path) -> None:
    texts, file = trained / "held.jsonl", trained / "p.safetensors"
    said = vllm_spac_command(
        *(
            "predictors",
            "measure",
            MODELS / "target",
            "--prompts",
            texts,
            "--predictor",
            file,
            "--json",
            trained / "r.json",
        ),
        *("--slots", "25%", "--disk-dir", trained, *ENGINE),
    )
    found = json.loads((trained / "r.json").read_text())
    names = {"gate", "quasi_hidden", "neural", "hybrid", "utility"}
    assert set(found) == names and all(name in said for name in names)
    recall = {name: one["recall_at_k"] for name, one in found.items()}
    chance = TOP_K / EXPERTS
    assert 4 * chance < recall["gate"] < recall["quasi_hidden"] < recall["neural"] <= recall["hybrid"] < 1
    for one in found.values():
        assert one["recall_at_k"] < one["recall_at_2k"] and one["bytes"] > 0 and one["us_per_layer"] > 0
        assert len(one["by_layer"]) == LAYERS
    assert list(found["gate"]["by_horizon"]) == ["1", "2"] and found["gate"]["by_layer"][0] is None
    assert found["gate"]["by_horizon"]["1"]["recall_at_k"] > found["gate"]["by_horizon"]["2"]["recall_at_k"]
    assert list(found["hybrid"]["by_horizon"]) == ["1"] and found["hybrid"]["by_layer"][0] is None
    sizes = PredictorFile.read(file).sizes
    assert (sizes.layers, sizes.experts, sizes.top_k) == (LAYERS, EXPERTS, TOP_K)


TOKENS = 24


@pytest.mark.full
@pytest.mark.parametrize("prefetch", ["gate", "quasi_hidden", "neural", "hybrid"])
def test_reads_ahead_by_the_device(trained: Path, prefetch: str) -> None:
    """Over pointers, whose layers do not wait for the host: the twins give the same bits wherever an expert is."""
    spac = {"slots": "25%", "plane": "pointers"}
    ahead = {"prefetch": f"{prefetch}@file={trained / 'p.safetensors'}"}
    plain, run = compare(MODELS / "target", [spac, spac | ahead], max_tokens=TOKENS)
    assert_same_tokens(run, plain)
    stats = run.stats
    used = 0.3 if prefetch == "gate" else 0.5
    assert stats["prefetches"] > TOKENS, "more than one in a step"
    assert stats["prefetch_hits"] > used * stats["prefetches"]
    assert stats["misses"] == plain.stats["misses"] and plain.stats["prefetches"] == 0


def test_a_gate_without_a_file_is_that_of_the_file(trained: Path) -> None:
    """Computed from the checkpoint alone; the file was trained two layers ahead, an engine computes one."""
    file = PredictorFile.read(trained / "p.safetensors")
    shape = SimpleNamespace(layers=file.identity.layers, experts=EXPERTS, top_k=TOP_K)
    config = SpacConfig.parse({"prefetch": "gate"})
    made = ahead.predictors(config, [shape], lambda: "not asked", lambda: MODELS / "target")
    ours, theirs = made.tensors["gate"], file.tensors["gate"]
    assert len(ours) == 2 * (LAYERS - 1) and ours.keys() == {name for name in theirs if ".1." in name}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_gate_without_a_file_gives_stock_s_tokens(tmp_path: Path) -> None:
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path), "guard": "off", "prefetch": "gate@extra=0.5"}
    stock, run = compare(MODELS / "target", [None, spac], max_tokens=32)
    assert_same_tokens(run, stock)
    assert run.stats["prefetch_hits"] > 50


@pytest.mark.parametrize(("method", "prefetch"), [(None, "neural"), ("eagle3", "hybrid")])
def test_same_tokens_as_stock_with_reads_ahead(trained: Path, method: str | None, prefetch: str) -> None:
    """The guard is off so that all steps have stock's shape."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(trained), "guard": "off"}
    spac |= {"prefetch": f"{prefetch}@file={trained / 'p.safetensors'}"}
    options = {} if method is None else {"speculative_config": METHODS[method]}
    stock, run = compare(MODELS / "target", [None, spac], max_tokens=32, **options)
    assert_same_tokens(run, stock)
    stats = run.stats
    assert stats["prefetch_hits"] > 100 and stats["prefetch_hits"] > 0.5 * stats["prefetches"]
    needed = stats["loads"] + stats["prefetch_hits"] - stats["prefetch_harmful"]
    assert stats["loads"] + stats["prefetches"] <= 1.1 * needed, stats


def test_speculated_execution(trained: Path) -> None:
    """Exact until it is switched on and after; the true router among predicted experts drops less than predictions."""
    spac = {"slots": "25%", "disk_dir": str(trained), "prefetch": f"neural@file={trained / 'p.safetensors'}"}
    with engines.engine(MODELS / "target", spac, enable_prefix_caching=False) as llm:
        exact, same, dropped = engines.say(llm), {}, {}
        for mode in ("restricted", "predicted"):
            llm.collective_rpc("spac_budget", args=({"speculate": mode},))
            before = vllm_spac.stats(llm)["workers"][0]
            said = engines.say(llm)
            after = vllm_spac.stats(llm)["workers"][0]
            assert before["mode"] == "lossy"
            rows, lost = (after["budget"][name] - before["budget"][name] for name in ("rows", "dropped_weight"))
            assert rows > 0 and rows % (LAYERS - 1) == 0, "nothing is predicted of the first layer"
            dropped[mode] = lost / rows
            pairs = [pair for ours, theirs in zip(said, exact, strict=True) for pair in zip(ours, theirs, strict=True)]
            same[mode] = sum(one == other for one, other in pairs) / len(pairs)
            assert [ours[0] for ours in said] == [theirs[0] for theirs in exact], "prompts are not speculated"
        assert 0 < dropped["restricted"] < dropped["predicted"] < 0.5 and same["restricted"] > 0.5, (dropped, same)
        llm.collective_rpc("spac_budget", args=({},))
        assert engines.say(llm) == exact


@pytest.mark.full
@pytest.mark.parametrize("when", ["decode", "all"])
def test_speculated_execution_where_the_device_decides(trained: Path, when: str) -> None:
    """It runs what runs where the host decides, and counts it; where experts are makes no difference to either."""
    spac = {"slots": "25%", "store": "host", "speculate": f"predicted@when={when}", "plane": "table"}
    spac["prefetch"] = f"neural@file={trained / 'p.safetensors'}"
    device, host = compare(
        MODELS / "target", [spac | {"plane": plane} for plane in ("pointers", "table")], max_tokens=16, **FLOAT32
    )
    assert device.tokens == host.tokens and device.stats["misses"] > 0 < device.stats["prefetch_hits"]
    ours, theirs = device.stats["budget"], host.stats["budget"]
    assert all(ours[name] == theirs[name] for name in ("setting", "rows", "shortlists", "experts", "emptied"))
    assert ours["dropped_weight"] == pytest.approx(theirs["dropped_weight"], rel=1e-3) and ours["dropped_weight"] > 0


@pytest.mark.full
def test_speculated_execution_of_draft_trees(trained: Path) -> None:
    """What is predicted decides alone which experts run, wherever they are. In float32: the same bits in each slot."""
    head = {name: value for name, value in METHODS["eagle3"].items() if name != "num_speculative_tokens"}
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(trained), "guard": "off", "tree": 8}
    spac |= {"prefetch": f"neural@file={trained / 'p.safetensors'}", "speculate": "predicted"}
    options = {
        "speculative_config": head,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "num_gpu_blocks_override": None,
        "dtype": "float32",
    }
    run, resident = compare(MODELS / "target", [spac, spac | {"slots": "100%"}], max_tokens=16, **options)
    assert run.tokens == resident.tokens and run.stats["budget"] == resident.stats["budget"]
    assert run.stats["misses"] > 0 == resident.stats["misses"] and run.stats["budget"]["rows"] > 1000


@pytest.mark.full
def test_quality_of_speculated_execution(trained: Path) -> None:
    said = vllm_spac_command(
        *(
            "quality",
            "sweep",
            MODELS / "target",
            "--prompts",
            trained / "held.jsonl",
            "--speculate",
            "restricted,predicted",
        ),
        *(
            "--predictor",
            trained / "p.safetensors",
            "--prefetch",
            "neural",
            "--slots",
            "25%",
            "--disk-dir",
            trained,
            "--window",
            "5",
        ),
        *("--generate", "2", "--new-tokens", "16", "--output", trained / "quality", *ENGINE),
    )
    results = json.loads((trained / "quality" / "quality.json").read_text())
    restricted, predicted = results["points"]
    assert (restricted["coverage"], predicted["coverage"]) == ("restricted", "predicted")
    assert 0 < restricted["kl"] < predicted["kl"] and restricted["dropped"] < predicted["dropped"]
    assert 1 > restricted["agreement"] > predicted["agreement"] > 0.5
    exact, *ours = results["generation"]
    assert exact["equal"] == 1 and [each["coverage"] for each in ours] == ["restricted", "predicted"]
    assert all(each["bytes_per_token"] > 0 for each in results["generation"])
    assert "generation with speculated execution, predicted:" in said


def test_predictors_of_another_model_are_refused(trained: Path, tmp_path: Path) -> None:
    """Of the same sizes, with one expert that says something else."""
    other = shutil.copytree(MODELS / "target", tmp_path / "other", ignore=shutil.ignore_patterns("*.xz"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.down_proj.weight"] *= 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    said = vllm_spac_command(
        *("predictors", "measure", other, "--prompts", trained / "held.jsonl", "--disk-dir", trained),
        *("--predictor", trained / "p.safetensors", "--json", trained / "other.json", *ENGINE),
        code=1,
    )
    assert "was made for target" in said and "not for this model or revision" in said
    assert not (trained / "other.json").exists()
