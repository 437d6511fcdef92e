"""Stock vLLM's tokens with quantised experts in slots, on a CPU: every scheme that stock vLLM serves there."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantised
import torch
from exactness import assert_same_tokens

from vllm_spac.cpu_kernels._library import missing

pytestmark = pytest.mark.skipif(quantised.missing() is not None, reason=str(quantised.missing()))
SHORT = ("fp8", "gptq by 32", "mxfp4")  # one of each kind of kernel parameters; the others take long with `full`
LAYERS = {"mxfp4": 2, "fp8, whole, latent attention": 2}  # with experts; others have 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(scheme: str) -> Path:
        if scheme not in made:
            made[scheme] = quantised.write(scheme, tmp_path_factory.mktemp("quantised"))
        return made[scheme]

    return get


def assert_split(run, scheme: str) -> None:
    """Some forward of a layer needed more experts than there are slots; without that, exactness would say little."""
    assert run.stats["waves"] > LAYERS.get(scheme, 3) * sum(run.stats["steps"].values())


def schemes() -> list:
    every = quantised.SCHEMES | quantised.WHOLE
    return [scheme if scheme in SHORT else pytest.param(scheme, marks=pytest.mark.full) for scheme in every]


@pytest.mark.parametrize("scheme", schemes())
def test_same_tokens_as_stock(scheme: str, folder, tmp_path: Path) -> None:
    """With fewer slots than a forward needs, so that experts run in several waves; half; and all."""
    few = {"slots": quantised.TOP_K + 1, "store": "disk", "disk_dir": str(tmp_path)}
    stock, least, half, all_of_them = quantised.runs(
        folder(scheme), [None, few, {"slots": "50%", "store": "host"}, {"slots": "100%"}]
    )
    assert len({tuple(tokens) for tokens in stock.tokens}) > 4, "this model says the same to everything"
    for run in (least, half, all_of_them):
        assert_same_tokens(run, stock, scheme)
    assert_split(least, scheme)
    assert all_of_them.stats["misses"] == 0 < half.stats["misses"] < least.stats["misses"]


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4 by 128", "awq by 32", "mxfp4"])
def test_log_probabilities_are_stocks_to_the_bit(scheme: str, folder, tmp_path: Path) -> None:
    """Of prompts and answers, with split waves."""
    few = {"slots": quantised.TOP_K + 1, "store": "disk", "disk_dir": str(tmp_path)}
    stock, least = quantised.logprobs(folder(scheme), [None, few])
    assert sum(map(len, stock)) > 300 and stock == least


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["fp8", "gptq by 128", "mxfp4"])
def test_same_tokens_with_other_knobs(scheme: str, folder, tmp_path: Path) -> None:
    """Host memory between slots and disk, reads ahead, a budget that cuts nothing, a trace, two shards of a forward."""
    few = {"slots": quantised.TOP_K + 1, "disk_dir": str(tmp_path), "store": "disk"}
    model = folder(scheme)
    stock, tiers, ahead, budget, trace = quantised.runs(
        model,
        [
            None,
            few | {"host_memory": "1MiB"},
            few | {"prefetch": "utility", "policy": "utility"},
            few | {"budget": str(quantised.EXPERTS)},
            few | {"record": f"trace={tmp_path / 'run.trace'}"},
        ],
    )
    for run in (tiers, ahead, budget, trace):
        assert_same_tokens(run, stock, scheme)
        assert_split(run, scheme)
    assert tiers.stats["bytes"]["host"] > 0 and tiers.stats["bytes"]["disk"] > 0
    assert (tmp_path / "run.trace").stat().st_size > 0


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_same_tokens_with_drafts_and_compiled(scheme: str, folder, tmp_path: Path) -> None:
    """Verify steps have several rows per request. vLLM survives one engine with drafts per process."""
    few = {"slots": quantised.TOP_K + 1, "disk_dir": str(tmp_path), "store": "disk", "guard": "off"}
    for options in ({"speculative_config": NGRAM}, {"enforce_eager": False}):
        (stock,), (run,) = (quantised.runs(folder(scheme), [spac], **options) for spac in (None, few))
        assert_same_tokens(run, stock, f"{scheme}, {options}")
        assert_split(run, scheme)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    "scheme", ["int4 by 64", *(pytest.param(scheme, marks=pytest.mark.full) for scheme in ("fp8", "mxfp4"))]
)
def test_workers_compute_what_this_process_does(scheme: str, folder, tmp_path: Path) -> None:
    """To the bit: experts are packed by an engine, kept by two workers, and computed by the same kernel there."""
    workers = {"slots": "50%", "executor": "processes@workers=2", "disk_dir": str(tmp_path)}
    here, there = quantised.runs(folder(scheme), [{"slots": "50%", "plane": "table"}, workers])
    assert len({tuple(tokens) for tokens in here.tokens}) > 4, "this model says the same to everything"
    assert here.tokens == there.tokens
    assert (there.stats["mode"], there.stats["execution"]) == ("exact up to rounding", "workers")
    assert there.stats["misses"] > 0 and there.stats["worker_rows_elsewhere"] == 0
    assert there.stats["expert_bytes"] == here.stats["expert_bytes"]


@pytest.mark.parametrize("scheme", ["fp8", pytest.param("int8", marks=pytest.mark.full), "int4 by 64", "mxfp4"])
def test_pointers_compute_what_dequantised_weights_do(scheme: str, folder, tmp_path: Path) -> None:
    """To the bit: engines whose experts are read as they are packed, and as the weights that they mean.

    Against stock vLLM, the latter are tested in float32 (``test_pointers.py``), which vLLM has no quantised experts in.
    """
    spac = {"slots": "50%", "plane": "pointers", "store": "host"}
    plain = quantised.write(scheme, tmp_path / "plain", torch.bfloat16)
    (packed,), (meant,) = (quantised.runs(model, [spac]) for model in (folder(scheme), plain))
    assert len({tuple(tokens) for tokens in meant.tokens}) > 4, "this model says the same to everything"
    assert packed.tokens == meant.tokens
    assert packed.stats["misses"] > 0
    assert packed.stats["expert_bytes"] < 0.6 * meant.stats["expert_bytes"]
