"""Experts on the CPU in real engines: the tokens of stock vLLM in float32, and how many of them in bfloat16.

Only the last sum of a layer is rounded otherwise than in stock. In float32 that is some 1e-7 of a logit; the two best
logits of a random model are that near once in about 1e6 tokens, and these runs have 128. bfloat16 is off by 1e-2.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import threading
import time

import engines
import late_experts
import one_thread
import pytest
import torch
from compare import METHODS, TOY, compare
from exactness import FLOAT32, agreeing, assert_same_tokens
from looped_experts import LoopedServer
from vllm_spac.kernels.reference import mailbox

import vllm_spac
from vllm_spac.core import Rates
from vllm_spac.cpu_kernels import _library
from vllm_spac.cpu_kernels._library import library, missing
from vllm_spac.decisions.guard.payback import LEAST
from vllm_spac.execution import cpu_check
from vllm_spac.execution.device import cpu_share
from vllm_spac.integration.loading import assembly

FOR_THE_CPU = Rates(fast=1e-4, stream=1.0, cpu=1e-6, cpu_row=1e-9)  # it is to compute all that is missing


compiled = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def exact(checkpoint) -> engines.Run:
    return engines.generate(checkpoint("qwen3_moe"), **FLOAT32)


# Policies and numbers of slots take turns, so that each is seen beside each way to divide.
@pytest.mark.parametrize(
    "spac",
    [
        {"slots": 4, "cpu_experts": 2, "prefetch": "utility"},
        {"slots": "25%", "cpu_experts": "threshold@misses=load", "policy": "utility"},
        pytest.param({"slots": "60%", "cpu_experts": "auto"}, marks=pytest.mark.full),
        {"slots": "60%", "cpu_experts": 64},
    ],
    ids=str,
)
def test_same_tokens_as_stock_in_float32(spac, exact, checkpoint):
    run = engines.generate(checkpoint("qwen3_moe"), {**spac, "store": "host"}, **FLOAT32)
    assert_same_tokens(run, exact)
    assert run.stats["mode"] == "exact up to rounding"
    assert run.stats["cpu_rows"] >= run.stats["cpu_experts"] > 0
    assert spac["cpu_experts"] != 64 or run.stats["loads"] == 0, "all that is missing runs on the CPU"


@pytest.mark.parametrize(
    "spac",
    [
        {"slots": 4, "cpu_experts": 2},
        {"slots": "25%", "cpu_experts": "waterfill", "policy": "lfu"},
        {"slots": "25%", "cpu_experts": "auto"},
        pytest.param({"slots": "60%", "cpu_experts": 64, "policy": "lfu"}, marks=pytest.mark.full),
    ],
    ids=str,
)
@compiled
def test_same_tokens_where_the_device_decides(spac, exact, checkpoint, monkeypatch):
    """Layers of the twins hand experts to a thread, and compute the others meanwhile."""
    spac = {**spac, "plane": "pointers"}
    if spac["cpu_experts"] == "waterfill":  # by measured rates it may leave the CPU none
        monkeypatch.setattr(assembly, "serving_rates", lambda *_, **__: FOR_THE_CPU)
    run = engines.generate(checkpoint("qwen3_moe"), spac, **FLOAT32)
    assert_same_tokens(run, exact)
    stats = run.stats
    assert stats["mode"] == "exact up to rounding"
    if spac["cpu_experts"] != "auto":  # which takes what was measured to pay on this machine, also none
        assert stats["cpu_rows"] >= stats["cpu_experts"] > 0
    assert 0 < stats["bytes"]["host streamed"] < (stats["misses"] - stats["loads"]) * stats["expert_bytes"]
    assert stats["bytes"]["host staged"] > 0


@pytest.mark.parametrize("fault", ["an error", "no answer", "wrong numbers", "slow"])
def test_a_thread_that_fails_costs_no_token(fault, exact, checkpoint, monkeypatch, caplog):
    """From its tenth request on; the device computes what does not arrive, and the log tells an error."""
    monkeypatch.setattr(cpu_share, "PATIENCE", 10_000_000_000)
    answer, calls = LoopedServer.answer, itertools.count()

    @torch.inference_mode()
    def faulty(self: LoopedServer, number: int) -> None:
        if next(calls) < 10:
            answer(self, number)
            return
        monkeypatch.setattr(cpu_share, "PATIENCE", 2_000_000)
        if fault == "an error":
            raise RuntimeError("the CPU is on holiday")
        if fault == "wrong numbers":
            self.mail.results.fill_(1e6)
            self.mail.answered[0] = number + 1
        elif fault == "slow":
            time.sleep(0.02)
            answer(self, number)

    monkeypatch.setattr(LoopedServer, "answer", faulty)
    spac = {"slots": "25%", "plane": "pointers", "cpu_experts": 64, "cpu_kernel": "looped_experts:Looped"}
    run = engines.generate(checkpoint("qwen3_moe"), spac, **FLOAT32)
    assert_same_tokens(run, exact)
    assert next(calls) > 10 and run.stats["cpu_experts"] > 0 and run.stats["cpu_late"] > 0
    if fault == "an error":
        assert "the CPU is on holiday" in caplog.text


@compiled
def test_compiled_kernels_that_answer_too_late_cost_no_token(exact, checkpoint, monkeypatch):
    """Their thread needs no interpreter: it computes what nobody waits for, and later requests replace that."""
    awaits = mailbox.wait_for_answer

    def never(ids, layer, sources, division, mail, patience) -> None:
        awaits(ids, layer, sources, division, mail._replace(answered=torch.zeros_like(mail.answered)), 1)

    monkeypatch.setattr(mailbox, "wait_for_answer", never)
    monkeypatch.setattr(cpu_share, "LONGEST", 1)
    spac = {"slots": "25%", "plane": "pointers", "cpu_experts": 64, "cpu_kernel": "simd"}
    run = engines.generate(checkpoint("qwen3_moe"), spac, **FLOAT32)
    assert_same_tokens(run, exact)
    assert run.stats["cpu_late"] > 10


class Stopper(threading.Thread):
    """Stops or ends a thread of the compiled kernels in the middle of a layer, once there is one."""

    def __init__(self, name: str, ends: bool) -> None:
        super().__init__()
        self.thread, self.ends, self.found, self.over = name, ends, queue.SimpleQueue[object](), threading.Event()

    def run(self) -> None:
        while not (threads := one_thread.named(self.thread)) and not self.over.is_set():
            time.sleep(0.001)
        try:
            compute = ctypes.cast(library().compute, ctypes.c_void_p).value
            with one_thread.stopped_in(threads[0], compute) as tracer:
                if self.ends:
                    one_thread.end(tracer)
                self.found.put(None)
                self.over.wait()
        except BaseException as error:
            self.found.put(error)


@pytest.mark.skipif(missing() != "", reason=missing())
@pytest.mark.parametrize(
    "name, ends",
    [("spac-experts", False), ("spac-experts", True), ("spac-mailbox", False)],
    ids=["one of the pool stops", "one of the pool ends", "the one that answers stops"],
)
def test_a_compiled_thread_that_stops_in_a_layer_costs_no_token(name, ends, exact, checkpoint, monkeypatch) -> None:
    """The device computes what it does not; and all, once it has been given up."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a pool of two threads needs two processors")
    monkeypatch.setattr(assembly, "threads_of", lambda _: 2)
    monkeypatch.setattr(_library, "PATIENCE", 0.2)
    spac = {"slots": "25%", "plane": "pointers", "cpu_experts": 64, "cpu_kernel": "simd"}
    stopper = Stopper(name, ends)
    stopper.start()
    try:
        with engines.engine(checkpoint("qwen3_moe"), spac, **FLOAT32) as llm:
            while stopper.found.empty():
                engines.say(llm, max_tokens=4)
            if (error := stopper.found.get()) is not None:
                raise error
            before = vllm_spac.stats(llm)["workers"][0]["cpu_late"]
            tokens = engines.say(llm)
            late = vllm_spac.stats(llm)["workers"][0]["cpu_late"]
            stopper.over.set()
    finally:
        stopper.over.set()
        stopper.join()
    assert tokens == exact.tokens
    assert late >= before and late > 0


def test_moe_spac_as_the_paper_arranges_it() -> None:
    """The preset, with drafts: the CPU computes each miss, and what reads ahead bring is used. Tokens are stock's."""
    spac = {"slots": "25%", "preset": "moe-spac"}
    options = {"speculative_config": METHODS["eagle3"], "max_tokens": 24, **FLOAT32}
    stock, run = compare(TOY / "target", [None, spac], **options)
    assert_same_tokens(run, stock)
    stats = run.stats
    assert stats["steps"]["verify"] > 0 and stats["cpu_experts"] > 0
    assert stats["loads"] == stats["misses"] == stats["prefetch_late"] == 0, "no layer loads or waits"
    assert stats["prefetches"] >= stats["prefetch_hits"] > 0 and stats["hits"] > 0


@pytest.mark.skipif(engines.V2, reason="it compares seconds of steps, and Triton's interpreter fills these")
def test_auto_stops_where_steps_are_longer_than_its_rates_promise(checkpoint, monkeypatch) -> None:
    """The rates let the CPU compute all that is missing; served, each of its computations takes 4 ms more."""
    monkeypatch.setattr(assembly, "serving_rates", lambda *_, **__: FOR_THE_CPU)
    spac = {"slots": "50%", "store": "host", "cpu_experts": "auto", "cpu_kernel": "late_experts:LateExperts"}
    compared = 2 * cpu_check.BLOCK * LEAST
    prompts, steps = [[5], [6], [7]], (compared + 80) // 2  # of the second one the last 80 are after the verdict
    with engines.engine(checkpoint("qwen3_moe"), spac, **FLOAT32) as llm:
        monkeypatch.setitem(late_experts.LATE, "seconds", 0.004)
        tokens, found = [], []
        for prompt in prompts:
            tokens += engines.say(llm, [prompt], steps)
            found.append(vllm_spac.stats(llm)["workers"][0])
    first, second, third = found
    assert first["cpu_experts"] > 0 and second["cpu_stops"] == third["cpu_stops"] == 1
    assert third["cpu_experts"] == second["cpu_experts"] and third["loads"] > second["loads"] + steps
    stock = engines.generate(checkpoint("qwen3_moe"), **FLOAT32, prompts=prompts, max_tokens=steps)
    assert tokens == stock.tokens


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2", "mixtral"])
def test_other_experts(family, checkpoint):
    """Biases and clamped activations; shared experts; the widest experts."""
    stock = engines.generate(checkpoint(family), **FLOAT32)
    run = engines.generate(checkpoint(family), {"slots": "40%", "store": "host", "cpu_experts": 1}, **FLOAT32)
    assert_same_tokens(run, stock)
    assert run.stats["cpu_experts"] > 0


def test_agreement_in_bfloat16(checkpoint, stock):
    """Tokens until the first near-tie that rounding decides; after it, texts differ. Reported, and not nothing."""
    spac = {"slots": "25%", "store": "host", "cpu_experts": 2}
    run = engines.generate(checkpoint("qwen3_moe"), spac)
    same = sum(map(agreeing, run.tokens, stock("qwen3_moe").tokens))
    print(f"{same} of {sum(map(len, run.tokens))} tokens before the first difference of a text")
    assert run.stats["cpu_experts"] > 0
    assert same > len(run.tokens), "each text's first token is one forward away from stock's, and more agree"


@pytest.mark.full
def test_verify_steps(tmp_path):
    """With drafts, a trace and float32: speculation changes which rows run together, and nothing else."""
    spac = {"slots": "25%", "store": "host", "cpu_experts": 4, "record": f"trace={tmp_path / 'trace'}"}
    options = {"speculative_config": METHODS["eagle3"], "max_tokens": 16, **FLOAT32}
    stock, run = compare(TOY / "target", [None, spac], **options)
    assert_same_tokens(run, stock)
    assert run.stats["steps"]["verify"] > 0 and run.stats["cpu_experts"] > 0
    assert (tmp_path / "trace").stat().st_size > 0
