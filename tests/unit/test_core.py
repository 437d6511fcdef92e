"""The types that all modules share, and an import that stays cheap in every vLLM process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vllm_spac
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec, selected
from vllm_spac.errors import SpacError


def step(*kinds: RowKind) -> Step:
    return Step(tuple(RequestRows(i, i + 1, kind) for i, kind in enumerate(kinds)))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((), "dummy"),
        ((RowKind.PREFILL,), "prefill"),
        ((RowKind.DECODE, RowKind.DECODE), "decode"),
        ((RowKind.VERIFY,), "verify"),
        ((RowKind.PREFILL, RowKind.DECODE), "mixed"),
        ((RowKind.VERIFY, RowKind.DECODE, RowKind.PREFILL), "mixed"),
    ],
)
def test_kind_of_a_step(kinds: tuple[RowKind, ...], expected: str) -> None:
    assert step(*kinds).kind == expected
    assert type(step(*kinds).kind) is str, "it becomes a label of a metric"


def test_what_rows_selected() -> None:
    chosen = [(1, np.array([[0, 2], [-1, 1]])), (0, np.array([[1, 1], [-1, -1]]))]
    expected = [[0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 0]]
    assert selected(chosen, 2, 3).astype(int).tolist() == expected  # type: ignore[union-attr]
    assert selected([], 2, 3) is None


def test_bytes() -> None:
    tensors = {
        "w": TensorSpec((3, 5), torch.bfloat16),
        "scale": TensorSpec((), torch.float32),
        "q": TensorSpec((7,), torch.int8),
    }
    assert [spec.nbytes for spec in tensors.values()] == [30, 4, 7]
    assert MoEShape(("a",), 4, 2, tensors).expert_bytes == 41


def test_a_shape_is_hashable() -> None:
    one, two = (MoEShape(("a",), 4, 2, {"w": TensorSpec((2,), torch.int8)}) for _ in range(2))
    assert one == two and len({one, two}) == 1


def test_import_loads_neither_torch_nor_vllm(tmp_path: Path) -> None:
    code = "import sys, vllm_spac; print(sorted({'torch', 'vllm', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.parametrize("additional", [{}, None, {"other": 1}])
def test_stats_of_an_engine_without_the_plugin(additional: dict | None) -> None:
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional)))
    with pytest.raises(SpacError, match="additional_config"):
        vllm_spac.stats(llm)


def test_stats_of_an_engine_with_the_plugin() -> None:
    config = SimpleNamespace(additional_config={"spac": {}})
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=config), collective_rpc=lambda name: [{"asked": name}, {"hits": 1}]
    )
    assert vllm_spac.stats(llm)["workers"] == [{"asked": "spac_stats"}, {"hits": 1}]


def test_stats_wait_for_what_expert_workers_count() -> None:
    """The engine does not: it says what they counted when they were asked last, and how long ago that is."""
    ages = [9.0, 8.0, 0.0, 7.0]
    worker = {"present": 1, "hits": 5}
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(additional_config={"spac": {}})),
        collective_rpc=lambda name: [{"expert_workers": {"worker-0": worker | {"counts_age_seconds": ages.pop(0)}}}],
    )
    found = vllm_spac.stats(llm)["workers"][0]["expert_workers"]["worker-0"]
    assert found["counts_age_seconds"] == 0.0 and ages == [7.0]
