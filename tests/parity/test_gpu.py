"""Real engines on a GPU: stock's tokens on both runners with CUDA graphs, and no wait that stock has not.

For ``make test-gpu``. Written where there was no GPU: until a result is committed, these have never run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import engines
import pytest
import torch
from compare import METHODS, TOY, compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GRAPHS = {"enforce_eager": False, "max_tokens": 32}
# Off the CPU, a kernel's tile follows from the number of experts that it is given, and with it how sums are rounded:
# fewer slots may turn a near-tie, after which texts differ. With all experts resident nothing may differ.
CASES = {
    "resident": ({"slots": "100%"}, 1.0),
    "slots": ({"slots": "25%"}, 0.7),
    "pointers": ({"slots": "25%", "execution": "pointers", "staging": "on"}, 0.7),
    "pointers, between steps": ({"slots": "25%", "execution": "pointers", "admission": "step"}, 0.7),
    "pointers, resident": ({"slots": "100%", "execution": "pointers"}, 0.7),
}


@pytest.mark.parametrize("runner", ["V2", "V1"])
@pytest.mark.parametrize("speculation", [None, *METHODS])
def test_tokens_of_stock(runner, speculation, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    options = GRAPHS | ({"speculative_config": METHODS[speculation]} if speculation else {})
    stock, *runs = compare(TOY / "target", [None, *(spac for spac, _ in CASES.values())], **options)
    total = sum(map(len, stock.tokens))
    for (name, (spac, least)), run in zip(CASES.items(), runs, strict=True):
        same = sum(_agreeing(*pair) for pair in zip(run.tokens, stock.tokens, strict=True))
        print(f"{runner}, {speculation}, {name}: {same} of {total} tokens before the first difference of a text")
        assert same >= least * total, name
        assert (run.stats["misses"] > 0) == (spac["slots"] != "100%"), name


def _agreeing(ours: list[int], theirs: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))


def test_a_decode_step_waits_no_more_often_than_stocks(tmp_path):
    """Calls into the driver that wait, while 32 tokens are decoded; vLLM itself waits for the tokens of a step."""
    waits = {}
    for name, spac in {"stock": None, **{name: spac for name, (spac, _) in CASES.items()}}.items():
        command = [sys.executable, __file__, json.dumps(spac), str(tmp_path / "waits.json")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-4000:]
        waits[name] = json.loads((tmp_path / "waits.json").read_text())
    print(waits)
    assert sum(waits["stock"].values()) > 0, "the profiler sees nothing"
    slack = 8  # steps in which counts arrive, of about 32; a wait in each layer would be 6 x 32
    for name in set(CASES) - {"slots"}:
        assert sum(waits[name].values()) <= sum(waits["stock"].values()) + slack, waits


def _waits(spac: dict | None) -> Counter:
    from torch.profiler import ProfilerActivity, profile

    with engines.engine(TOY / "target", spac, enforce_eager=False) as llm:
        prompts = [list(range(5, 25))]
        engines.say(llm, prompts, 8)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
            engines.say(llm, prompts, 32)
    waiting = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    return Counter({event.key: event.count for event in record.key_averages() if event.key in waiting})


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    Path(sys.argv[2]).write_text(json.dumps(_waits(json.loads(sys.argv[1]))))
