"""``vllm-spac predictors`` without an engine: what they refuse, and stopping and going on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
import imagined as made

from vllm_spac.cli import predictors as commands
from vllm_spac.cli.main import app
from vllm_spac.decisions.predictor_file import Identity, Training
from vllm_spac.errors import ConfigError
from vllm_spac.methods.speculating_experts import neural_predictor
from vllm_spac.tools.evaluation import engine


def run(*arguments, code: int = 0) -> str:
    """Output of the command on a wide terminal, with lines of text joined."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def training(source: str = "texts") -> Training:
    return Training(made.material(reach=1), Identity("f" * 32, "imagined", made.NAMES), source)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neural_predictor, "_STEPS", 2)


@pytest.fixture
def trained(tmp_path: Path, few_steps: None) -> Path:
    run = training()
    list(run.run())
    run.result().save(tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


SHORT = '{"max_model_len": 512}'


def test_train_refuses_before_an_engine_starts(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    common = ("predictors", "train", "model", "--prompts", texts)
    assert "cannot be read" in run(*common, "--output", tmp_path / "p", code=1)
    texts.write_text("hello\n")
    for options, says in (
        (("--output", tmp_path / "none" / "p"), "is no folder; name another file with --output"),
        (("--output", tmp_path), "is a folder"),
        (("--output", tmp_path / "p", "--engine", "[1]"), "use a JSON object"),
        (("--output", tmp_path / "p", "--slots", "many"), "25%"),
        (
            ("--output", tmp_path / "p", "--engine", '{"max_model_len": 512}'),
            "use --text-tokens 511, or max_model_len 513",
        ),
    ):
        assert says in run(*common, *options, code=1), options
    assert "reach" in run(*common, "--output", tmp_path / "p", "--reach", "0", code=2)


def test_predictors_refuses_before_an_engine_starts(tmp_path: Path, trained: Path) -> None:
    texts = tmp_path / "texts"
    texts.write_text("hello\n")
    common = ("predictors", "measure", "model", "--prompts", texts)
    for options, says in (
        (("--predictor", trained, "--json", tmp_path / "none" / "r"), "is no folder; name another file with --json"),
        (("--predictor", texts, "--json", tmp_path / "r"), "cannot be read as a file of predictors"),
        (("--predictor", tmp_path / "none", "--json", tmp_path / "r"), "vllm-spac predictors train"),
        (("--predictor", trained, "--json", tmp_path / "r", "--slots", "auto"), "--slots auto: misses depend on it"),
        (("--predictor", trained, "--json", tmp_path / "r", "--slots", "some"), "--slots: 'some' is not understood"),
        (("--predictor", trained, "--json", tmp_path / "r", "--prompts", tmp_path / "no"), "cannot be read"),
        (
            ("--predictor", trained, "--json", tmp_path / "r", "--engine", '{"max_model_len": 512}'),
            "use --text-tokens 511, or",
        ),
    ):
        assert says in run(*common, *options, code=1), options


def test_texts_are_divided_into_those_fitted_to_and_others() -> None:
    pieces = [[number, number] for number in range(17)]
    fitted, others = commands._split(pieces)
    assert others == [[7, 7], [15, 15]] and sorted(fitted + others) == pieces
    assert commands._split([[1, 1], [1, 1]]) == ([[1, 1]], [[1, 1]]), "equal texts are two texts"
    with pytest.raises(ConfigError, match="one text only"):
        commands._split(pieces[:1])


def test_a_limit_that_cuts_texts_off_is_said(capsys: pytest.CaptureFixture) -> None:
    commands._limited([[1] * 10, [1] * 9], 20)
    assert "the first 19 tokens are used: --limit-tokens 20" in capsys.readouterr().err
    commands._limited([[1] * 10, [1] * 8], 20)
    assert capsys.readouterr().err == ""


class Asked(engine.Interruptible):
    """Somebody pressed Ctrl-C once."""

    def __enter__(self) -> Asked:
        super().__enter__()
        self.asked = True
        return self


def test_an_interrupted_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, few_steps: None
) -> None:
    progress = tmp_path / "p.progress"
    with monkeypatch.context() as patch:
        patch.setattr(engine, "Interruptible", Asked)
        for done in (1, 2):
            with pytest.raises(typer.Exit) as caught:
                commands._train(training(), progress)
            assert caught.value.exit_code == 130 and progress.exists()
            assert f"stopped after {done} of" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="another model, other texts or other predictors"):
        commands._train(training("others"), progress)
    last = training()
    commands._train(last, progress)
    assert "resuming after 2 of" in capsys.readouterr().err
    assert last.done == last.stages


def test_a_reach_beyond_the_layers_is_refused() -> None:
    for reach, layers in ((1, 1), (1, 2), (5, 6)):
        commands._check_reach(reach, layers)
    for reach, layers, most in ((2, 1, 1), (2, 2, 1), (6, 6, 5)):
        with pytest.raises(
            ConfigError, match=f"--reach {reach}: the model has {layers} MoE layers; use at most {most}"
        ):
            commands._check_reach(reach, layers)


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json: .* cannot be written"):
        commands._write_json(tmp_path / "none" / "r", {})


def test_a_text_fits_into_a_request_with_the_drafts_behind_it() -> None:
    assert commands._behind({}) == commands._behind({"speculative_config": None}) == 1
    assert commands._behind({"speculative_config": {"num_speculative_tokens": 3}}) == 4
    assert engine.length_of(512, 4, {}) == engine.length_of(512, 4, {"max_model_len": 516}) == 516
    assert engine.length_of(512, 4, {"max_model_len": -1}) == engine.length_of(512, 4, {"max_model_len": "1k"}) == 516
    with pytest.raises(ConfigError, match=r"requests have 516 .* max_model_len 512; use --text-tokens 508, or max_"):
        engine.length_of(512, 4, {"max_model_len": 512})
    with pytest.raises(ConfigError, match=r"max_model_len 4; use max_model_len 516"):
        engine.length_of(512, 4, {"max_model_len": 4})


def test_a_model_over_several_ranks_is_refused_before_vllm_starts() -> None:
    """It is observed in this process, and ranks are others."""
    started = engine.engine("model", {}, 512, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--engine: .* one process; leave tensor_parallel_size out"), started:
        pass
