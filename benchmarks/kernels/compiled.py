"""What the compiler says of every kernel on six kinds of GPUs, without one; and how far the bytes in flight reach.

The launchers run on CPU tensors with each kernel replaced by a recorder; what they passed is compiled by Triton and
assembled by its ``ptxas``. Registers, stack and shared memory are the assembler's. *Calculated* from them:

- programs that fit one multiprocessor, by registers, threads and shared memory, and those that a launch has;
- bytes in flight: of the grouped GEMM all stages of its pipeline but one;
- the bytes that must be in flight for a rate: rate times latency (Little's law);
- instructions in the loop of a GEMM, all and those that only integer units take, of each weight that it multiplies, and
  the bytes per second that a GPU has issued them for;
- the share of HBM and of the link that a layer's two GEMMs then reach, launches included.

Rates are the data sheets', the latencies assumptions, and what does not depend on bytes is taken from the H100 on which
``run.py`` has run: the line through its times at 1 and 2 rows. The result shows this model beside that GPU's times.
No loop issues an instruction in each cycle. What share INT4 reached is from the line through its times at 1 and 8 rows
on that H100, with the instructions of ``--before``, an earlier commit's result.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import triton
import typer
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_spac.kernels import admit, combine, cover, fetch, grouped_gemm, mailbox, route, shortlist, tally
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.types import (
    EARLY_ROWS,
    Division,
    Early,
    Experts,
    Fills,
    Kept,
    Mail,
    Offers,
    Orders,
    Quantised,
    Reach,
    Request,
)

from benchmarks.common import RESULTS, Script, progress, provenance, show, write_result

KERNELS = {
    "gate_up": (grouped_gemm, "_gate_up_kernel"),
    "down": (grouped_gemm, "_down_kernel"),
    "combine": (combine, "_combine_kernel"),
    "align": (route, "_align_kernel"),
    "admit": (admit, "_admit_kernel"),
    "read_early": (fetch, "_read_early_kernel"),
    "await": (mailbox, "_await_kernel"),
    "order": (mailbox, "_order_kernel"),
    "shortlist": (shortlist, "_shortlist_kernel"),
    "cover": (cover, "_cover_kernel"),
    "tally": (tally, "_tally_kernel"),
}
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.float64: "*fp64", torch.bool: "*i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
GEMMS = ("gate_up", "down")
SIZES = {"d": 2048, "ff": 768, "k": 8, "count": 128}  # Qwen3-30B-A3B's experts
ROWS = (1, 16)
REGISTERS = 65536  # of a multiprocessor
LANES, INTEGER_LANES = 128, 64  # of a multiprocessor, in a cycle: CUDA's programming guide; sm_120 may have more
INTEGER = ("F2FP", "IADD", "IMNMX", "ISETP", "LEA", "LOP3", "PRMT", "SEL", "SHF", "VIADD", "VIMNMX")
LATENCY = {"hbm": 0.8e-6, "link": 2e-6}  # seconds, loaded; assumed: published measurements of HBM are 0.5 to 0.9 us


@dataclass(frozen=True)
class Card:
    """A GPU: NVIDIA's data sheets, and the CUDA programming guide's technical specifications.

    Attributes:
        processors: multiprocessors. hbm, link: bytes per second, the link's as a pinned copy reaches it.
        clock: cycles per second, by the data sheet's rate of float32.
        shared: bytes of shared memory of a multiprocessor, 1 KB less for each program. block: most that one may have.
    """

    name: str
    processors: int
    hbm: float
    link: float
    shared: int
    block: int
    threads: int  # of a multiprocessor
    clock: float


CARDS = {
    80: Card("A100", 108, 2.04e12, 25e9, 164 << 10, 163 << 10, 2048, 1.41e9),
    86: Card("RTX 3090", 82, 0.936e12, 25e9, 100 << 10, 99 << 10, 1536, 1.7e9),
    89: Card("RTX 4090", 128, 1.008e12, 25e9, 100 << 10, 99 << 10, 1536, 2.52e9),
    90: Card("H100", 132, 3.35e12, 55e9, 228 << 10, 227 << 10, 2048, 1.98e9),
    100: Card("B200", 148, 8e12, 55e9, 228 << 10, 227 << 10, 2048, 1.98e9),
    120: Card("RTX 5090", 170, 1.792e12, 55e9, 100 << 10, 99 << 10, 1536, 2.41e9),
}

app = Script()


class Recorder:
    """Stands in for a kernel: reports what it is launched with, and runs nothing.

    Attributes:
        programs: of the last launch.
    """

    def __init__(self, kernel, report: Callable[[tuple, dict], object]) -> None:
        self.kernel, self._report = kernel, report
        self.programs = 0

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and 0 < size < 2**31 for size in grid)
        self.programs = math.prod(grid)
        return lambda *arguments, **named: self._report(arguments, named)


class Compiled(NamedTuple):
    """What the assembler says of one kernel; sizes in bytes. A spill takes stack."""

    registers: int
    stack: int
    shared: int
    ptx: str
    loop: tuple[int, int]  # instructions in the longest loop that multiplies, and those that only integer units take


class Launch(NamedTuple):
    """One launch of a kernel: what it was given, and the number of its programs."""

    kernel: Any
    arguments: tuple
    named: dict
    programs: int


def record(function: Callable[[], object]) -> dict[str, Launch]:
    """What the kernels were first launched with while ``function`` ran, by short name."""
    calls: dict[str, Launch] = {}
    recorders: dict[str, Recorder] = {}

    def keep(name: str, arguments: tuple, named: dict) -> None:
        recorder = recorders[name]
        calls.setdefault(name, Launch(recorder.kernel, arguments, named, recorder.programs))

    with contextlib.ExitStack() as patches:
        for name, (module, attribute) in KERNELS.items():
            recorders[name] = Recorder(getattr(module, attribute), partial(keep, name))
            patches.enter_context(patch.object(module, attribute, recorders[name]))
        function()
    return calls


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


def compile_for(capability: int, call: Launch) -> Compiled:
    """Compiles a launch; ``TRITON_CACHE_DIR`` is a folder that may be written."""
    code, options = source(call.kernel, call.arguments, dict(call.named))
    made = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    said = _ask("cuobjdump", "--dump-resource-usage", cubin)
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", said)}
    loop = loop_of(_ask("nvdisasm", "-c", cubin))
    return Compiled(used["REG"], used["STACK"], made.metadata.shared, made.asm["ptx"], loop)


def _ask(tool: str, *arguments: str | Path) -> str:
    """What a program that comes with Triton prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def loop_of(listing: str) -> tuple[int, int]:
    """``Compiled.loop`` of a disassembled kernel; zeros if no loop multiplies matrices."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    longest: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.+?)\s*;", line):
            lines.append(found[1])
            back = re.match(r"BRA\b.*?(\.L_\w+)", found[1])
            body = lines[labels[back[1]] :] if back and back[1] in labels else []
            if len(body) > len(longest) and any("MMA" in each.partition(" ")[0] for each in body):
                longest = body
    return len(longest), sum(each.startswith(INTEGER) for each in longest)


def experts(
    rows, d, ff, k, count, activation="silu", bias=False, dtype=torch.bfloat16, kind=None, fills=True, early=False
):
    """A layer's launches. The tensors are never touched: no memory is taken.

    ``fills``: they copy what the layer has admitted, as with ``plane=pointers`` and fewer slots than experts.
    ``early``: parts of what it misses may have been read ahead, and of the next layer's some are.
    """
    x = torch.empty(rows, d, dtype=dtype)
    table = torch.zeros(count, dtype=torch.int64)
    biases = (table, table) if bias else (None, None)
    weights, ids = torch.ones(rows, k), torch.zeros(rows, k, dtype=torch.int32)
    options = {"counts": torch.zeros(count, dtype=torch.int32), "live": torch.zeros(1, dtype=torch.int32)}
    if kind is not None:
        options["quantised"] = Quantised(kind, table, table)
    if fills:
        scales = (None, None) if kind is None else (table, table)
        options["fills"] = Fills(torch.zeros(count, dtype=torch.int32), table, table, *biases, *scales)
    if early:
        done = (torch.zeros(4, -(-size // EARLY_ROWS), dtype=torch.int32) for size in (ff, d))
        parts = Early(torch.zeros(4, dtype=torch.int32), *done, table[:4], table[:4])
        options["early"] = count, parts
        row13, row2 = (2 * width if kind is None else kind.code_shape(1, width)[1] for width in (d, ff))
        turn, hosts = torch.zeros(2, dtype=torch.int32), torch.zeros(3 * count, dtype=torch.int64)
        fetch.read_early(turn, 2, parts, hosts, hosts, (ff, d, row13, row2), after=True)
    grouped_gemm.grouped_gemm(x, table, table, weights, ids, ff, *biases, activation, **options)


def small(rows: int = 64) -> None:
    """One launch of every other op, with 128 experts."""
    count, k = 128, 8
    weights, ids = torch.ones(rows, k), torch.zeros(rows, k, dtype=torch.int32)
    route.align(ids, weights, count, 16)
    combine.combine(torch.empty(rows, k, 2048, dtype=torch.bfloat16), weights, ids, count, torch.empty(rows, 2048))
    admitting(ids, weights, count)
    mailing(ids[:32], weights[:32], count)
    ordering(ids, weights, count)
    budgeted(ids, weights, count, substitute=True)


def budgeted(ids, weights, count, substitute: bool) -> None:
    """What a layer launches for a budget, by a share of the mass."""
    probs, held, bias = torch.ones(len(ids), count), torch.ones(count).double(), torch.ones(count)
    votes, share = torch.ones(len(ids)).double(), torch.ones(()).double()
    members, best = shortlist.shortlist(torch.stack((held, held)), held != 0, None, held, share)
    chosen = cover.cover(probs, weights, ids, votes, members, best, substitute, True, bias, groups=8, top_groups=4)
    tally.tally(torch.zeros(5).double(), votes, (weights, ids), members, chosen)


def admitting(
    ids, weights, count, names: int = 4, *, divided: bool = False, on_disk: bool = False, d: int = 2048
) -> None:
    """What a layer launches before its experts, with an expert's weights and biases, and what copies guesses.

    ``divided``: the CPU computes some of the missed experts; ``on_disk``: of those that have rows of host memory.
    """
    keys, slots = 2 * count, 3
    integers, addresses = torch.zeros(keys, dtype=torch.int32), torch.zeros(names, keys, dtype=torch.int64)
    experts = Experts(integers, integers[:slots], addresses, addresses, addresses[:, :slots].contiguous())
    state, places, owners = (integers[:size] for size in (2, slots, slots))
    offers = Offers(state, places, owners, torch.zeros(slots), torch.zeros(keys))
    copies = torch.zeros(1 + 2 * count, dtype=torch.int32)
    live = torch.zeros(1, dtype=torch.int32)
    asked = None
    if divided:
        x, (division, mail) = torch.zeros(len(ids), d, dtype=torch.bfloat16), mailbox_of(ids, count, d)
        kept = Kept(integers, division.shares) if on_disk else None
        asked = Request(x, live, integers, division, mail, kept)
    admit.admit(ids, weights, count, experts, offers, integers, integers, copies, live, asked)


def mailing(ids, weights, count, d: int = 2048) -> None:
    """What a layer launches beside its experts where the CPU takes a share, after its admission."""
    (rows, k), (division, mail) = ids.shape, mailbox_of(ids, count, d)
    sources, live = torch.zeros(2 * count, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    mailbox.wait_for_answer(ids, 1, sources, division, mail, 1000)
    y, out = torch.empty(rows, k, d, dtype=torch.bfloat16), torch.empty(rows, d, dtype=torch.bfloat16)
    combine.combine(y, weights, ids, count, out, live, division, mail)


def ordering(ids, weights, count, names: int = 4) -> None:
    """What a layer launches after its admission, where the device cannot address all experts."""
    integers, addresses = torch.zeros(2 * count, dtype=torch.int32), torch.zeros(names, 2 * count, dtype=torch.int64)
    number, each = torch.zeros(1, dtype=torch.int64), torch.zeros(count, dtype=torch.int32)
    experts = Experts(integers, integers[:3], addresses, addresses, addresses[:, :3].contiguous())
    orders = Orders(number, number, each[:1], each[:1], each, each)
    reach = Reach(number, integers, torch.zeros(names, count, dtype=torch.int64))
    mailbox.wait_for_experts(ids, weights, count, experts, integers, orders, reach, torch.zeros(1, dtype=torch.int32))


def mailbox_of(ids, count: int, d: int) -> tuple[Division, Mail]:
    """The memory of a division and its mailbox, for as many rows as ``ids``."""
    rows, integers, number = len(ids), torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    pairs, shares = torch.zeros(ids.shape), torch.zeros(count + 1, dtype=torch.int32)
    division = Division(number, integers[:1], integers, shares, pairs, pairs, integers[:1])
    x, results = torch.zeros(rows, d, dtype=torch.bfloat16), torch.zeros(rows, d)
    return division, Mail(number, number, integers, torch.zeros_like(ids), pairs, x, results)


@contextlib.contextmanager
def on(capability: int) -> Iterator[None]:
    """Launchers choose as on a GPU of this capability."""
    with (
        patch.object(grouped_gemm, "_shared_memory", lambda device: CARDS[capability].block),
        patch.object(grouped_gemm, "has_e4m3", lambda device: capability >= 89),
        patch.object(grouped_gemm, "has_e2m1", lambda device: capability >= 100),
        patch.object(grouped_gemm, "multiplies_across", lambda device: capability == 90),
    ):
        yield


FORMATS = {
    "bf16": None,
    "fp8 by block": Format("e4m3", 128, 128),
    "fp8 by channel": Format("e4m3"),
    "int8": Format("int8"),
    "int4": Format("int4", 128),
    "int4 by 32": Format("int4", 32),
    "mxfp4": Format("e2m1", 32),
    "nvfp4": Format("e2m1", 16),
}
_LINE = 128  # bytes in which a GPU reads pinned memory


def _values(call: Launch) -> dict[str, Any]:
    return dict(zip(call.kernel.arg_names, call.arguments, strict=False)) | call.named


def _row_bytes(kind: str, call: Launch) -> int:
    """Bytes of a row of weights in a tile."""
    quantised = FORMATS[kind]
    return _values(call)["BLOCK_K"] * 2 if quantised is None else _values(call)["BLOCK_K"] // quantised.per_byte


def _in_flight(kind: str, name: str, call: Launch) -> int | None:
    """Bytes of weights that one program has in flight; None: it reads few."""
    if name not in GEMMS:
        return None
    columns = _values(call)["BLOCK_N"] * (2 if name == "gate_up" else 1)
    return columns * _row_bytes(kind, call) * (call.named["num_stages"] - 1)


def _expert_bytes(kind: str) -> int:
    d, ff, quantised = SIZES["d"], SIZES["ff"], FORMATS[kind]
    if quantised is None:
        return 3 * d * ff * 2
    return sum(
        math.prod(quantised.code_shape(*shape)) + 4 * math.prod(quantised.scale_shape(*shape))
        for shape in ((2 * ff, d), (d, ff))
    )


def _fitting(card: Card, made: Compiled, threads: int) -> int:
    """Programs that fit one multiprocessor at once."""
    registers = -(-made.registers // 8) * 8 * threads
    return min(card.shared // (made.shared + 1024), REGISTERS // registers, card.threads // threads)


def _row(kind: str, name: str, rows: int, capability: int, call: Launch) -> dict:
    card, made, threads = CARDS[capability], compile_for(capability, call), call.named.get("num_warps", 4) * 32
    assert made.shared <= card.block, f"{name} takes more shared memory than a block of an {card.name} may have"
    row = {
        "kernel": name, "format": kind, "rows": rows, "capability": capability,
        "registers": made.registers, "stack": made.stack, "shared": made.shared, "threads": threads,
        "programs": call.programs,
        "programs_at_once": min(call.programs, card.processors * _fitting(card, made, threads)),
    }  # fmt: skip
    if name in GEMMS:
        values = _values(call)
        weights = values["BLOCK_N"] * (2 if name == "gate_up" else 1) * values["BLOCK_K"]
        for what, count in zip(("instructions", "integer_instructions"), made.loop, strict=True):
            row[f"{what}_per_weight"] = round(count * threads / weights, 2)
    flying = _in_flight(kind, name, call)
    if flying is not None:
        row["row_bytes"] = _row_bytes(kind, call) if name in GEMMS else flying
        row["bytes_in_flight"] = flying * row["programs_at_once"]
        for path, rate in (("hbm", card.hbm), ("link", card.link)):
            row[f"{path}_bytes_in_flight_needed"] = round(rate * LATENCY[path])
    return row


def _measured_h100() -> dict[str, Any]:
    """What of a layer's time on an H100 does not depend on bytes, and its rate, from times at 1 and 2 rows."""
    whole = json.loads((RESULTS / "gpu_h100.json").read_text(encoding="utf-8"))
    found, tiles = whole["kernels"], whole["int4_tiles"]["rows"]
    short = re.search(r"([\d.]+) GB/s pinned", tiles["int4, M=1, 16x32x64x256x4x4, run 4"])
    assert short is not None, "INT4 in rows of 64 bytes"
    first, second = (next(row for row in found["rows"] if row["rows"] == rows) for rows in (1, 2))
    nbytes = second["bytes"]["needed"] - first["bytes"]["needed"]
    rate = nbytes / (second["seconds"]["hbm"]["median"] - first["seconds"]["hbm"]["median"])
    fixed = first["seconds"]["hbm"]["median"] - first["bytes"]["needed"] / rate
    return {
        "seconds_without_bytes": fixed,
        "hbm_share_of_data_sheet": rate / CARDS[90].hbm,
        "link_share_of_a_copy": first["pinned_bytes_per_second"] / found["copy_bytes_per_second"]["pinned"],
        "link_share_of_short_rows": 1e9 * float(short.group(1)) / found["copy_bytes_per_second"]["pinned"],
        "bytes": {row["rows"]: row["bytes"]["needed"] for row in found["rows"]},
        "seconds": {row["rows"]: row["seconds"]["hbm"]["median"] for row in found["rows"]},
    }


def _issued(layer_format: str, gemms: dict[str, dict], card: Card) -> float:
    """Bytes of experts per second for which a GPU can issue what the loops take; down is a third of the weights."""
    seconds = 0.0
    if any("instructions_per_weight" not in gemms[name] for name in GEMMS):
        return math.inf  # of an earlier commit's result
    for name, part in (("gate_up", 2 / 3), ("down", 1 / 3)):
        row = gemms[name]
        cycles = max(row["instructions_per_weight"] / LANES, row["integer_instructions_per_weight"] / INTEGER_LANES)
        seconds += part * 3 * SIZES["d"] * SIZES["ff"] * cycles / (card.processors * card.clock)
    return _expert_bytes(layer_format) / seconds


def _gemms_of(rows: list[dict]) -> dict[tuple, dict[str, dict]]:
    """The rows of a layer's two GEMMs, by capability, format and rows."""
    gemms: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["kernel"] in GEMMS:
            gemms.setdefault((row["capability"], row["format"], row["rows"]), {})[row["kernel"]] = row
    return gemms


def _issue_share(before: list[dict]) -> float:
    """The share of what an H100 can issue that INT4 reached there, by its times at 1 and 8 rows."""
    whole = json.loads((RESULTS / "gpu_h100.json").read_text(encoding="utf-8"))
    times = {row["rows"]: 1e-6 * row["hbm_us"] for row in whole["chosen_int4"] if row["format"] == "int4"}
    needed = {row["rows"]: row["bytes"]["needed"] for row in whole["kernels"]["packed"] if row["format"] == "int4"}
    rate = (needed[8] - needed[1]) / (times[8] - times[1])
    return rate / _issued("int4", _gemms_of(before)[90, "int4", 16], CARDS[90])


def _loops(kind: str, gemms: dict[str, dict], card: Card, known: dict[str, Any], issue_share: float) -> dict:
    """What the loops of a layer reach without its launches: of HBM, by issue alone, and by the least of all."""
    flying = min(row["bytes_in_flight"] for row in gemms.values())
    most = min(known["hbm_share_of_data_sheet"], flying / (card.hbm * LATENCY["hbm"]))
    issued = _issued(kind, gemms, card) / card.hbm
    return {
        "instructions_per_weight": [gemms[name]["instructions_per_weight"] for name in GEMMS],
        "hbm_share_issued": issued,
        "hbm_share": min(most, issued),
        "hbm_share_as_int4_issued": min(most, issue_share * issued),
    }


def _layers(rows: list[dict], known: dict[str, Any], before: list[dict]) -> list[dict]:
    """The share of HBM and of the link that a layer's two GEMMs reach, *calculated*; by bytes in flight and issue."""
    made = []
    gemms, earlier, issue_share = _gemms_of(rows), _gemms_of(before), _issue_share(before)
    for key, both in gemms.items():
        capability, kind, count = key
        if count not in known["bytes"]:
            continue
        layer: dict[str, Any] = {"capability": capability, "format": kind, "rows": count}
        card = CARDS[capability]
        nbytes = known["bytes"][count] * _expert_bytes(kind) / _expert_bytes("bf16")
        flying = min(row["bytes_in_flight"] for row in both.values())
        whole = min(row["row_bytes"] for row in both.values()) >= _LINE
        layer["card"] = card.name
        issued = _issued(kind, both, card)
        for path, rate, most in (
            ("hbm", card.hbm, known["hbm_share_of_data_sheet"]),
            ("link", card.link, known["link_share_of_a_copy" if whole else "link_share_of_short_rows"]),
        ):
            reached = rate * min(most, flying / (rate * LATENCY[path]), issued / rate)
            seconds = known["seconds_without_bytes"] + nbytes / reached
            layer[path] = {"seconds": seconds, "share": nbytes / seconds / rate}
        now = {"now": both} | ({"before": earlier[key]} if key in earlier else {})
        if key in earlier:
            layer["loops"] = {when: _loops(kind, each, card, known, issue_share) for when, each in now.items()}
        if key == (90, "bf16", count):
            layer["measured_seconds"] = known["seconds"][count]
        made.append(layer)
    return made


@app.main
def main(
    output: Annotated[Path, typer.Option(help="JSON to write.")] = RESULTS / "kernels_compiled.json",
    before: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A result of an earlier commit, beside which loops are shown; else OUTPUT's.",
        ),
    ] = None,
    formats: Annotated[
        str, typer.Option(help=f"Of {','.join(FORMATS)}; the rest is kept as OUTPUT has it. Empty: all kernels.")
    ] = "",
) -> None:
    """Compile every kernel for six GPUs and write what each takes. Ten minutes of one core."""
    known = provenance()
    chosen = formats.split(",") if formats else list(FORMATS)
    old = json.loads(output.read_text(encoding="utf-8")) if formats else {"rows": []}
    earlier = json.loads((before or output).read_text(encoding="utf-8"))
    earlier = earlier.get("before", earlier)
    work: list[tuple] = []
    for capability in CARDS:
        for kind, count in product(chosen, ROWS):
            if kind != "bf16" and count != max(ROWS):
                continue
            with on(capability):
                calls = record(partial(experts, count, **SIZES, kind=FORMATS[kind]))
            work += [(kind, name, count, capability, calls[name]) for name in GEMMS]
        if not formats:
            calls = record(partial(small, 16))
            calls["read_early"] = record(partial(experts, 1, **SIZES, early=True))["read_early"]
            work += [("any", name, 16, capability, call) for name, call in calls.items()]
    rows = [row for row in old["rows"] if row["format"] not in chosen]
    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        os.environ["TRITON_CACHE_DIR"] = folder
        for each in bar.track(work, description="compiling"):
            rows.append(_row(*each))
    found = _measured_h100()
    before_rows = [row for row in earlier["rows"] if row["kernel"] in GEMMS] or rows
    layers = _layers(rows, found, before_rows)
    payload = {
        "provenance": known,
        "model": "Qwen3-30B-A3B's experts",
        "latency_seconds": LATENCY,
        "launches_of_a_layer": {
            count: len(record(partial(experts, count, **SIZES))) + len(("admit",)) for count in (1, 16, 64)
        },
        "cards": {str(capability): card.__dict__ for capability, card in CARDS.items()},
        "h100": {
            name: found[name]
            for name in (
                "seconds_without_bytes",
                "hbm_share_of_data_sheet",
                "link_share_of_a_copy",
                "link_share_of_short_rows",
            )
        },
        "kept_from": old["provenance"]["git"]["commit"] if formats else None,
        "issue_share_of_int4": _issue_share(before_rows),
        "before": {"commit": earlier["commit"], "rows": before_rows},
        "rows": rows,
        "layers": layers,
    }
    write_result(output, payload)
    show("Kernels", rows, "kernel", "format", "rows", "capability", "registers", "stack", "shared", "programs_at_once")


if __name__ == "__main__":
    app()
