"""The experts of one MoE layer, addressed one by one: a grouped GEMM over tables of pointers instead of weight tensors.

For row t with expert e = ids[t, j] and router weight g = weights[t, j], j = 0 ... k - 1::

    gate, up = W13_e x_t + b13_e               [2 ff] -> two of [ff]
    h        = act(gate) * up                  silu, gelu, gelu_tanh; some clamp both or add to up, see ``activate``
    y[t, j]  = g (W2_e h + b2_e)               [d]
    out[t]   = ((y[t, 0] + y[t, 1]) + ...)     in the order of top-k, so that the same input gives the same bits

``w13[e]`` and ``w2[e]`` are int64 addresses: of a slot in HBM, or of pinned host memory in the same address space.
One launch serves both, each at its own speed; moving an expert changes a number in the table and nothing else.
Rows of gate and up: two halves, but for ``swigluoai``, which interleaves them.

Quantised, an expert is codes and scales (``formats``). A tile of it becomes x's dtype right before it is multiplied
(``dequantise``), so that the result is that of dequantised weights, and no more than the codes crosses the bus. Rows
of x and h may be rounded to FP8, too, as vLLM's kernels for such experts do (``Format.activations``).

An expert that ``admit`` has just given a slot is not in it yet (``Fills``). The launch that multiplies a part of it
copies this part there: the program that has its first rows copies the rows of W that it is about to read, waits for its
own threads, and reads them from the slot as any other's. Nobody else reads the slot in this launch: programs that have
further rows of the expert read it in host memory. So hits are computed while misses arrive, and no launch copies only.
Parts of missed experts that were read ahead of need (``Early``) are taken from there, and not from host memory.

Sums are float32; gate, up, h, y and out are rounded to x's dtype exactly where stock vLLM's separate launches round
(its GEMM, its activation kernels, its GEMM with the router weight, its sum), act(gate) too, but for ``swigluoai``. With
``Format.fused`` h stays float32 until it is rounded to FP8, and nothing before it is rounded but gate and up.

Three launches where no more pairs than experts, and no more than ``FEW``, share blocks of 16 rows: each pair may then
begin a block, and a program finds out which pairs are in its own (``route.block_of``). Else four: ``route.align`` sorts
the pairs first. Both put the same rows into the same places of a block: the same bits.

Each launch reads an expert ceil(rows of the expert / block_m) times, and ``tile_for`` makes block_m >= M while
M <= 64: there every needed expert is read exactly once, also if all rows choose the same. Beyond, the blocks of an
expert run concurrently, and its second read hits the L2 cache. No atomics, no split of the K sum: deterministic.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from .combine import combine
from .dequantise import multiply, quantise, row_scale, scale_of_row, scaled
from .fetch import check_fills, early_at, early_or, expert_at, fill_rows
from .formats import ACTIVATIONS, Format
from .route import FEW, MAX_EXPERTS, align, block_of, chunk_for, count, counted_pairs
from .types import ADMITTED, HIT, Early, Fills, Pieces, Quantised, block_bound, lanes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16  # bytes; a hint to the compiler, which then loads 16 bytes at once
_ADMITTED, _HIT = tl.constexpr(ADMITTED), tl.constexpr(HIT)


@dataclass(frozen=True)
class Tile:
    """Block sizes of both GEMMs. Another tile may round differently: fix one where results of batches must agree.

    ``gate_up_n`` counts columns of h: gate and up make twice as many rows of W13. ``k_bytes`` is the depth of a tile
    in bytes, so that float32 gets half the columns. ``group_m`` row blocks share a strip of weights in L2.
    """

    block_m: int
    gate_up_n: int
    down_n: int
    k_bytes: int
    num_warps: int
    num_stages: int
    group_m: int = 1


# By rows M. Not tuned: reasoned, and to be measured by benchmarks/kernels on a GPU. Decode is bound by memory: narrow N
# for many programs (Qwen3-30B-A3B at M = 1: 192 and 256 of them), deep K and stages for 60 KB in flight in each.
# Prefill is bound by arithmetic: square tiles. All fit 99 KB of shared memory, the least of sm_80 ... sm_120.
_TILES = (
    (16, Tile(block_m=16, gate_up_n=32, down_n=64, k_bytes=256, num_warps=4, num_stages=4)),
    (32, Tile(block_m=32, gate_up_n=32, down_n=64, k_bytes=256, num_warps=4, num_stages=3)),
    (64, Tile(block_m=64, gate_up_n=32, down_n=64, k_bytes=128, num_warps=4, num_stages=4)),
    (256, Tile(block_m=64, gate_up_n=64, down_n=128, k_bytes=128, num_warps=4, num_stages=3, group_m=4)),
)
_PREFILL = Tile(block_m=128, gate_up_n=64, down_n=128, k_bytes=128, num_warps=8, num_stages=3, group_m=8)

# Of quantised weights. A tile is 128 columns deep: a word of four exponents, 64 or 128 bytes of codes. Dequantised
# weights take registers: wider tiles of 64 rows, or more stages of them, spill on sm_80 or sm_120.
_QUANTISED = (
    (16, Tile(block_m=16, gate_up_n=32, down_n=64, k_bytes=256, num_warps=4, num_stages=4)),
    (32, Tile(block_m=32, gate_up_n=32, down_n=64, k_bytes=256, num_warps=4, num_stages=3)),
    (64, Tile(block_m=64, gate_up_n=32, down_n=32, k_bytes=256, num_warps=4, num_stages=2)),
)
# Of 4 bits and few rows: 256 columns deep, so that a row of a tile is 128 bytes of codes. A GPU reads pinned memory in
# lines of as many: an H100 reached 87 to 91 % of a copy of INT4 by 128 columns, and 72 with rows of 64 bytes.
_LINES = Tile(block_m=16, gate_up_n=32, down_n=64, k_bytes=512, num_warps=4, num_stages=3)
_QUANTISED_PREFILL = Tile(block_m=64, gate_up_n=32, down_n=32, k_bytes=256, num_warps=4, num_stages=2, group_m=8)

# Bytes of shared memory that a block may have, at least, on sm_80, sm_90 and sm_100. With the 99 KB of sm_86, sm_89 and
# sm_120 one program of the first tile, or of 4 bits, fits a multiprocessor, and two with a stage less, with the same
# bits. A stage of 4 bits is 8 KB of codes: a multiprocessor has 16 KB in flight, where HBM needs 6 to 9 and the link 1.
# Of NVFP4, whose scales take more, three programs of half the columns fit. Reasoned and compiled, not measured.
_AMPLE = 160 << 10
_FEW_ROWS = 16
ACROSS = 64  # rows of weights that the instruction of sm_90 multiplies at once


def tile_for(rows: int, kind: Format | None = None, shared: int | None = None, across: bool = False) -> Tile:
    """Returns the tile for M rows: a fixed table, because nothing may be timed while a graph is captured.

    Args:
        rows: M.
        kind: how the weights are quantised; None: not at all.
        shared: bytes of shared memory that a block may have; None: ample.
        across: a tile of few rows is multiplied the other way round, 64 rows of weights at once.
    """
    small = rows <= _FEW_ROWS and shared is not None and shared < _AMPLE
    if kind is not None and rows <= _FEW_ROWS and kind.per_byte == 2:
        return replace(_LINES, num_stages=2, down_n=32 if kind.row_scales else 64) if small else _LINES
    tiles, prefill = (_TILES, _PREFILL) if kind is None else (_QUANTISED, _QUANTISED_PREFILL)
    tile = next((tile for most, tile in tiles if rows <= most), prefill)
    if across and tile.block_m < ACROSS:
        tile = replace(tile, gate_up_n=ACROSS, num_stages=3)
    return replace(tile, num_stages=3) if small else tile


def _unsorted(pairs: int, experts: int, tile: Tile) -> bool:
    """Returns whether programs find their blocks themselves, without ``route.align``."""
    return pairs <= min(experts, FEW) and tile.block_m <= 16


@functools.cache
def _shared_memory(device: torch.device) -> int | None:
    """Bytes of shared memory that a block may have; None where kernels are interpreted."""
    if device.type != "cuda":
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(number)["max_shared_mem"]


def rows_to_compile(most: int, top_k: int, experts: int, kind: Format | None = None) -> list[int]:
    """Returns the fewest rows of each kernel variant that forwards of 1 ... ``most`` rows need, ascending.

    The specialisation of each launch of this module, of ``route`` and of ``admit`` follows from these rows, or is the
    same for all rows of a model.
    """
    fewest: dict[tuple, int] = {}
    for rows in range(1, most + 1):
        pairs, tile = rows * top_k, tile_for(rows, kind)
        fewest.setdefault((tile, chunk_for(pairs), _unsorted(pairs, experts, tile)), rows)
    return list(fewest.values())


@triton.jit
def _round(value: tl.tensor, T: tl.constexpr):
    return value.to(T).to(tl.float32)


@triton.jit
def _activate(
    gate: tl.tensor, up: tl.tensor, ACT: tl.constexpr, T: tl.constexpr, FUSED: tl.constexpr, UPCAST: tl.constexpr
):
    """[M, N] float32 gate and up, already rounded to T -> h in float32."""
    LIMIT: tl.constexpr = 10.0 if ACT == "silu_clamped" else 7.0
    if ACT == "silu_clamped" or ACT == "swigluoai" or ACT == "swigluoai_uninterleave":
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if FUSED:  # the operations of vLLM's kernel that rounds h to FP8, one by one: less would change some codes
        tl.static_assert(ACT == "silu", "no other activation is fused")
        power = tl.exp(-gate) if UPCAST else libdevice.exp(-gate)
        result = gate * tl.math.div_rn(tl.full(gate.shape, 1.0, tl.float32), 1.0 + power) * up
    elif ACT == "swigluoai":
        result = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    elif ACT == "swigluoai_uninterleave":
        result = _round(gate / (1.0 + tl.exp(-gate * 1.702)), T) * (up + 1.0)
    elif ACT == "silu" or ACT == "silu_clamped":
        result = _round(gate / (1.0 + tl.exp(-gate)), T) * up
    elif ACT == "gelu":
        result = _round(0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)), T) * up
    else:  # gelu_tanh: 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (gate + 0.044715 gate^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = _round(gate / (1.0 + tl.exp(-inner)), T) * up
    return result


@triton.constexpr_function
def _type(plain: tl.dtype, codes: str, native: bool):
    """Returns the type by which weights are loaded."""
    return plain if codes == "" else tl.float8e4nv if native and codes == "e4m3" else tl.uint8


@triton.constexpr_function
def _scale_type(codes: str):
    return tl.uint32 if codes in ("e2m1", "int4") else tl.float32


@triton.jit
def _place(blocks: tl.tensor, columns: tl.tensor, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Program id -> (row block, column block); GROUP_M row blocks take turns on the same columns."""
    program, strips = tl.program_id(0), tl.cdiv(columns, BLOCK_N)
    group = program // (GROUP_M * strips)
    size = tl.minimum(blocks - group * GROUP_M, GROUP_M)
    inside = program % (GROUP_M * strips)
    return group * GROUP_M + inside % size, inside // size


@triton.jit
def _block(
    block: tl.tensor, ids: tl.tensor, router_weights: tl.tensor, live: tl.tensor, pairs: tl.tensor, experts: tl.tensor,
    n_pairs: tl.tensor, n_experts: tl.tensor, BLOCK_M: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Returns a block's expert, -1 for none, its pairs, and whether they are the first ones of the expert.

    From ``align``'s work list if given, else computed.
    """
    if pairs is None:
        n_live = counted_pairs(live, n_pairs)
        expert, pair, leads = block_of(block, ids, router_weights, n_live, n_pairs, n_experts, BLOCK_M, FEW)
    else:
        expert = tl.load(experts + block)
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        leads = tl.load(experts + block - 1, mask=block > 0, other=-1) != expert
    return expert, pair, leads


_VARYING = {  # arguments that vary between launches or layers
    "do_not_specialize": ["n_pairs", "blocks", "first"],
    "do_not_specialize_on_alignment": [
        *("ids", "router_weights", "counts", "w13", "b13", "s13", "w2", "b2", "s2"),
        *("sources", "from_w", "from_b", "from_s"),
        *("early_keys", "early_done", "early_w"),
    ],
}


@triton.jit(**_VARYING)
def _gate_up_kernel(
    x: tl.tensor, w13: tl.tensor, b13: tl.tensor, s13: tl.tensor, sources: tl.tensor, from_w: tl.tensor,
    from_b: tl.tensor, from_s: tl.tensor, early_keys: tl.tensor, early_done: tl.tensor, early_w: tl.tensor,
    early_parts: tl.tensor, first: tl.tensor, ids: tl.tensor, router_weights: tl.tensor, live: tl.tensor,
    pairs: tl.tensor, experts: tl.tensor, counts: tl.tensor, out: tl.tensor, n_pairs: tl.tensor, n_experts: tl.tensor,
    blocks: tl.tensor, d: tl.tensor, ff: tl.tensor,
    TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, WIDE: tl.constexpr,
    NATIVE: tl.constexpr, ACTS: tl.constexpr, FUSED: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, FEW: tl.constexpr, BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """x [M, d] -> out [M * k, ff], row = pair; see the module. UPCAST: the interpreter cannot multiply bfloat16.

    CODES: of quantised weights, else empty; NATIVE: this GPU has their type; ACTS: columns of a row that share a scale,
    0 for all, -1 if rows are not quantised; FUSED: h is float32; SWAP: as of ``multiply``.

    If ``counts`` is given, one more program after those of the blocks writes it. ``sources`` and ``from_*``: ``Fills``.
    """
    T: tl.constexpr = x.dtype.element_ty
    if counts is not None:  # noqa: SIM102 - known at compile time
        if tl.program_id(0) == tl.num_programs(0) - 1:
            bins = tl.arange(0, BINS)
            found = count(ids, router_weights, counted_pairs(live, n_pairs), n_experts, BINS, FEW)
            tl.store(counts + bins, found, mask=bins < n_experts)
            return
    block, strip = _place(blocks, ff, BLOCK_N, GROUP_M)
    if pairs is None:  # noqa: SIM102
        if block >= counted_pairs(live, n_pairs):
            return
    expert, pair, leads = _block(block, ids, router_weights, live, pairs, experts, n_pairs, n_experts, BLOCK_M, FEW)
    if expert < 0:
        return
    at_host, early = False, None
    if sources is not None:
        source = tl.load(sources + expert)
        fills, at_host = source == _ADMITTED, (source == _ADMITTED) & (leads == 0)
        if early_keys is not None:
            missed = first + tl.where(source == _HIT, -first - 2, expert)  # of a hit: no key
            early = early_at(missed, strip, early_keys, early_done, early_parts, ENTRIES, BLOCK_N, not UPCAST)
        if fills & leads:
            if ACT == "swigluoai":
                fill_rows(
                    expert, 2 * strip * BLOCK_N, tl.minimum(2 * (strip + 1) * BLOCK_N, 2 * ff), 2 * ff, d,
                    w13, b13, s13, from_w, from_b, from_s, early, early_w,
                    T, BIAS, CODES, GROUP, ROWS, ZEROS, WIDE, 2 * BLOCK_N,
                )  # fmt: skip
            else:
                for half in tl.static_range(2):
                    fill_rows(
                        expert, half * ff + strip * BLOCK_N, half * ff + tl.minimum((strip + 1) * BLOCK_N, ff), 2 * ff,
                        d, w13, b13, s13, from_w, from_b, from_s, early, early_w,
                        T, BIAS, CODES, GROUP, ROWS, ZEROS, WIDE, BLOCK_N,
                    )  # fmt: skip
            tl.debug_barrier()  # all threads see what each of them has copied
    live = pair < n_pairs
    n = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = n < ff
    gate_row = 2 * n if ACT == "swigluoai" else n
    up_row = 2 * n + 1 if ACT == "swigluoai" else n + ff
    k = tl.arange(0, BLOCK_K)
    weights = expert_at(w13, from_w, expert, at_host, _type(T, CODES, NATIVE))
    if early is not None:  # but for what was copied from there
        weights = early_or(weights, tl.where(fills & leads, -1, early), early_w)
    x_at = x + (pair // TOP_K).to(tl.int64)[:, None] * d + k[None, :]
    if CODES == "":
        gate_at = weights + gate_row[None, :] * d + k[:, None]
        up_at = weights + up_row[None, :] * d + k[:, None]
    else:
        scales = expert_at(s13, from_s, expert, at_host, _scale_type(CODES))
    scale_of_a = None
    if ACTS == 0:
        scale_of_a = row_scale(x_at, live, d, BLOCK_K, EVEN_K)
    SHAPE: tl.constexpr = (BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N)
    gate = tl.zeros(SHAPE, tl.float32)
    up = tl.zeros(SHAPE, tl.float32)
    for start in range(0, d, BLOCK_K):
        rows, columns = live[:, None], wanted[None, :]
        if not EVEN_K:
            inside = k < d - start
            rows, columns = rows & inside[None, :], columns & inside[:, None]
        a = tl.load(x_at + start, mask=rows, other=0.0)
        of_a = scale_of_a
        if ACTS > 0:
            of_a = scale_of_row(tl.max(tl.abs(a.to(tl.float32)), 1), False)
        if ACTS >= 0:
            a = quantise(a, of_a, ACTS > 0)
        if CODES == "":
            g = tl.load(gate_at + start, mask=columns, other=0.0)
            u = tl.load(up_at + start, mask=columns, other=0.0)
            if UPCAST:
                a, g, u = a.to(tl.float32), g.to(tl.float32), u.to(tl.float32)
            gate = tl.dot(a, g, gate, input_precision="ieee")
            up = tl.dot(a, u, up, input_precision="ieee")
        else:
            gate = multiply(
                a, gate, weights, scales, gate_row, wanted, start, 2 * ff, d, of_a,
                CODES, GROUP, ROWS, ZEROS, NATIVE, BLOCK_K, EVEN_K, WIDE, SWAP, UPCAST,
            )  # fmt: skip
            up = multiply(
                a, up, weights, scales, up_row, wanted, start, 2 * ff, d, of_a,
                CODES, GROUP, ROWS, ZEROS, NATIVE, BLOCK_K, EVEN_K, WIDE, SWAP, UPCAST,
            )  # fmt: skip
    if SWAP:
        gate, up = tl.trans(gate), tl.trans(up)
    if ACTS == 0:
        gate = scaled(gate, scale_of_a, scales, gate_row, wanted)
        up = scaled(up, scale_of_a, scales, up_row, wanted)
    if BIAS:
        bias = expert_at(b13, from_b, expert, at_host, T)
        gate += tl.load(bias + gate_row, mask=wanted, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + up_row, mask=wanted, other=0.0).to(tl.float32)[None, :]
    h = _activate(_round(gate, T), _round(up, T), ACT, T, FUSED, UPCAST).to(out.dtype.element_ty)
    tl.store(out + pair.to(tl.int64)[:, None] * ff + n[None, :], h, mask=live[:, None] & wanted[None, :])


@triton.jit(**_VARYING)
def _down_kernel(
    h: tl.tensor, w2: tl.tensor, b2: tl.tensor, s2: tl.tensor, sources: tl.tensor, from_w: tl.tensor,
    from_b: tl.tensor, from_s: tl.tensor, early_keys: tl.tensor, early_done: tl.tensor, early_w: tl.tensor,
    early_parts: tl.tensor, first: tl.tensor, ids: tl.tensor, router_weights: tl.tensor, live: tl.tensor,
    pairs: tl.tensor, experts: tl.tensor, out: tl.tensor, n_pairs: tl.tensor, n_experts: tl.tensor, blocks: tl.tensor,
    d: tl.tensor, ff: tl.tensor,
    BIAS: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, ZEROS: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr, ACTS: tl.constexpr,
    FUSED: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, FEW: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """h [M * k, ff] -> out [M * k, d], times the router weight; row = pair."""
    T: tl.constexpr = out.dtype.element_ty
    block, strip = _place(blocks, d, BLOCK_N, GROUP_M)
    if pairs is None:  # noqa: SIM102
        if block >= counted_pairs(live, n_pairs):
            return
    expert, pair, leads = _block(block, ids, router_weights, live, pairs, experts, n_pairs, n_experts, BLOCK_M, FEW)
    if expert < 0:
        return
    at_host, early = False, None
    if sources is not None:
        source = tl.load(sources + expert)
        fills, at_host = source == _ADMITTED, (source == _ADMITTED) & (leads == 0)
        if early_keys is not None:
            missed = first + tl.where(source == _HIT, -first - 2, expert)  # of a hit: no key
            early = early_at(missed, strip, early_keys, early_done, early_parts, ENTRIES, BLOCK_N, not UPCAST)
        if fills & leads:
            fill_rows(
                expert, strip * BLOCK_N, tl.minimum((strip + 1) * BLOCK_N, d), d, ff,
                w2, b2, s2, from_w, from_b, from_s, early, early_w, T, BIAS, CODES, GROUP, ROWS, ZEROS, WIDE, BLOCK_N,
            )  # fmt: skip
            tl.debug_barrier()
    live = pair < n_pairs
    n = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = n < d
    k = tl.arange(0, BLOCK_K)
    h_at = h + pair.to(tl.int64)[:, None] * ff + k[None, :]
    weights = expert_at(w2, from_w, expert, at_host, _type(T, CODES, NATIVE))
    if early is not None:  # but for what was copied from there
        weights = early_or(weights, tl.where(fills & leads, -1, early), early_w)
    if CODES == "":
        w_at = weights + n[None, :] * ff + k[:, None]
    else:
        scales = expert_at(s2, from_s, expert, at_host, _scale_type(CODES))
    scale_of_a = None
    if ACTS == 0:
        scale_of_a = row_scale(h_at, live, ff, BLOCK_K, EVEN_K)
    SHAPE: tl.constexpr = (BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N)
    y = tl.zeros(SHAPE, tl.float32)
    for start in range(0, ff, BLOCK_K):
        rows, columns = live[:, None], wanted[None, :]
        if not EVEN_K:
            inside = k < ff - start
            rows, columns = rows & inside[None, :], columns & inside[:, None]
        a = tl.load(h_at + start, mask=rows, other=0.0)
        of_a = scale_of_a
        if ACTS > 0:
            of_a = scale_of_row(tl.max(tl.abs(a.to(tl.float32)), 1), FUSED)
        if ACTS >= 0:
            a = quantise(a, of_a, ACTS > 0 and not FUSED).to(T)
        if CODES == "":
            w = tl.load(w_at + start, mask=columns, other=0.0)
            if UPCAST:
                a, w = a.to(tl.float32), w.to(tl.float32)
            y = tl.dot(a, w, y, input_precision="ieee")
        else:
            y = multiply(
                a, y, weights, scales, n, wanted, start, d, ff, of_a,
                CODES, GROUP, ROWS, ZEROS, NATIVE, BLOCK_K, EVEN_K, WIDE, SWAP, UPCAST,
            )  # fmt: skip
    if SWAP:
        y = tl.trans(y)
    if ACTS == 0:
        y = scaled(y, scale_of_a, scales, n, wanted)
    if BIAS:
        bias = expert_at(b2, from_b, expert, at_host, T)
        y += tl.load(bias + n, mask=wanted, other=0.0).to(tl.float32)[None, :]
    y *= tl.load(router_weights + pair, mask=live, other=0.0)[:, None]
    tl.store(out + pair.to(tl.int64)[:, None] * d + n[None, :], y.to(T), mask=live[:, None] & wanted[None, :])


_INTERPRETED = not isinstance(_down_kernel, triton.JITFunction)  # TRITON_INTERPRET=1, when this was imported


def grouped_gemm(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    intermediate: int,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
    out: Tensor | None = None,
    tile: Tile | None = None,
    counts: Tensor | None = None,
    live: Tensor | None = None,
    quantised: Quantised | None = None,
    pieces: Pieces | None = None,
    fills: Fills | None = None,
    early: tuple[int, Early] | None = None,
) -> Tensor:
    """Computes the routed experts of one layer. No host synchronisation: may be captured in a CUDA graph.

    Args:
        x: [M, d], bfloat16, float16 or float32, contiguous.
        w13: [experts] int64, each the address of a contiguous [2 * intermediate, d] of x's dtype.
        w2: [experts] int64, of [d, intermediate].
        topk_weights: [M, k] float32. A pair with weight 0 is left out: its expert is not read.
        topk_ids: [M, k] int32 or int64. An id outside 0 ... experts - 1 marks padding: left out.
        intermediate: ff.
        b13, b2: [experts] int64 of [2 * intermediate] and [d]; both or none.
        activation: one of ``ACTIVATIONS``.
        out: [M, d] like x, is overwritten; default: a new tensor.
        tile: default ``tile_for(M)``.
        counts: [experts] int32, is overwritten with the pairs of each expert.
        live: [1] int32, pairs from this one on are padding and left out; default: none.
        quantised: ``w13`` and ``w2`` are addresses of codes, these their scales; x is bfloat16, or float16 but for
            MXFP4. Biases are of x's dtype.
        pieces: this launch computes some of a layer's pairs; ``out`` is written by the last one. Default: all.
        fills: experts that are not yet where the tables say; each that a pair selects is copied there, all of it.
        early: key of the layer's expert 0, and what was read ahead of those that are no hits by ``fills.sources``.

    All addresses must be multiples of 16 and valid as long as the launches run; this is not checked. Only addresses of
    experts that a pair selects are dereferenced.

    Raises:
        AssertionError: a shape, dtype or layout is not as above.
    """
    _check(x, w13, w2, topk_weights, topk_ids, intermediate, b13, b2, activation, live)
    s13, s2 = _check_quantised(x, w13, intermediate, tile, quantised)
    (rows, d), top_k, experts, ff = x.shape, topk_ids.shape[1], len(w13), intermediate
    out = torch.empty_like(x) if out is None else out
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous(), "out must be like x"
    if rows == 0:
        if counts is not None:
            counts.zero_()
        return out
    constants = _constants(quantised, x, activation)
    if tile is None:
        tile = tile_for(rows, quantised and quantised.format, _shared_memory(x.device), constants["SWAP"])
    constants["SWAP"] &= tile.block_m < ACROSS <= min(tile.gate_up_n, tile.down_n)
    block_k, pairs = tile.k_bytes // x.element_size(), rows * top_k
    blocks = block_bound(pairs, experts, tile.block_m)
    work: tuple[Tensor | None, Tensor | None] = None, None
    counted = counts
    if not _unsorted(pairs, experts, tile):
        work, counted = align(topk_ids, topk_weights, experts, tile.block_m, counts, live)[:2], None
    routing = topk_ids, topk_weights, live, *work
    fill13, fill2 = check_fills(fills, w13, b13 is not None, quantised is not None, early)
    h = x.new_empty(pairs, ff, dtype=torch.float32 if constants["FUSED"] else x.dtype)
    y = x.new_empty(pairs, d) if pieces is None else pieces.y
    shared = {
        "BIAS": b13 is not None, "UPCAST": _INTERPRETED, "BLOCK_K": block_k, "BLOCK_M": tile.block_m,
        "GROUP_M": tile.group_m, "FEW": FEW, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
        "ENTRIES": 1 if early is None else len(early[1].keys), "enable_fp_fusion": False, **constants,
    }  # fmt: skip
    _gate_up_kernel[(blocks * triton.cdiv(ff, tile.gate_up_n) + (counted is not None),)](
        x, w13, b13, s13, *fill13, *routing, counted, h, pairs, experts, blocks, d, ff,
        TOP_K=top_k, ACT=activation, EVEN_K=d % block_k == 0, WIDE=_is_wide(quantised, x, d),
        BLOCK_N=tile.gate_up_n, BINS=lanes(experts), **shared,
    )  # fmt: skip
    _down_kernel[(blocks * triton.cdiv(d, tile.down_n),)](
        h, w2, b2, s2, *fill2, *routing, y, pairs, experts, blocks, d, ff,
        EVEN_K=ff % block_k == 0, WIDE=_is_wide(quantised, x, ff), BLOCK_N=tile.down_n, **shared,
    )  # fmt: skip
    if (summed := topk_ids if pieces is None else pieces.ids) is not None:
        combine(y.view(rows, top_k, d), topk_weights, summed, experts, out, live)
    return out


def _check(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    intermediate: int,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
    live: Tensor | None,
) -> None:
    assert activation in ACTIVATIONS, f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}"
    assert x.ndim == 2 and x.dtype in DTYPES and x.is_contiguous(), "x must be a contiguous [rows, d] of 16 or 32 bit"
    assert x.data_ptr() % ALIGNMENT == 0, f"x must be aligned to a multiple of {ALIGNMENT} bytes"
    assert (b13 is None) == (b2 is None), "give both biases or none"
    for table in (w13, w2, b13, b2):
        assert table is None or (table.dtype == torch.int64 and table.shape == w13.shape and table.is_contiguous())
    assert topk_ids.shape == topk_weights.shape and topk_ids.shape[0] == x.shape[0], "one row of top-k per row of x"
    assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous() and topk_ids.is_contiguous()
    assert len(w13) <= MAX_EXPERTS and topk_ids.numel() < 2**31 - 1024, "pairs are numbered in 32 bit"
    assert live is None or (live.shape == (1,) and live.dtype == torch.int32), "live must be one int32"
    assert 2 * intermediate * x.shape[1] < 2**31, "offsets inside an expert are 32 bit"


def _constants(quantised: Quantised | None, x: Tensor, activation: str) -> dict:
    """Returns what the kernels must know of the weights when they are compiled; SWAP as far as the GPU goes."""
    if quantised is None:
        plain = {"CODES": "", "GROUP": 0, "ROWS": 1, "ZEROS": False, "NATIVE": False, "ACTS": -1}
        return plain | {"FUSED": False, "SWAP": False}
    kind = quantised.format
    native = has_e4m3(x.device) if kind.codes == "e4m3" else kind.codes == "e2m1" and has_e2m1(x.device)
    acts = -1 if kind.activations is None else kind.activations
    stored = {"CODES": kind.codes, "GROUP": kind.group, "ROWS": kind.rows, "ZEROS": kind.zeros}
    swap = acts >= 0 and multiplies_across(x.device)
    return stored | {"NATIVE": native, "ACTS": acts, "FUSED": kind.fused and activation == "silu", "SWAP": swap}


def multiplies_across(device: torch.device) -> bool:
    """Returns whether vLLM's kernel for FP8 multiplies few rows the other way round on ``device``: on sm_90."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def has_e4m3(device: torch.device) -> bool:
    """Returns whether kernels on ``device`` can convert e4m3: from sm_89 on, and not in the interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def has_e2m1(device: torch.device) -> bool:
    """Returns whether kernels on ``device`` can convert e2m1: from sm_100 on, and not in the interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def _is_wide(quantised: Quantised | None, x: Tensor, columns: int) -> bool:
    """Returns whether a row of W is a multiple of 16 bytes, so that it is loaded or copied 16 bytes at once."""
    if quantised is None:
        return columns * x.element_size() % ALIGNMENT == 0
    return columns % (ALIGNMENT * quantised.format.per_byte) == 0


def _check_quantised(
    x: Tensor, w13: Tensor, intermediate: int, tile: Tile | None, quantised: Quantised | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the tables of scales."""
    if quantised is None:
        return None, None
    kind, *tables = quantised
    assert x.dtype in DTYPES[: 1 if kind.exponents else 2], f"no {x.dtype} with {kind.describe()}"
    assert x.shape[1] % kind.per_byte == intermediate % kind.per_byte == 0, "a byte has columns of two rows"
    for table in tables:
        assert table.dtype == torch.int64 and table.shape == w13.shape and table.is_contiguous()
    assert tile is None or not kind.exponents or tile.k_bytes % 256 == 0, "a tile has whole words of exponents"
    return quantised.s13, quantised.s2
