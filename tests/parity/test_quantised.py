"""Stock vLLM's tokens with quantised experts in slots, on a CPU: every scheme that stock vLLM serves there."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantised
from exactness import assert_same_tokens

pytestmark = pytest.mark.skipif(quantised.missing() is not None, reason=str(quantised.missing()))
SHORT = ("fp8", "gptq by 32", "mxfp4")  # one of each kind of kernel parameters; the others take long with `full`
LAYERS = {"mxfp4": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(scheme: str) -> Path:
        if scheme not in made:
            made[scheme] = quantised.write(scheme, tmp_path_factory.mktemp("quantised"))
        return made[scheme]

    return get


def schemes() -> list:
    return [s if s in SHORT else pytest.param(s, marks=pytest.mark.full) for s in quantised.SCHEMES]


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
    forwards = LAYERS.get(scheme, 3) * sum(least.stats["steps"].values())
    assert least.stats["waves"] > forwards, "no layer needed more experts than there are slots"
    assert all_of_them.stats["misses"] == 0 < half.stats["misses"] < least.stats["misses"]
