"""Every kernel, as its launcher launches it, compiled for five generations of GPUs without one.

The launchers run on CPU tensors with each kernel replaced by a recorder; what they passed is compiled. So a launcher
that passes an unknown name, or a shape that Triton refuses, fails here.
"""

import importlib.util
import os
import re

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (there are no wheels for this platform)", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)

from vllm_spac.kernels import grouped_gemm, route
from vllm_spac.kernels.formats import Format

from benchmarks.kernels.compiled import (
    CARDS,
    KERNELS,
    Compiled,
    admitting,
    budgeted,
    compile_for,
    experts,
    mailing,
    ordering,
    record,
    small,
)

SHARED = {capability: CARDS[capability].block for capability in (80, 89, 90, 100, 120)}


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def say(title: str, capability: int, made: Compiled) -> None:
    print(f"{title:34} sm_{capability:<4}{made.registers:4} registers {made.stack:4} B stack {made.shared:7} B shared")


def check(title: str, capability: int, made: Compiled, stack: int = 0) -> None:
    say(title, capability, made)
    assert made.stack == stack, "registers are spilled"
    assert made.shared <= SHARED[capability], "more shared memory than a block may have"


# Qwen3-30B-A3B's experts; M is the greatest of each bucket of the table of tiles, and a prefill. Up to 16 rows programs
# find their blocks themselves; 15 are as wide with half as many experts, and are sorted.
ROWS = [15, 16, 32, 64, 256, 4096]
BUCKETS = [(capability, rows) for capability in SHARED for rows in (ROWS if capability in (90, 100) else (16, 4096))]


@pytest.mark.parametrize(("capability", "rows"), BUCKETS)
def test_experts(capability, rows):
    """Weights and rows go to shared memory 16 bytes at a time, asynchronously, and tensor cores multiply.

    Without the promise on the addresses in ``_expert``, the compiler would read weights 2 bytes at a time.
    """
    calls = record(lambda: experts(rows, 2048, 768, 8, 64 if rows == 15 else 128))
    assert ("align" in calls) == (rows != 16)
    for name in ("gate_up", "down"):
        made = compile_for(capability, calls[name])
        check(f"{name} M={rows}", capability, made)
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, (0x[0-9a-f]+)", made.ptx)
        assert copies and set(copies) == {"0x10"}, "not 16 bytes at a time"
        assert not re.search(r"ld\.global[.\w]*\.[bu](8|16)\b", made.ptx), "an element at a time"
        assert re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", made.ptx), "no tensor core"


QUANTISED = {
    "mxfp4": Format("e2m1", 32),
    "nvfp4": Format("e2m1", 16),
    "int4": Format("int4", 128),
    "int4, zero points": Format("int4", 128, zeros=True),
    "int4 by 32": Format("int4", 32),
    "int4 by 32, zero points": Format("int4", 32, zeros=True),
    "int8": Format("int8"),
    "fp8 by block": Format("e4m3", 128, 128),
    "fp8 by block, rows too": Format("e4m3", 128, 128, activations=128),
    "fp8 by channel, rows too": Format("e4m3", activations=0),
}


@pytest.mark.parametrize("capability", [89, 120])
@pytest.mark.parametrize("name", [None, "int4", "int4 by 32"])
def test_two_programs_of_few_rows_fit_a_small_multiprocessor(capability, name, monkeypatch):
    """Else half of the bytes in flight are missing. A multiprocessor has 100 KB, of which each block takes 1 more."""
    kind = None if name is None else QUANTISED[name]
    deep = record(lambda: experts(16, 2048, 768, 8, 128, kind=kind))
    monkeypatch.setattr(grouped_gemm, "_shared_memory", lambda device: SHARED[capability])
    shallow = record(lambda: experts(16, 2048, 768, 8, 128, kind=kind))
    for kernel in ("gate_up", "down"):
        made = compile_for(capability, shallow[kernel])
        check(f"{kernel} {name} M=16, shallow", capability, made)
        assert 2 * (made.shared + 1024) <= 100 * 1024, "one program alone fits"
        assert made.shared < compile_for(capability, deep[kernel]).shared
        assert made.registers * 128 * 2 <= 65536, "registers of one program alone fit"
        assert re.search(r"cp\.async\.c[ag]\.shared\.global", made.ptx), "nothing is in flight"


# All formats where a tile decodes on the GPU that has the least for it; the others, and prefill, where they spilled.
COMPILED = [
    *((name, capability, 16) for name in QUANTISED for capability in (80, 90)),
    *((name, 80, 4096) for name in ("mxfp4", "nvfp4", "int4", "fp8 by block")),
    *((name, 90, 4096) for name in QUANTISED if name.endswith("rows too")),
    *(
        pytest.param(name, capability, 16, marks=pytest.mark.full)
        for name in QUANTISED
        for capability in (89, 100, 120)
    ),
    *(
        pytest.param(name, capability, rows, marks=pytest.mark.full)
        for name in QUANTISED
        for capability in (90, 100, 120)
        for rows in (32, 64, 4096)
    ),
]
# Bytes of stack: some registers of 168, and no tile that was tried spills on none of the GPUs (see grouped_gemm).
SPILLED = {
    ("gate_up", "int4 by 32", 120, 32): 16,
    ("gate_up", "int4, zero points", 120, 32): 8,
    ("gate_up", "fp8 by channel, rows too", 120, 32): 8,
    # of 72 to 168 registers, with the code that copies what was admitted
    ("gate_up", "fp8 by block", 80, 4096): 8,
    ("gate_up", "int4", 80, 4096): 16,
    ("gate_up", "fp8 by channel, rows too", 80, 16): 8,
    ("down", "fp8 by block", 90, 16): 8,
    ("down", "fp8 by block", 100, 16): 8,
}


@pytest.mark.parametrize(("name", "capability", "rows"), COMPILED)
def test_quantised_experts(monkeypatch, name, capability, rows):
    """Codes go to shared memory 16 bytes at a time and scales 4 at least, asynchronously; nothing is spilled."""
    monkeypatch.setattr(grouped_gemm, "has_e4m3", lambda device: capability >= 89)
    monkeypatch.setattr(grouped_gemm, "multiplies_across", lambda device: capability == 90)
    sizes = (2880, 2880, 4, 128, "swigluoai", True) if name == "mxfp4" else (2048, 768, 8, 128)
    calls = record(lambda: experts(rows, *sizes, kind=QUANTISED[name]))
    for kernel in ("gate_up", "down"):
        made = compile_for(capability, calls[kernel])
        check(f"{kernel} {name} M={rows}", capability, made, SPILLED.get((kernel, name, capability, rows), 0))
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, (0x[0-9a-f]+)", made.ptx)
        assert "0x10" in copies and set(copies) <= {"0x4", "0x8", "0x10"}
        assert not re.search(r"ld\.global[.\w]*\.[bu]8\b", made.ptx), "a code or an exponent at a time"
        assert not re.search(r"\bmul[.\w]*\.ftz", made.ptx), "codes are subnormal numbers before they are multiplied"
        assert re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", made.ptx), "no tensor core"
        if QUANTISED[name].activations is not None and capability >= 89:
            assert ("wgmma" in made.ptx) == (capability == 90), "not vLLM's instruction, which adds otherwise"


@pytest.mark.parametrize(
    ("activation", "dtype", "d", "ff", "capability"),
    [
        pytest.param("swigluoai", torch.bfloat16, 2880, 2880, 90, id="gpt-oss"),  # interleaved, biases, cut tiles
        pytest.param("silu_clamped", torch.bfloat16, 4096, 2048, 120, id="glm-5.3"),
        pytest.param("swigluoai_uninterleave", torch.bfloat16, 6144, 3072, 90, id="minimax-m3"),
        pytest.param("gelu", torch.float16, 1024, 512, 80, id="gelu-fp16"),
        pytest.param("gelu_tanh", torch.float32, 1024, 512, 89, id="gelu_tanh-fp32"),
    ],
)
def test_variants(activation, dtype, d, ff, capability):
    calls = record(lambda: experts(16, d, ff, 4, 32, activation, bias=True, dtype=dtype))
    for name in ("gate_up", "down"):
        check(f"{name} {activation} {str(dtype)[6:]}", capability, compile_for(capability, calls[name]))


def test_odd_sizes_compile():
    """Rows that are no multiple of 16 bytes are read 2 bytes at a time, and may spill: correct, slow, in no model."""
    calls = record(lambda: experts(16, 1001, 333, 4, 32))
    for name in ("gate_up", "down"):
        say(f"{name} 1001 x 333", 80, compile_for(80, calls[name]))


@pytest.mark.parametrize("capability", SHARED)
def test_a_request_is_whole_before_its_number_and_a_wait_looks_at_memory_and_clock(capability):
    """The number is stored last, behind a fence of every thread and a barrier; it is read again in each turn."""
    calls = record(lambda: mailing(*ids_of(8), 128))
    asks = record(lambda: admitting(*ids_of(8), 128, divided=True))["admit"]
    ask, wait, add = (compile_for(capability, call).ptx for call in (asks, calls["await"], calls["combine"]))
    behind = ask[ask.index("fence.acq_rel.sys") :]
    behind = behind[: re.search(r"\bbra|\bret", behind).start()]
    assert ask.count("fence.acq_rel.sys") == 1 and len(re.findall(r"\bst\.global", behind)) == 1
    assert behind.index("bar.sync") < behind.index("st.global")
    assert re.search(r"st\.global\.v4\.b32", ask), "rows go out 16 bytes at a time"
    loop = wait[wait.index("globaltimer") :]
    assert "globaltimer" in loop[12:] and re.search(r"ld\.volatile\.global[.\w]*\.b64", loop)
    assert wait.index("fence.acq_rel.sys") > wait.rindex("globaltimer") and "ld.volatile" in add


@pytest.mark.parametrize("capability", SHARED)
def test_an_order_is_whole_before_its_number_and_its_wait_reads_memory(capability):
    """As a request; the wait looks at the answer and at the end in each turn, and at the places behind a fence."""
    ptx = compile_for(capability, record(lambda: ordering(*ids_of(8), 128))["order"]).ptx
    fences = [at.start() for at in re.finditer(r"fence\.acq_rel\.sys", ptx)]
    assert len(fences) == 3
    between = ptx[fences[0] : fences[1]]
    assert between.index("bar.sync") < between.index("st.global")
    assert len(re.findall(r"\bst\.global", between)) == 1, "the number, and nothing but it"
    loop = ptx[fences[1] : fences[2]]
    assert len(re.findall(r"ld\.volatile\.global[.\w]*\.b64", loop)) >= 2 and "ld.volatile.global.b32" in loop
    assert "ld.volatile" in ptx[fences[2] :] and not re.search(r"\bst\.global", loop)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_what_is_read_early_is_there_before_it_counts(capability):
    """16 bytes at a time; behind a barrier one thread says so, and each piece looks at memory whether to go on."""
    made = compile_for(capability, record(lambda: experts(1, 2048, 768, 8, 128, early=True))["read_early"])
    check("read_early", capability, made)
    assert re.search(r"ld\.global\.v2\.b64", made.ptx) and re.search(r"st\.global\.v2\.b64", made.ptx)
    assert not re.search(r"st\.global\.b64", made.ptx), "8 bytes at a time"
    says = [at.start() for at in re.finditer(r"red\.global\.gpu\.release", made.ptx)]
    assert len(says) == 2, "of each matrix"
    for at in says:
        assert made.ptx.rfind("bar.sync", 0, at) > made.ptx.rfind("st.global", 0, at), "it may count before it is there"
    assert len(re.findall(r"ld\.volatile", made.ptx)) >= 4


@pytest.mark.parametrize("name", [None, "int4", "nvfp4", "fp8 by block"])
@pytest.mark.parametrize("capability", [80, 89, 120])
def test_a_gemm_that_looks_for_what_was_read_early_spills_nothing(capability, name):
    """But 8 bytes, of NVFP4 on sm_80. It takes no more room, and reads weights behind a fence, wherever they are."""
    kind = None if name is None else QUANTISED[name]
    for rows in (1, 16):
        calls = record(lambda rows=rows: experts(rows, 2048, 768, 8, 128, kind=kind, early=True))
        plain = record(lambda rows=rows: experts(rows, 2048, 768, 8, 128, kind=kind))
        for kernel in ("gate_up", "down"):
            made, without = compile_for(capability, calls[kernel]), compile_for(capability, plain[kernel])
            say(f"{kernel} {name} M={rows}", capability, made)
            most = 8 if (capability, name, kernel) == (80, "nvfp4", "down") else 0  # before its loop
            assert made.stack <= without.stack + most and made.shared == without.shared
            reads = [at.start() for at in re.finditer(r"cp\.async\.c[ag]\.shared\.global", made.ptx)]
            assert made.ptx.index("fence.acq_rel.sys") < min(reads)


@pytest.mark.parametrize("name", [None, "int4", "nvfp4"])
@pytest.mark.parametrize("capability", [80, 120])
def test_what_a_program_copies_it_reads_behind_a_barrier(capability, name):
    """16 bytes at a time, and no read of weights is moved before. Loops have as many products as without the copy."""
    kind = None if name is None else QUANTISED[name]
    calls = record(lambda: experts(16, 2048, 768, 8, 128, kind=kind))
    plain = record(lambda: experts(16, 2048, 768, 8, 128, kind=kind, fills=False))
    for kernel in ("gate_up", "down"):
        made, without = compile_for(capability, calls[kernel]), compile_for(capability, plain[kernel])
        assert (made.stack, made.shared) == (without.stack, without.shared), "the copy takes room of the product"
        stores = [at.start() for at in re.finditer(r"st\.global\.v2\.b64", made.ptx)]
        barriers = [at.start() for at in re.finditer(r"\bbar\.sync", made.ptx)]
        reads = [at.start() for at in re.finditer(r"cp\.async\.c[ag]\.shared\.global", made.ptx)]
        assert stores and not re.search(r"st\.global\.v2\.b64", without.ptx)
        assert any(max(stores) < barrier < min(reads) for barrier in barriers), "it may read what is not there yet"
        products = [len(re.findall(r"\bmma\.sync|tcgen05\.mma", each.ptx)) for each in (made, without)]
        assert products[0] == products[1]


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("capability", SHARED)
def test_small_kernels(capability, rows):
    """Of few pairs ``admit`` is one warp."""
    calls = record(lambda: small(rows))
    assert set(calls) == set(KERNELS) - {"gate_up", "down", "read_early"}
    assert calls["admit"].named["num_warps"] == (1 if rows == 16 else 4)
    for name, call in calls.items():
        check(f"{name} M={rows}", capability, compile_for(capability, call))


@pytest.mark.parametrize(("rows", "experts"), [(16, 128), (64, 128), (8, 1024)])
@pytest.mark.parametrize("capability", SHARED)
def test_an_admission_that_leaves_some_to_the_cpu(capability, rows, experts):
    """On sm_90 and sm_100 its one program keeps two of 56 registers in 8 bytes of stack."""
    call = record(lambda: admitting(*ids_of(rows), experts, divided=True))["admit"]
    spilled = 8 if rows == 16 and capability in (90, 100) else 0
    check(f"admit M={rows} N={experts}, divided", capability, compile_for(capability, call), spilled)


@pytest.mark.parametrize("capability", SHARED)
def test_an_admission_that_leaves_rows_of_host_memory_to_the_cpu(capability):
    """On sm_90 and sm_120 it keeps two registers in 8 bytes of stack."""
    call = record(lambda: admitting(*ids_of(16), 128, divided=True, on_disk=True))["admit"]
    spilled = 8 if capability in (90, 120) else 0
    check("admit M=16 N=128, divided, on a disk", capability, compile_for(capability, call), spilled)


def test_a_row_of_1024_experts_fits():
    """The most that is allowed."""
    ids, weights = ids_of(8)
    ops = route.align, admitting, mailing, ordering, budgeted
    more = (16,), (), (), (), (False,)
    calls = record(lambda: [op(ids, weights, 1024, *given) for op, given in zip(ops, more, strict=True)])
    for name in ("align", "admit", "await", "order", "shortlist", "cover", "tally"):
        check(f"{name} N=1024", 90, compile_for(90, calls[name]))


def ids_of(rows):
    return torch.zeros(rows, 8, dtype=torch.int32), torch.ones(rows, 8)
