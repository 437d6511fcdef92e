"""Calibration: what is counted, what is read back, what is refused, and budgets from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec.calibration import Calibration, CalibrationRecorder, choose
from vllm_spac.system import tensor_file

LAYERS, EXPERTS, TOP_K, WINDOW = ("model.layers.0.mlp", "model.layers.1.mlp"), 6, 2, 4
FINGERPRINT = "0123456789abcdef" * 2
AGAIN = "vllm-spac quality calibrate"


def recorder(**others) -> CalibrationRecorder:
    facts = {"fingerprint": FINGERPRINT, "model": "toy", "layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K}
    return CalibrationRecorder(**facts | {"window": WINDOW, "source": "prompts"} | others)


def text(seed: int, tokens: int = 11) -> list[Tensor]:
    """Router scores [tokens, N] of each layer."""
    generator = torch.Generator().manual_seed(seed)
    return [(2 * torch.randn(tokens, EXPERTS, generator=generator)).softmax(1) for _ in LAYERS]


def observe(recorder: CalibrationRecorder, scores: list[Tensor], chunks: tuple[int, ...] = ()) -> None:
    """One text, in forwards that end at ``chunks``."""
    bounds = [0, *chunks, len(scores[0])]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        for layer, probs in enumerate(scores):
            rows = probs[start:stop]
            weights, ids = rows.topk(TOP_K)
            recorder.observe(layer, rows, weights, ids.int())
    recorder.end_text()


def recorded(texts: int = 3) -> Calibration:
    made = recorder()
    for seed in range(texts):
        observe(made, text(seed))
    return made.result()


def same(a: Calibration, b: Calibration) -> bool:
    facts = ("fingerprint", "model", "layers", "top_k", "window", "tokens")
    return all(getattr(a, name) == getattr(b, name) for name in facts) and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("counts", "curves")
    )


def test_by_hand() -> None:
    """Two windows of two tokens and a remainder, in a layer of three experts."""
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.1, 0.8], [0.1, 0.3, 0.6], [1.0, 0.0, 0.0]])
    made = CalibrationRecorder("f", "toy", ["only"], 3, 1, window=2)
    made.observe(0, probs, *probs.topk(1))
    made.end_text()
    found = made.result()
    assert found.tokens == 5 and found.counts.tolist() == [[3, 0, 2]]
    first, second = [1.2 / 2, 1.8 / 2, 1], [1.4 / 2, 1.8 / 2, 1]
    torch.testing.assert_close(found.curve("scores"), (torch.tensor([first]) + torch.tensor([second])) / 2)
    assert found.curve("selected").tolist() == [[1, 1, 1]], "in each window the best expert is the only one selected"


def test_selected_mass_by_hand() -> None:
    """Scores of rows that selected them add up to .6 .5 0 .35, so the order is 0 1 3 2, and all scores to .7 .5 .4 .4.

    The weights of the two selected add up to 1.
    """
    probs = torch.tensor([[0.6, 0.2, 0.15, 0.05], [0.1, 0.3, 0.25, 0.35]])
    made = CalibrationRecorder("f", "toy", ["only"], 4, 2, window=2)
    made.observe(0, probs, torch.tensor([[0.75, 0.25], [0.55, 0.45]]), torch.tensor([[0, 1], [3, 1]]))
    made.end_text()
    found = made.result()
    torch.testing.assert_close(found.curve("scores"), torch.tensor([[0.35, 0.6, 0.8, 1.0]]))
    torch.testing.assert_close(found.curve("selected"), torch.tensor([[0.375, 0.725, 1.0, 1.0]]))
    assert choose(found, 0.7) == choose(found, 0.7, mass_of="selected") == {"only": 2}
    assert choose(found, 0.7, mass_of="scores") == {"only": 3}


@pytest.mark.parametrize("chunks", [(5,), (1, 2, 3), (4, 8), tuple(range(1, 11))])
def test_forwards_do_not_cut_windows(chunks: tuple[int, ...]) -> None:
    made = recorder()
    for seed in range(3):
        observe(made, text(seed), chunks)
    assert same(made.result(), recorded())


def test_nothing_observed_is_refused() -> None:
    with pytest.raises(ConfigError, match="saw no token; use prompts"):
        recorder().result()


def test_saved_and_loaded(tmp_path: Path) -> None:
    recorded().save(tmp_path / "a")
    assert same(Calibration.load(tmp_path / "a", FINGERPRINT, LAYERS, EXPERTS), recorded())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_file_is_as_documented(tmp_path: Path) -> None:
    recorded().save(tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "spac-calibration-4" and json.loads(metadata["layers"]) == list(LAYERS)
    assert (metadata["tokens"], metadata["window"], metadata["top_k"], metadata["experts"]) == ("33", "4", "2", "6")
    tensors = {name: (str(t.dtype), tuple(t.shape)) for name, t in load_file(tmp_path / "a").items()}
    assert tensors == {"counts": ("torch.int64", (2, 6)), "curves": ("torch.float32", (2, 2, 6))}


@pytest.mark.parametrize(
    "wanted",
    [("f" * 32, LAYERS, EXPERTS), (FINGERPRINT, LAYERS[:1], EXPERTS), (FINGERPRINT, LAYERS[::-1], EXPERTS),
     (FINGERPRINT, LAYERS, 7)],
)  # fmt: skip
def test_of_another_model_is_refused(tmp_path: Path, wanted: tuple) -> None:
    recorded().save(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"made for toy .*not for this model or revision.*{AGAIN}"):
        Calibration.load(tmp_path / "a", *wanted)


def damaged(path: Path, metadata: dict[str, str | None], **tensors: Tensor | None) -> None:
    """The file at ``path`` with other metadata and tensors; None takes one out."""
    with safe_open(path, framework="pt") as file:
        texts = file.metadata() | metadata
    content = load_file(path) | tensors
    save_file(
        {k: v for k, v in content.items() if v is not None}, path, {k: v for k, v in texts.items() if v is not None}
    )


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"format": "spac-calibration-5"}},
        {"metadata": {"format": None}},
        {"metadata": {"tokens": None}},
        {"metadata": {"tokens": "34"}},
        {"metadata": {"tokens": "many"}},
        {"metadata": {"layers": "7"}},
        {"metadata": {"layers": "["}},
        {"metadata": {"top_k": "3"}},
        {"metadata": {"window": "0"}},
        {"metadata": {"experts": "5"}},
        {"counts": None},
        {"counts": torch.zeros(2, 6)},
        {"counts": torch.zeros(2, 5, dtype=torch.int64)},
        {"counts": torch.zeros(2, 6, dtype=torch.int64)},
        {"curves": torch.zeros(2, 2, 5)},
        {"curves": torch.zeros(2, 6)},
        {"curves": torch.full((2, 2, 6), float("nan"))},
    ],
    ids=str,
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict) -> None:
    recorded().save(tmp_path / "a")
    damaged(tmp_path / "a", **{"metadata": {}} | change)
    with pytest.raises(ConfigError, match=AGAIN):
        Calibration.load(tmp_path / "a", FINGERPRINT, LAYERS, EXPERTS)


@pytest.mark.parametrize("format", [1, 2, 3])
def test_a_file_of_an_earlier_format_is_refused(tmp_path: Path, format: int) -> None:
    """Format 1 had those of the routers' scores alone, 2 those of another order of the experts, and 3 counted pairs."""
    recorded().save(tmp_path / "a")
    damaged(tmp_path / "a", {"format": f"spac-calibration-{format}"}, curves=recorded().curves.clone())
    with pytest.raises(ConfigError, match=f"not a calibration of format .*-4 but of .*-{format}.; .*{AGAIN}"):
        Calibration.read(tmp_path / "a")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded().save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def half(tensors, path, metadata) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "save_file", half)
    with pytest.raises(ConfigError, match="cannot be written.*No space.*name another file"):
        recorded(1).save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, second = recorder(), recorder()
    observe(first, text(0))
    observe(first, text(1))
    first.save_progress(tmp_path / "p")
    second.resume(tmp_path / "p")
    assert (second.texts, second.tokens) == (2, 22)
    observe(second, text(2))
    assert same(second.result(), recorded())


@pytest.mark.parametrize(
    "other",
    [{"source": "others"}, {"window": 5}, {"fingerprint": "f"}, {"top_k": 1}, {"layers": ("a", "b")}, {"experts": 7}],
    ids=str,
)
def test_progress_of_another_run_is_refused(tmp_path: Path, other: dict) -> None:
    made = recorder()
    observe(made, text(0))
    made.save_progress(tmp_path / "p")
    with pytest.raises(ConfigError, match="another model, window or set of texts; delete it"):
        recorder(**other).resume(tmp_path / "p")


def test_a_calibration_is_no_progress_nor_the_other_way_round(tmp_path: Path) -> None:
    made = recorder()
    observe(made, text(0))
    made.save_progress(tmp_path / "p")
    made.result().save(tmp_path / "a")
    with pytest.raises(ConfigError, match="is not the progress"):
        recorder().resume(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"is not a calibration.*{AGAIN}"):
        Calibration.load(tmp_path / "p", FINGERPRINT, LAYERS, EXPERTS)
