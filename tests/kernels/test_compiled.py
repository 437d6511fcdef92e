"""Every kernel, as its launcher launches it, compiled for five generations of GPUs without one.

The launchers run on CPU tensors with each kernel replaced by a recorder; what they passed is compiled. So a launcher
that passes an unknown name, or a shape that Triton refuses, fails here.
"""

import importlib.util
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (there are no wheels for this platform)", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)

import triton  # noqa: E402
from launches import KERNELS, Recorder  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from vllm_spac.kernels import (  # noqa: E402
    admit,
    combine,
    cover,
    fetch,
    grouped_gemm,
    mailbox,
    route,
    shortlist,
    tally,
)
from vllm_spac.kernels.formats import Format  # noqa: E402
from vllm_spac.kernels.types import Division, Experts, Mail, Offers, Quantised  # noqa: E402

# Shared memory of one block, in bytes: CUDA programming guide, "Technical Specifications per Compute Capability".
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.float64: "*fp64", torch.bool: "*i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Compiled(NamedTuple):
    """What the assembler says of one kernel; sizes in bytes. A spill takes stack."""

    registers: int
    stack: int
    shared: int
    ptx: str


def source(kernel, arguments, named) -> tuple[ASTSource, dict]:
    """What Triton's own launcher would compile: divisible sizes and pointers are marked, 1 and None are constants."""
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    assert list(values) and set(values) == set(kernel.arg_names)
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value, param = values[name], kernel.params[place]
        one = value == 1 and not param.do_not_specialize if isinstance(value, int) else False
        if param.is_constexpr or value is None or one:
            signature[name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], aligned = TYPES[value.dtype], not param.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        else:
            signature[name], aligned = "i32", value % 16 == 0
        if aligned and not param.do_not_specialize:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), options


def compile_for(capability: int, call) -> Compiled:
    kernel, arguments, named = call
    code, options = source(kernel, arguments, dict(named))
    made = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    said = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", said)}
    return Compiled(used["REG"], used["STACK"], made.metadata.shared, made.asm["ptx"])


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def record(function) -> dict:
    """What the kernels were first launched with while ``function`` ran, by short name."""
    calls: dict[str, tuple] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, (module, attribute) in KERNELS.items():
            kernel = getattr(module, attribute)
            keep = partial(lambda name, kernel, *given: calls.setdefault(name, (kernel, *given)), name, kernel)
            patch.setattr(module, attribute, Recorder(kernel, keep))
        function()
    return calls


def experts(rows, d, ff, k, count, activation="silu", bias=False, dtype=torch.bfloat16, tile=None, kind=None):
    """A layer's launches. The tensors are never touched: no memory is taken."""
    x = torch.empty(rows, d, dtype=dtype)
    table = torch.zeros(count, dtype=torch.int64)
    biases = (table, table) if bias else (None, None)
    weights, ids = torch.ones(rows, k), torch.zeros(rows, k, dtype=torch.int32)
    options = {"counts": torch.zeros(count, dtype=torch.int32), "live": torch.zeros(1, dtype=torch.int32)}
    if kind is not None:
        options["quantised"] = Quantised(kind, table, table)
    grouped_gemm.grouped_gemm(x, table, table, weights, ids, ff, *biases, activation, tile=tile, **options)


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


@pytest.mark.parametrize("capability", [89, 120])
@pytest.mark.parametrize("rows", [1, 16])
def test_two_programs_of_few_rows_fit_a_small_multiprocessor(capability, rows, monkeypatch):
    """Else half of the bytes in flight are missing. A multiprocessor has 100 KB, of which each block takes 1 more."""
    deep = record(lambda: experts(rows, 2048, 768, 8, 128))
    monkeypatch.setattr(grouped_gemm, "_shared_memory", lambda device: SHARED[capability])
    shallow = record(lambda: experts(rows, 2048, 768, 8, 128))
    for name in ("gate_up", "down"):
        made = compile_for(capability, shallow[name])
        check(f"{name} M={rows}, shallow", capability, made)
        assert 2 * (made.shared + 1024) <= 100 * 1024 < 2 * compile_for(capability, deep[name]).shared


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


def small(rows: int = 64) -> None:
    """One launch of every other op, with 128 experts."""
    count, k = 128, 8
    weights, ids = torch.ones(rows, k), torch.zeros(rows, k, dtype=torch.int32)
    route.align(ids, weights, count, 16)
    combine.combine(torch.empty(rows, k, 2048, dtype=torch.bfloat16), weights, ids, count, torch.empty(rows, 2048))
    admitting(ids, weights, count)
    mailing(ids[:32], weights[:32], count)
    budgeted(ids, weights, count, substitute=True)


def budgeted(ids, weights, count, substitute: bool) -> None:
    """What a layer launches for a budget, by a share of the mass."""
    probs, held, bias = torch.ones(len(ids), count), torch.ones(count).double(), torch.ones(count)
    votes, share = torch.ones(len(ids)).double(), torch.ones(()).double()
    members, best = shortlist.shortlist(torch.stack((held, held)), held != 0, None, held, share)
    options = {"groups": 8, "top_groups": 4, "rescue": not substitute}
    chosen = cover.cover(probs, weights, ids, votes, members, best, substitute, True, bias, **options)
    tally.tally(torch.zeros(5).double(), votes, (weights, ids), members, chosen)


def admitting(ids, weights, count, names: int = 4) -> None:
    """What a layer launches before its experts, with an expert's weights and biases."""
    keys, slots = 2 * count, 3
    integers, addresses = torch.zeros(keys, dtype=torch.int32), torch.zeros(names, keys, dtype=torch.int64)
    experts = Experts(integers, integers[:slots], addresses, addresses, addresses[:, :slots].contiguous())
    offers = Offers(*(integers[:size] for size in (2, slots, slots)), torch.zeros(slots), torch.zeros(keys))
    copies = torch.zeros(1 + 2 * count, dtype=torch.int32)
    live = torch.zeros(1, dtype=torch.int32)
    admit.admit(ids, weights, count, experts, offers, integers, integers, copies, live)
    fetch.fetch(copies, experts, integers[:names])


def mailing(ids, weights, count, d: int = 2048, dtype=torch.bfloat16) -> None:
    """What a layer launches beside its experts where the CPU takes a share."""
    (rows, k), keys = ids.shape, 2 * count
    integers, number = torch.zeros(keys + 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    x, results, pairs = torch.zeros(rows, d, dtype=dtype), torch.zeros(rows, d), torch.zeros(rows, k)
    division = Division(number, integers[:1], integers[:2], integers[: count + 1], pairs, pairs, pairs)
    mail = Mail(number, number, integers[:2], ids, pairs, x, results)
    sources, live = integers[:keys].contiguous(), torch.zeros(1, dtype=torch.int32)
    mailbox.post(ids, weights, 1, x, torch.zeros(keys), sources, sources, division, mail, live)
    mailbox.await_answer(ids, 1, sources, division, mail, 1000)
    mailbox.add(x, x, division, mail)


@pytest.mark.parametrize("capability", SHARED)
def test_a_request_is_whole_before_its_number_and_a_wait_looks_at_memory_and_clock(capability):
    """The number is stored last, behind a fence of every thread and a barrier; it is read again in each turn."""
    calls = record(lambda: mailing(*ids_of(8), 128))
    post, wait, add = (compile_for(capability, calls[name]).ptx for name in ("post", "await", "add"))
    fence, stores = post.index("fence.acq_rel.sys"), [at.start() for at in re.finditer(r"\bst\.global", post)]
    assert post.count("fence.acq_rel.sys") == 1 and sum(at > fence for at in stores) == 1
    assert fence < post.rindex("bar.sync") < max(stores)
    assert re.search(r"st\.global\.v4\.b32", post), "rows go out 16 bytes at a time"
    loop = wait[wait.index("globaltimer") :]
    assert "globaltimer" in loop[12:] and re.search(r"ld\.volatile\.global[.\w]*\.b64", loop)
    assert wait.index("fence.acq_rel.sys") > wait.rindex("globaltimer") and "ld.volatile" in add


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_experts_are_fetched_16_bytes_at_a_time(capability):
    """Though neither addresses nor sizes are known to the compiler: both were promised."""
    call = record(lambda: admitting(*ids_of(8), 128))["fetch"]
    ptx = compile_for(capability, call).ptx
    for wide in (r"ld\.global\.v2\.b64", r"st\.global\.v2\.b64"):
        assert re.search(wide, ptx), ptx
    assert not re.search(r"st\.global\.b64", ptx), "8 bytes at a time"


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("capability", SHARED)
def test_small_kernels(capability, rows):
    """Of few pairs ``admit`` is one warp."""
    calls = record(lambda: small(rows))
    assert set(calls) == set(KERNELS) - {"gate_up", "down"}
    assert calls["admit"][2]["num_warps"] == (1 if rows == 16 else 4)
    for name, call in calls.items():
        check(f"{name} M={rows}", capability, compile_for(capability, call))


def test_a_row_of_1024_experts_fits():
    """The most that is allowed."""
    ids, weights = ids_of(8)
    ops = route.align, admitting, mailing, budgeted
    more = (16,), (), (), (False,)
    calls = record(lambda: [op(ids, weights, 1024, *given) for op, given in zip(ops, more, strict=True)])
    for name in ("align", "admit", "post", "await", "shortlist", "cover", "tally"):
        check(f"{name} N=1024", 90, compile_for(90, calls[name]))


def ids_of(rows):
    return torch.zeros(rows, 8, dtype=torch.int32), torch.ones(rows, 8)
