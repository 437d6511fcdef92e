"""Budgets from a calibration, and the file that holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec.calibration import Calibration, choose, read_budgets, write_budgets

LAYERS, EXPERTS, TOP_K, WINDOW = ("model.layers.0.mlp", "model.layers.1.mlp"), 6, 2, 4
FINGERPRINT = "0123456789abcdef" * 2


def with_curves(*curves: list[float]) -> Calibration:
    return Calibration(
        FINGERPRINT, "toy", LAYERS, TOP_K, WINDOW, 8, torch.zeros(2, EXPERTS, EXPERTS, dtype=torch.int64),
        torch.stack((torch.tensor(curves), torch.tensor(curves).flip(0)))
    )  # fmt: skip


CURVES = [0.5, 0.75, 0.9, 0.95, 1.0, 1.0], [0.97, 0.98, 0.99, 0.995, 0.999, 1.0]


@pytest.mark.parametrize(
    ("mass", "coverage", "budgets"),
    [
        (0.9, "substitution", [3, 2]),
        (0.9, "truncation", [3, 1]),
        (0.75, "truncation", [2, 1]),
        (0.98, "truncation", [5, 2]),
        (1.0, "truncation", [6, 6]),
        (0.01, "substitution", [2, 2]),
    ],
)
def test_tuned_to_a_share(mass: float, coverage: str, budgets: list[int]) -> None:
    assert choose(with_curves(*CURVES), mass, coverage) == dict(zip(LAYERS, budgets, strict=True))
    assert choose(with_curves(*CURVES), mass, coverage, "scores") == dict(zip(LAYERS, budgets[::-1], strict=True))


def test_a_share_is_met_by_the_curve_that_says_so() -> None:
    """0.9 as float32 is below 0.9: a budget that the curve says reaches it is not passed over."""
    assert choose(with_curves(*CURVES), 0.9, "truncation")[LAYERS[0]] == 3


def test_tuning_without_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="saw 8 tokens and no window of 4; calibrate with more text"):
        choose(with_curves(*[[0.0] * EXPERTS] * 2), 0.9)


def test_tuning_for_an_unknown_coverage_is_refused() -> None:
    with pytest.raises(ConfigError, match="use truncation or substitution"):
        choose(with_curves(*CURVES), 0.9, "both")
    with pytest.raises(ConfigError, match="mass_of='softmax'.*use selected or scores"):
        choose(with_curves(*CURVES), 0.9, mass_of="softmax")


def test_budgets_are_read_back(tmp_path: Path) -> None:
    budgets = {LAYERS[1]: 5, LAYERS[0]: 2}
    asked = {"mass": 0.9, "mass_of": "scores", "coverage": "truncation"}
    write_budgets(tmp_path / "b.json", FINGERPRINT, budgets, asked)
    assert list(read_budgets(tmp_path / "b.json", FINGERPRINT, LAYERS, EXPERTS).items()) == [
        (LAYERS[0], 2),
        (LAYERS[1], 5),
    ]
    assert json.loads((tmp_path / "b.json").read_text()) == {
        "format": "spac-budgets-1",
        "fingerprint": FINGERPRINT,
        "tuned_to": asked,
        "budgets": budgets,
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read.*vllm-spac quality budgets"),
        ("{", "cannot be read.*vllm-spac quality budgets"),
        ("\udcff", "cannot be read.*vllm-spac quality budgets"),
        ("[]", "no budget file.*vllm-spac quality budgets"),
        ({"format": "other"}, "no budget file.*vllm-spac quality budgets"),
        ({"fingerprint": "f" * 32}, "another model or revision.*vllm-spac quality budgets"),
        ({"budgets": [1, 2]}, "layers differ"),
        ({"budgets": {LAYERS[0]: 2}}, "layers differ"),
        ({"budgets": {LAYERS[0]: 2, LAYERS[1]: 2, "more": 1}}, "layers differ"),
        ({"budgets": {LAYERS[0]: 2, LAYERS[1]: 0}}, "is 0; use 1 to 6"),
        ({"budgets": {LAYERS[0]: 2, LAYERS[1]: 7}}, "is 7; use 1 to 6"),
        ({"budgets": {LAYERS[0]: 2, LAYERS[1]: 2.0}}, r"is 2\.0; use 1 to 6"),
        ({"budgets": {LAYERS[0]: 2, LAYERS[1]: True}}, "is True; use 1 to 6"),
    ],
    ids=str,
)
def test_budgets_that_are_refused(tmp_path: Path, content: dict | str | None, says: str) -> None:
    path = tmp_path / "b.json"
    if isinstance(content, dict):
        write_budgets(path, FINGERPRINT, {LAYERS[0]: 2, LAYERS[1]: 5}, {})
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    elif content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=f"--spac-budget.*{says}"):
        read_budgets(path, FINGERPRINT, LAYERS, EXPERTS)
