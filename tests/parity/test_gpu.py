"""Real engines on a GPU: stock's tokens on both runners with CUDA graphs, and no additional waits.

``make test-gpu`` starts three engines, one after the other, ``make test-gpu-full`` all of them (most of an hour).
These have not run as they are; the same comparisons have, on an H100 (``benchmarks/results/gpu.md``).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter

import engines
import pytest
import torch
from compare import METHODS, TOY
from exactness import agreeing

import vllm_spac

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GRAPHS = {"enforce_eager": False}
# Off the CPU, a kernel's tile follows from the number of experts that it is given, and with it how sums are rounded:
# fewer slots may turn a near-tie, after which texts differ. So may steps of other sizes, which the guard makes. With
# all experts resident and without the guard nothing may differ.
CASES = {
    "resident": ({"slots": "100%"}, 1.0),
    "slots": ({"slots": "25%", "plane": "slots"}, 0.7),
    "pointers": ({"slots": "25%", "plane": "pointers"}, 0.7),
    "pointers, resident": ({"slots": "100%", "plane": "pointers"}, 0.7),
    "guard": ({"slots": "100%", "guard": "on"}, 0.7),
}
SHORT = ("slots", "pointers")
FULL = pytest.mark.full


@functools.cache
def ask(name: str, runner: str, speculation: str | None) -> tuple[engines.Run, Counter]:
    """What an engine said, and its calls into the driver that wait while it decodes 32 tokens; stock's where no case
    is called ``name``. Each engine starts once a session, in a process of its own."""
    spac = {"guard": "off", **CASES[name][0]} if name in CASES else None
    job = {"spac": spac, "speculation": speculation, "options": GRAPHS}
    env = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0"}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(job)], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return engines.Run(told["tokens"], told["stats"]), Counter(told["waits"])


@pytest.mark.parametrize(
    ("runner", "speculation", "names"),
    [
        pytest.param("V2", None, SHORT, id="short"),
        *(
            pytest.param(runner, speculation, tuple(CASES), marks=FULL, id=f"{runner}-{speculation}")
            for runner in ("V2", "V1")
            for speculation in (None, *METHODS)
        ),
    ],
)
def test_tokens_of_stock(runner, speculation, names):
    stock, _ = ask("stock", runner, speculation)
    total = sum(map(len, stock.tokens))
    for name in names:
        spac, least = CASES[name]
        if speculation is None and "guard" in spac:
            continue
        run, _ = ask(name, runner, speculation)
        same = sum(map(agreeing, run.tokens, stock.tokens))
        print(f"{runner}, {speculation}, {name}: {same} of {total} tokens before the first difference of a text")
        assert same >= least * total, name
        assert (run.stats["misses"] > 0) == (spac["slots"] != "100%"), name


@pytest.mark.parametrize("names", [("pointers",), pytest.param(tuple(CASES), marks=FULL)], ids=["short", "all"])
def test_a_decode_step_waits_no_more_often_than_stocks(names):
    """vLLM itself waits for the tokens of a step; slots ask the host in each layer."""
    waits = {name: ask(name, "V2", None)[1] for name in ("stock", *names) if name not in ("slots", "guard")}
    print(waits)
    assert waits["stock"].total() > 0, "the profiler sees nothing"
    slack = 8  # steps in which counts arrive, of about 32; a wait in each layer would be 6 x 32
    for name, counted in waits.items():
        assert counted.total() <= waits["stock"].total() + slack, (name, waits)


def run_engine(job: dict) -> dict:
    speculative = {"speculative_config": METHODS[job["speculation"]]} if job["speculation"] else {}
    with engines.engine(TOY / "target", job["spac"], **job["options"], **speculative) as llm:
        tokens = engines.say(llm, max_tokens=32)
        stats = vllm_spac.stats(llm)["workers"][0] if job["spac"] is not None else {}
        return {"tokens": tokens, "stats": stats, "waits": waits_of(llm)}


def waits_of(llm) -> Counter:
    from torch.profiler import ProfilerActivity, profile

    prompts = [list(range(5, 25))]
    engines.say(llm, prompts, 8)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        engines.say(llm, prompts, 32)
    waiting = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    return Counter({event.key: event.count for event in record.key_averages() if event.key in waiting})


if __name__ == "__main__":
    print(json.dumps(run_engine(json.loads(sys.argv[1]))))
