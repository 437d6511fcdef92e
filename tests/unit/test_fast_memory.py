"""What a draft, which is loaded after the slots are taken, will need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_spac.integration import fast_memory


def config(target: str, draft: str | None, method: str, predicting: int | None = None) -> SimpleNamespace:
    model = SimpleNamespace(model=target, get_num_layers=lambda parallel: 4)
    hf_config = SimpleNamespace(n_predict=predicting)
    other = model if draft is None else SimpleNamespace(model=draft, hf_config=hf_config)
    speculation = SimpleNamespace(method=method, draft_model_config=other)
    return SimpleNamespace(model_config=model, speculative_config=speculation, parallel_config=None)


@pytest.fixture
def folders(tmp_path):
    for name, files in {
        "target": {"model-1.safetensors": 600, "model-2.safetensors": 400},
        "draft": {"model.safetensors": 70, "consolidated.safetensors": 70, "pytorch_model.bin": 70, "config.json": 9},
        "old": {"pytorch_model.bin": 50},
    }.items():
        (tmp_path / name).mkdir()
        for file, size in files.items():
            (tmp_path / name / file).write_bytes(bytes(size))
    return {name: str(tmp_path / name) for name in ("target", "draft", "old")}


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """Warnings; vLLM, once it is imported, keeps its loggers' records to itself."""
    lines: list[str] = []
    monkeypatch.setattr(fast_memory.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


@pytest.mark.parametrize(
    ("draft", "method", "predicting", "nbytes"),
    [
        (None, "ngram", None, 0),
        ("draft", "draft_model", None, 70),
        ("draft", "eagle3", None, 70),
        ("old", "draft_model", None, 50),
        ("target", "draft_model", None, 1000),
        ("target", "mtp", 1, 200),
        ("target", "mtp", 4, 500),
        ("target", "extract_hidden_states", None, 0),
    ],
)
def test_a_draft_is_as_large_as_its_files(folders, said, draft, method, predicting, nbytes) -> None:
    asked = config(folders["target"], draft and folders[draft], method, predicting)
    assert fast_memory.draft_bytes(asked) == nbytes
    assert not said


def test_without_speculation_there_is_none() -> None:
    assert fast_memory.draft_bytes(SimpleNamespace(speculative_config=None, model_config=None)) == 0


def test_a_draft_of_unknown_size_is_named(folders, said) -> None:
    assert fast_memory.draft_bytes(config(folders["target"], "someone/draft", "eagle3")) == 0
    (line,) = said
    assert "someone/draft" in line and "--spac-slots" in line
