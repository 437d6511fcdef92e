"""``benchmarks/kernels``, as far as it can be tested without a GPU."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from benchmarks import common
from benchmarks.kernels import run as script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels" / "run.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to run it on")
def test_refuses_without_a_gpu(tmp_path):
    output = tmp_path / "kernels.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--output", output], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "needs a CUDA device" in done.stderr
    assert not output.exists()


def test_quantised_formats_run_dry(tmp_path):
    """The calls that a GPU would time, tiny and in the interpreter."""
    done = run(tmp_path, "--dry-run", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    filled, said = ([words for words in lines if (words[2] == "of") is is_fill] for is_fill in (True, False))
    assert [words[0] for words in said] == ["mxfp4", "nvfp4", "int4", "int4-zeros", "int8", "fp8", "fp8-rows"]
    assert [words[0] for words in filled] == ["bfloat16", *(words[0] for words in said)]
    assert all(0 < int(words[1]) < int(words[3]) for words in filled), "hits beside misses"
    assert {words[0]: int(words[1]) for words in said}["nvfp4"] == 3 * 128 * 128 + 256 * 4 * (5 + 3)
    assert all(float(words[7]) <= 2**-5 for words in said)
    assert "needs TRITON_INTERPRET=1" in run(tmp_path, "--dry-run").stderr
    assert "--formats int3: use some of mxfp4,nvfp4" in run(tmp_path, "--formats", "int8,int3").stderr


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=folder, env=inherited | environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("wrong", ["codes", "scales"])
def test_a_wrong_format_is_not_timed(wrong):
    """The comparison that ``measure_packed`` makes, by the twins' weights."""
    from vllm_spac.kernels.reference.dequantise import dequantise

    from vllm_spac.tools.selftest.random_experts import matrix

    for name, kind in script.FORMATS.items():
        codes, scales = matrix(kind, 128, 256, torch.Generator().manual_seed(0))
        plain = dequantise(kind, codes, scales, 128, 256, torch.bfloat16)
        assert 0.3 < float(plain.float().std()) * 256**0.5 < 3, name
        changed = (codes.roll(1, 0), scales) if wrong == "codes" else (codes, scales.roll(1, -1).roll(1, 0))
        with pytest.raises(script.typer.Exit):
            script.compare(dequantise(kind, *changed, 128, 256, torch.bfloat16), plain, name)


@pytest.mark.parametrize("wrong", [None, "nothing copied", "all copied", "a row left out"])
def test_a_gemm_that_fills_wrong_is_not_timed(monkeypatch, wrong):
    """The comparison that ``measure_fills`` makes, by the kernel's twin."""
    from vllm_spac.kernels.reference.grouped_gemm import grouped_gemm as twin

    from vllm_spac.tools.selftest.random_experts import RandomExperts

    kernels, shape = types.ModuleType("kernels"), script.Shape(256, 128, 8, 2)
    packed, slots = RandomExperts.make(script.FORMATS["int4"], 256, 128, 8, "cpu"), []

    def gemm(x, w13, w2, weights, ids, ff, quantised, fills=None):
        if fills is not None and wrong == "nothing copied":
            fills = fills._replace(sources=torch.zeros_like(fills.sources))
        if fills is not None and wrong == "all copied":
            twin(x[:1], w13, w2, torch.ones(1, 8), torch.arange(8)[None], ff, quantised=quantised, fills=fills)
        found = twin(x, w13, w2, weights, ids, ff, quantised=quantised, fills=fills)
        if fills is not None and wrong == "a row left out":
            slots[0][int(ids[ids >= 4][0]), -1] = 0
        return found

    kernels.grouped_gemm = gemm
    monkeypatch.setitem(sys.modules, "vllm_spac.kernels.grouped_gemm", kernels)
    call = RandomExperts.call_filling

    def kept(*given):
        found = call(*given)
        slots[:] = found[1]
        return found

    monkeypatch.setattr(RandomExperts, "call_filling", kept)
    if wrong is None:
        _, missed, selected = script.filling(shape, 3, packed, packed.stored, 0.5, "int4", "cpu")
        assert 0 < missed < selected <= 6
        return
    with pytest.raises(script.typer.Exit):
        script.filling(shape, 3, packed, packed.stored, 0.5, "int4", "cpu")


def test_counts_each_expert_once():
    """Three distinct experts of 3 * 8 * 4 bfloat16; of the first two that are chosen, one is asked for."""
    shape = script.Shape(hidden=8, intermediate=4, experts=6, top_k=2)
    ids = torch.tensor([[0, 4], [4, 5]])
    assert script.needed_bytes(shape, ids) == 3 * 192
    assert script.needed_bytes(shape, ids, torch.tensor([True, True, False, False, False, False])) == 192


def test_addresses_are_those_of_the_experts(monkeypatch):
    monkeypatch.setattr(script.torch, "tensor", lambda values, device: values)
    weight = torch.zeros(3, 4, 5, dtype=torch.bfloat16)
    assert script.addresses(weight) == [part.data_ptr() for part in weight]


def test_other_answers_are_not_timed():
    same = torch.ones(4)
    assert script.compare(same, same, "a") == 0
    for wrong in (same * 1.1, same * float("nan")):
        with pytest.raises(script.typer.Exit):
            script.compare(wrong, same, "a")


def test_what_was_measured_is_kept_when_a_later_size_fails(tmp_path, monkeypatch):
    """Also on a copy without git: where the numbers come from is asked before anything is measured."""
    monkeypatch.setattr(common, "ROOT", tmp_path)
    facts = types.SimpleNamespace(name="a GPU", major=9, minor=0, L2_cache_size=1)
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script.torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(script, "make_weights", lambda shape: (torch.ones(1), torch.ones(1)))
    monkeypatch.setattr(script.torch, "empty_like", lambda weight, **_: weight.clone())
    monkeypatch.setattr(script, "copy_rates", lambda: {"hbm": 1.0, "pinned": 1.0})
    monkeypatch.setattr(script, "line", lambda row, rates: "")
    asked = []

    def measure(shape, rows, *rest):
        asked.append(rows)
        if rows > 1:
            raise RuntimeError("stopped")
        return {"rows": rows}

    monkeypatch.setattr(script, "measure", measure)
    with pytest.raises(RuntimeError, match="stopped"):
        script.main(short=True, output=tmp_path / "kernels.json")
    kept = json.loads((tmp_path / "kernels.json").read_text())
    assert kept["rows"] == [{"rows": 1}] and asked == [1, 4]
    assert kept["provenance"]["git"]["commit"]
