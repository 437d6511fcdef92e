"""``benchmarks/kernels`` as far as a machine without a GPU can tell."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels" / "run.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kernels_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to run it on")
def test_refuses_without_a_gpu(tmp_path):
    output = tmp_path / "kernels.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--output", output], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "needs a CUDA device" in done.stderr
    assert not output.exists()


def test_counts_each_expert_once(script):
    """Three distinct experts of 3 * 8 * 4 bfloat16; of the first two that are chosen, one is asked for."""
    shape = script.Shape(hidden=8, intermediate=4, experts=6, top_k=2)
    given = script.Input(torch.empty(2, 8), torch.ones(2, 2), torch.tensor([[0, 4], [4, 5]]))
    assert given.expert_bytes(shape) == 3 * 192
    assert given.expert_bytes(shape, torch.tensor([True, True, False, False, False, False])) == 192


def test_addresses_are_those_of_the_experts(script, monkeypatch):
    monkeypatch.setattr(script.torch, "tensor", lambda values, device: values)
    weight = torch.zeros(3, 4, 5, dtype=torch.bfloat16)
    assert script.addresses(weight) == [part.data_ptr() for part in weight]


def test_other_answers_are_not_timed(script):
    same = torch.ones(4)
    assert script.compare(same, same, "a") == 0
    for wrong in (same * 1.1, same * float("nan")):
        with pytest.raises(script.typer.Exit):
            script.compare(wrong, same, "a")
