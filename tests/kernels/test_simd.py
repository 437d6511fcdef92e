"""The compiled CPU experts beside the torch twin of the grouped GEMM: formats, dtypes, sizes, requests."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import one_thread
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_cases import DTYPES, EXPERTS, FORMATS, Case, cases
from torch import Tensor
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.reference.grouped_gemm import grouped_gemm
from vllm_spac.kernels.types import Quantised

from vllm_spac.cpu_kernels import _gemm, _library, simd
from vllm_spac.cpu_kernels._gemm import CompiledGemm
from vllm_spac.cpu_kernels._library import ACTIVATIONS, isas, library, missing
from vllm_spac.cpu_kernels.simd import Simd
from vllm_spac.errors import SpacError
from vllm_spac.system.processors import Processors

if missing():
    pytest.skip(missing(), allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def many_processors() -> Iterator[None]:
    """Threads on processors that are not there are somewhere else; so tests have as many as they ask for."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (simd, _gemm):
            patch.setattr(module, "processors", lambda: Processors(frozenset(range(8))))
        yield


def check(case: Case, isa: str, rows: int, threads: int = 2) -> None:
    request = case.request(rows)
    executor = Simd(case.shape, threads, case.activation, isa=isa)
    found = executor.run(*request, case.experts)
    executor.close()
    case.check(found, case.twin(*request))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind, dtype", list(cases()))
def test_every_format_and_instruction_set(kind: Format | None, dtype: torch.dtype, isa: str) -> None:
    for number, (hidden, intermediate) in enumerate([(96, 160), (416, 96)]):
        case = Case(kind, hidden, intermediate, dtype, ACTIVATIONS[number], biased=number == 1)
        for rows in (1, 7):
            check(case, isa, rows)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(list(FORMATS)), st.sampled_from(DTYPES[:2]), st.integers(1, 90), st.integers(1, 90),
    st.integers(0, 33), st.sampled_from(ACTIVATIONS), st.booleans(), st.sampled_from(isas()), st.integers(1, 4),
)  # fmt: skip
def test_any_size(name, dtype, hidden, intermediate, rows, activation, biased, isa, threads) -> None:
    check(Case(FORMATS[name], 2 * hidden, 2 * intermediate, dtype, activation, biased), isa, rows, threads)


@pytest.mark.parametrize("name", ["plain", "zeros", "mxfp4", "fp8 by block, rows too"])
def test_as_the_grouped_gemm_of_a_GPU(name: str) -> None:
    """Over addresses: what is padding or beyond the table is skipped, and not counted."""
    case = Case(FORMATS[name], 256, 128, torch.bfloat16, "silu", biased=True)
    gemm = CompiledGemm(2)
    tables = {key: torch.tensor([part.data_ptr() for part in t]) for key, t in case.experts.items()}
    quantised = None if case.kind is None else Quantised(case.kind, tables["w13_scale"], tables["w2_scale"])
    for rows, live in ((1, None), (6, 11), (4, 0)):
        x, weights, ids = case.request(rows)
        ids[0, 0] = EXPERTS
        fixed = (
            tables["w13_weight"],
            tables["w2_weight"],
            weights,
            ids.long(),
            128,
            tables["w13_bias"],
            tables["w2_bias"],
        )
        made = []
        for kernel in (gemm, grouped_gemm):
            counts, out = torch.full((EXPERTS,), -1, dtype=torch.int32), torch.full_like(x, torch.nan)
            still = None if live is None else torch.tensor([live], dtype=torch.int32)
            assert kernel(x, *fixed, "silu", out=out, counts=counts, live=still, quantised=quantised) is out
            made.append((out.float(), counts))
        (found, counted), (expected, count) = made
        assert torch.equal(counted, count)
        assert (found - expected).abs().max() <= expected.abs().max() / (16 if "rows" in name else 64)


def test_experts_come_and_go() -> None:
    """Each call reads the memory that it is given, whose tensors are nobody's afterwards."""
    case = Case(FORMATS["int4"], 256, 128, torch.bfloat16, "silu", biased=False)
    executor, layer, other = Simd(case.shape, 2, "silu"), case.experts, {}
    request = case.request(4)
    for seed in range(4):
        codes = torch.randint(0, 256, layer["w13_weight"].shape, generator=torch.Generator().manual_seed(seed)).byte()
        layer["w13_weight"] = codes  # the mapping is the same
        other = dict(layer)  # often at the address of the one before
        expected = case.twin(*request)
        for experts in (layer, other):
            found = executor.run(*request, experts)
            assert (found - expected).abs().max() <= expected.abs().max() / 64, seed
    gone = [weakref.ref(tensor) for tensor in layer.values()]
    layer.clear()
    del other, experts, codes
    assert not any(ref() is not None for ref in gone), "somebody keeps them"
    executor.close()


def test_an_expert_whose_part_is_not_contiguous_is_refused() -> None:
    case = Case(None, 32, 16, torch.bfloat16, "silu", biased=False)
    executor, request = Simd(case.shape, 1, "silu"), case.request(2)
    expected = executor.run(*request, case.experts)
    apart = {name: torch.stack([t, t], 1)[:, 0] for name, t in case.experts.items()}  # experts with gaps between them
    assert torch.equal(executor.run(*request, apart), expected)
    with pytest.raises(AssertionError, match="contiguous"):
        executor.run(*request, {name: torch.stack([t, t], -1)[..., 0] for name, t in case.experts.items()})
    executor.close()


def test_several_threads_call_one_executor() -> None:
    """Each gets what its rows give; one that calls later than another has closed it is refused."""
    case = Case(None, 256, 128, torch.bfloat16, "silu", biased=False)
    executor = Simd(case.shape, 2, "silu")
    requests = [case.request(rows) for rows in (1, 2, 5, 9)]
    expected = [executor.run(*request, case.experts) for request in requests]

    def ask(number: int) -> bool:
        return all(torch.equal(executor.run(*requests[number], case.experts), expected[number]) for _ in range(300))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))
    executor.close()
    with pytest.raises(SpacError, match="closed"):
        executor.run(*requests[0], case.experts)


def test_ids_beyond_the_layer_are_refused() -> None:
    case = Case(None, 32, 16, torch.bfloat16, "silu", biased=False)
    x, weights, ids = case.request(2)
    ids[1, 2], weights[1, 2] = EXPERTS, 1
    executor = Simd(case.shape, 1, "silu")
    with pytest.raises(SpacError, match="an id is not an expert of the layer"):
        executor.run(x, weights, ids, case.experts)
    ids[1, 2] = 0
    assert executor.run(x, weights, ids, case.experts).isfinite().all(), "it goes on"
    executor.close()


def test_NaN_in_a_scale_or_a_row_is_NaN_in_what_it_reaches() -> None:
    case = Case(FORMATS["mxfp4"], 256, 128, torch.bfloat16, "silu", biased=False)
    case.experts["w2_scale"].view(torch.uint8)[2] = 255  # NaN in MX: expert 2
    for isa in isas():
        executor = Simd(case.shape, 2, "silu", isa=isa)
        x, weights = torch.randn(3, 256).bfloat16(), torch.ones(3, 1)
        x[2, 7] = torch.nan
        found = executor.run(x, weights, torch.tensor([[0], [2], [1]]), case.experts)
        assert found.isnan().any(1).tolist() == [False, True, True]
        executor.close()


@pytest.fixture
def large() -> tuple[Case, Simd]:
    """Some hundred tiles a request."""
    case = Case(None, 512, 1024, torch.bfloat16, "silu", biased=False)
    executor = Simd(case.shape, 3, "silu")
    yield case, executor
    executor.close()


def stopping(executor: Simd, case: Case, request: tuple[Tensor, ...], done: threading.Event) -> threading.Thread:
    """Computes a request again and again meanwhile, so that the pool's threads have tiles."""

    def run() -> None:
        while not done.is_set():
            executor.run(*request, case.experts)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("ends", [False, True], ids=["stopped", "ended"])
def test_a_thread_that_does_not_finish_its_tile_is_replaced(large, ends, monkeypatch, caplog) -> None:
    """By new threads, which compute the request again; when it goes on it harms nobody."""
    case, executor = large
    request = case.request(2)
    expected = executor.run(*request, case.experts)
    assert executor.pool is not None
    executor.pool.close()
    monkeypatch.setattr(_library, "PATIENCE", 0.5)
    monkeypatch.setattr(executor, "pool", None)
    executor.run(*request, case.experts)
    compute = ctypes.cast(library().compute, ctypes.c_void_p).value
    done = threading.Event()
    thread = stopping(executor, case, request, done)
    with one_thread.stopped_in(one_thread.named("spac-experts", 2)[0], compute) as tracer:
        if ends:
            one_thread.end(tracer)
        while "given up" not in caplog.text:
            thread.join(0.01)
            assert thread.is_alive(), "the request failed"
        done.set()
        thread.join()
        assert torch.equal(executor.run(*request, case.experts), expected)
        assert len(executor.pool.cpus) == 2
    assert torch.equal(executor.run(*request, case.experts), expected), (
        "the thread goes on, and writes where nobody reads"
    )


def test_processors_that_go_away_while_threads_compute(large) -> None:
    """`taskset -ap 1`: all threads share one; results stay."""
    case, executor = large
    request, before = case.request(2), os.sched_getaffinity(0)
    expected = executor.run(*request, case.experts)
    done = threading.Event()
    thread = stopping(executor, case, request, done)
    pool = one_thread.named("spac-experts", 2)
    try:
        for allowed in ({min(before)}, before, {max(before)}):
            for number in (*pool, thread.native_id):
                os.sched_setaffinity(number, allowed)
            for _ in range(20):
                thread.join(0.001)
            assert thread.is_alive() and one_thread.named("spac-experts") == pool
    finally:
        done.set()
        thread.join()
    assert torch.equal(executor.run(*request, case.experts), expected)
