"""Files of predictors: what is written and read back, what is refused, and training that goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
import imagined as made

from vllm_spac.decisions.predictor_file import Identity, PredictorFile, Training, flat, kinds
from vllm_spac.errors import ConfigError
from vllm_spac.methods.speculating_experts import neural_predictor

IDENTITY = Identity("0123456789abcdef" * 2, "imagined", made.NAMES)
AGAIN = "vllm-spac predictors train"
MATERIAL = made.material()


def training(**others) -> Training:
    return Training(**{"material": MATERIAL, "identity": IDENTITY, "source": "texts"} | others)


@pytest.fixture(scope="module", autouse=True)
def short() -> None:
    """Few gradient steps: what is tested is what happens around them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neural_predictor, "_STEPS", 3)
        yield


@cache
def whole() -> PredictorFile:
    run = training()
    assert [name for name in run.run()][-1] == "hybrid"
    return run.result()


@pytest.fixture
def file() -> PredictorFile:
    return whole()


@pytest.fixture
def path(file: PredictorFile, tmp_path: Path) -> Path:
    file.save(tmp_path / "p")
    return tmp_path / "p"


def same(one: PredictorFile, other: PredictorFile) -> bool:
    ours, theirs = flat(one.tensors), flat(other.tensors)
    facts = ("identity", "sizes", "tokens", "left_out")
    return all(getattr(one, name) == getattr(other, name) for name in facts) and (
        ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    )


def test_saved_and_loaded(file: PredictorFile, path: Path) -> None:
    found = PredictorFile.load(path, IDENTITY, made.EXPERTS)
    assert same(found, file) and found.names == file.names == list(kinds())
    assert found.tokens == MATERIAL.samples.rows and [p.name for p in path.parent.iterdir()] == ["p"]
    seen = MATERIAL.others.inputs(0, slice(0, 9), file.build("quasi_hidden").needs)
    for name in file.names:
        [one], [other] = found.build(name).guesses(seen), file.build(name).guesses(seen)
        assert torch.equal(one.scores, other.scores)


def test_a_shorter_reach_is_the_same_without_the_later_layers(file: PredictorFile) -> None:
    far, near = file.build("quasi_hidden"), file.build("quasi_hidden", reach=1)
    seen = MATERIAL.others.inputs(1, slice(0, 9), far.needs)
    [one], [other] = far.guesses(seen), near.guesses(seen)
    assert (far.reach, near.reach) == (2, 1) and near.nbytes < far.nbytes
    assert one.first == other.first and one.scores.shape[1] == 2 * made.EXPERTS
    torch.testing.assert_close(one.scores[:, : made.EXPERTS], other.scores)  # products of other sizes round otherwise


def test_the_file_is_as_documented(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "spac-predictors-4" and json.loads(metadata["layers"]) == list(made.NAMES)
    assert json.loads(metadata["names"]) == list(kinds()) and json.loads(metadata["left_out"]) == {}
    sizes = {name: int(metadata[name]) for name in ("experts", "top_k", "width", "reach", "tokens")}
    expected = {"experts": made.EXPERTS, "top_k": made.TOP_K, "width": made.WIDTH, "reach": 2}
    assert sizes == expected | {"tokens": MATERIAL.samples.rows}
    tensors = load_file(path)
    assert tensors["quasi_hidden.map.2.3"].shape == (made.WIDTH + made.EXPERTS, made.EXPERTS)
    assert tensors["quasi_hidden.map.2.3"].dtype == torch.bfloat16 and tensors["hybrid.choice"].dtype == torch.int64


@pytest.mark.parametrize(
    ("other", "experts"),
    [({"fingerprint": "f" * 32}, 12), ({"layers": made.NAMES[:2]}, 12), ({"layers": made.NAMES[::-1]}, 12), ({}, 13)],
    ids=str,
)
def test_of_another_model_is_refused(path: Path, other: dict, experts: int) -> None:
    with pytest.raises(ConfigError, match=f"made for imagined .*not for this model or revision.*{AGAIN}"):
        PredictorFile.load(path, dataclasses.replace(IDENTITY, **other), experts)


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"format": "spac-predictors-5"}},
        {"metadata": {"format": None}},
        {"metadata": {"layers": "["}},
        {"metadata": {"layers": '["a"]'}},
        {"metadata": {"tokens": "many"}},
        {"metadata": {"width": None}},
        {"metadata": {"width": "9"}},
        {"metadata": {"reach": "1"}},
        {"metadata": {"reach": "9"}},
        {"metadata": {"experts": str(1 << 40)}},
        {"metadata": {"names": "7"}},
        {"metadata": {"names": "[]"}},
        {"metadata": {"names": '["gate", "psychic"]'}},
        {"metadata": {"left_out": "[]"}},
        {"metadata": {"left_out": '{"gate": "why"}'}},
        {"gate.map.1.1": None},
        {"gate.map.1.1": torch.zeros(made.WIDTH, made.EXPERTS)},
        {"gate.map.1.1": torch.zeros(made.WIDTH, made.EXPERTS, dtype=torch.float64)},
        {"gate.map.1.1": torch.zeros(made.EXPERTS, made.WIDTH, dtype=torch.bfloat16)},
        {"gate.map.1.1": torch.full((made.WIDTH, made.EXPERTS), float("nan"), dtype=torch.bfloat16)},
        {"gate.more": torch.zeros(2)},
        {"psychic.map": torch.zeros(2)},
        {"hybrid.choice": torch.full((made.LAYERS,), 99)},
        {"hybrid.choice": torch.full((made.LAYERS,), -1)},
    ],
    ids=str,
)
def test_a_damaged_file_is_refused(path: Path, change: dict) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() | change.pop("metadata", {})
    content = load_file(path)
    assert set(change) - {"gate.more", "psychic.map"} <= set(content)
    content |= change
    kept = {k: v for k, v in content.items() if v is not None}
    save_file(kept, path, {k: v for k, v in metadata.items() if v is not None})
    with pytest.raises(ConfigError, match=AGAIN) as caught:
        PredictorFile.load(path, IDENTITY, made.EXPERTS)
    assert str(caught.value).isprintable()


def test_a_file_of_an_older_version_is_refused(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() | {"format": "spac-predictors-3"}
    save_file(load_file(path), path, metadata)
    with pytest.raises(ConfigError, match="of format spac-predictors-4 but of .*spac-predictors-3.*; train again with"):
        PredictorFile.load(path, IDENTITY, made.EXPERTS)


# -- training that is interrupted --------------------------------------------------------------------------------------

STAGES = 5 + 5 + 3 + 1  # gate, quasi-hidden; networks of all layers but the first; hybrid


@given(cuts=st.lists(st.integers(0, STAGES), max_size=4).map(sorted))
@settings(max_examples=examples(12))
def test_an_interrupted_training_gives_the_same_file(tmp_path_factory, cuts: list[int]) -> None:
    """Stopped after any stages and resumed by another process, which has nothing but the texts and the file."""
    path = tmp_path_factory.mktemp("training") / "progress"
    for cut in cuts:
        run = training()
        assert run.stages == STAGES
        if path.exists():
            run.load_progress(path)
        stages = run.run()
        while run.done < cut:
            next(stages)
        run.save_progress(path)
    last = training()
    if path.exists():
        last.load_progress(path)
        assert last.done == cuts[-1]
    assert len(list(last.run())) == STAGES - (cuts[-1] if cuts else 0)
    assert same(last.result(), whole())


@pytest.fixture
def progress(tmp_path: Path) -> Path:
    run = training()
    stages = run.run()
    while run.done < 10:
        next(stages)
    run.save_progress(tmp_path / "progress")
    return tmp_path / "progress"


@pytest.mark.parametrize(
    "other",
    [
        {"source": "others"},
        {"identity": dataclasses.replace(IDENTITY, fingerprint="f" * 32)},
        {"material": made.material(reach=1)},
    ],
    ids=["texts", "model", "reach"],
)
def test_progress_of_another_run_is_refused(progress: Path, other: dict) -> None:
    with pytest.raises(ConfigError, match="of another model, other texts or other predictors; delete it"):
        training(**other).load_progress(progress)


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"done": "9"}},
        {"metadata": {"done": "11"}},
        {"metadata": {"done": "-1"}},
        {"metadata": {"done": "100"}},
        {"metadata": {"done": "x"}},
        {"gate.map.1.1": None},
        {"gate.map.1.1": torch.zeros(1)},
        {"psychic.map": torch.zeros(1)},
    ],
    ids=str,
)
def test_damaged_progress_is_refused(progress: Path, change: dict) -> None:
    with safe_open(progress, framework="pt") as file:
        metadata = file.metadata() | change.pop("metadata", {})
    content = {k: v for k, v in (load_file(progress) | change).items() if v is not None}
    save_file(content, progress, metadata)
    with pytest.raises(ConfigError, match="delete it"):
        training().load_progress(progress)


def test_progress_is_no_file_nor_the_other_way_round(progress: Path, path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the progress"):
        training().load_progress(path)
    with pytest.raises(ConfigError, match="is not a file of predictors"):
        PredictorFile.read(progress)


def test_what_does_not_fit_is_left_out_and_said_so(tmp_path: Path) -> None:
    run = training(material=dataclasses.replace(MATERIAL, gates="it has no gate"))
    list(run.run())
    made_of = run.result()
    made_of.save(tmp_path / "p")
    found = PredictorFile.read(tmp_path / "p")
    assert found.left_out == {"gate": "it has no gate", "quasi_hidden": "it has no gate"}
    assert not {"gate", "quasi_hidden"} & set(found.names) and "hybrid" in found.names
    assert set(found.build("hybrid").chosen) <= set(found.names)
