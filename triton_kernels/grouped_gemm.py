"""The experts of one MoE layer, addressed one by one: a grouped GEMM over tables of pointers instead of weight tensors.

For row t with expert e = ids[t, j] and router weight g = weights[t, j], j = 0 ... k - 1::

    gate, up = W13_e x_t + b13_e               [2 ff] -> two of [ff]
    h        = act(gate) * up                  silu, gelu, gelu_tanh; swigluoai has its own product, see ``activate``
    y[t, j]  = g (W2_e h + b2_e)               [d]
    out[t]   = ((y[t, 0] + y[t, 1]) + ...)     in the order of top-k, so that the same input gives the same bits

``w13[e]`` and ``w2[e]`` are int64 addresses: of a slot in HBM, or of pinned host memory in the same address space.
One launch serves both, each at its own speed; moving an expert changes a number in the table and nothing else.
Rows of gate and up: two halves, but for ``swigluoai``, which interleaves them.

Sums are float32; gate, up, h, y and out are rounded to x's dtype exactly where stock vLLM's separate launches round
(its GEMM, its activation kernels, its GEMM with the router weight, its sum), act(gate) too, but for ``swigluoai``.

Three launches where no more pairs than experts, and no more than ``FEW``, share blocks of 16 rows: each pair may then
begin a block, and a program finds out which pairs are in its own (``route.block_of``). Else four: ``route.align`` sorts
the pairs first. Both put the same rows into the same places of a block: the same bits.

Each launch reads an expert ceil(rows of the expert / block_m) times, and ``tile_for`` makes block_m >= M while
M <= 64: there every needed expert is read exactly once, also if all rows choose the same. Beyond, the blocks of an
expert run concurrently, and its second read hits the L2 cache. No atomics, no split of the K sum: deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .route import FEW, MAX_EXPERTS, align, block_of, chunk_for, count, counted_pairs, routed
from .types import block_bound, lanes

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16  # bytes; a hint to the compiler, which then loads 16 bytes at once


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


def tile_for(rows: int) -> Tile:
    """Returns the tile for M rows: a fixed table, because nothing may be timed while a graph is captured."""
    return next((tile for most, tile in _TILES if rows <= most), _PREFILL)


def _unsorted(pairs: int, experts: int, tile: Tile) -> bool:
    """Returns whether programs find their blocks themselves, without ``route.align``."""
    return pairs <= min(experts, FEW) and tile.block_m <= 16


def rows_to_compile(most: int, top_k: int, experts: int) -> list[int]:
    """Returns the fewest rows of each kernel variant that forwards of 1 ... ``most`` rows need, ascending.

    The specialisation of each launch of this module, of ``route`` and of ``admit`` follows from these rows, or is the
    same for all rows of a model.
    """
    fewest: dict[tuple, int] = {}
    for rows in range(1, most + 1):
        pairs, tile = rows * top_k, tile_for(rows)
        fewest.setdefault((tile, chunk_for(pairs), _unsorted(pairs, experts, tile)), rows)
    return list(fewest.values())


@triton.jit
def _round(value: tl.tensor, T: tl.constexpr):
    return value.to(T).to(tl.float32)


@triton.jit
def _activate(gate: tl.tensor, up: tl.tensor, ACT: tl.constexpr, T: tl.constexpr):
    """[M, N] float32 gate and up, already rounded to T -> h in float32."""
    if ACT == "swigluoai":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        result = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    elif ACT == "silu":
        result = _round(gate / (1.0 + tl.exp(-gate)), T) * up
    elif ACT == "gelu":
        result = _round(0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)), T) * up
    else:  # gelu_tanh: 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (gate + 0.044715 gate^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = _round(gate / (1.0 + tl.exp(-inner)), T) * up
    return result


@triton.jit
def _expert(table: tl.tensor, expert: tl.tensor, T: tl.constexpr):
    """Returns the pointer to an expert's tensor. Without the 16-byte hint the compiler would load single elements."""
    return tl.multiple_of(tl.load(table + expert).to(tl.pointer_type(T), bitcast=True), 16)


@triton.jit
def _place(blocks: tl.tensor, columns: tl.tensor, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Program id -> (row block, column block); GROUP_M row blocks take turns on the same columns."""
    program = tl.program_id(0)
    strips = tl.cdiv(columns, BLOCK_N)
    group = program // (GROUP_M * strips)
    size = tl.minimum(blocks - group * GROUP_M, GROUP_M)
    inside = program % (GROUP_M * strips)
    return group * GROUP_M + inside % size, inside // size


@triton.jit
def _block(
    block: tl.tensor,
    ids: tl.tensor,
    router_weights: tl.tensor,
    live: tl.tensor,
    pairs: tl.tensor,
    experts: tl.tensor,
    n_pairs: tl.tensor,
    n_experts: tl.tensor,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,
):
    """Returns a block's expert, -1 for none, and its pairs: from ``align``'s work list if given, else computed."""
    if pairs is None:
        n_live = counted_pairs(live, n_pairs)
        expert, pair = block_of(block, ids, router_weights, n_live, n_pairs, n_experts, BLOCK_M, FEW)
    else:
        expert = tl.load(experts + block)
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    return expert, pair


_VARYING = {  # arguments that vary between launches or layers
    "do_not_specialize": ["n_pairs", "blocks"],
    "do_not_specialize_on_alignment": ["ids", "router_weights", "counts", "w13", "b13", "w2", "b2"],
}


@triton.jit(**_VARYING)
def _gate_up_kernel(
    x: tl.tensor, w13: tl.tensor, b13: tl.tensor, ids: tl.tensor, router_weights: tl.tensor, live: tl.tensor,
    pairs: tl.tensor, experts: tl.tensor, counts: tl.tensor, out: tl.tensor, n_pairs: tl.tensor, n_experts: tl.tensor,
    blocks: tl.tensor, d: tl.tensor, ff: tl.tensor,
    TOP_K: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    FEW: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """x [M, d] -> out [M * k, ff], row = pair; see the module. UPCAST: the interpreter cannot multiply bfloat16.

    If ``counts`` is given, one more program after those of the blocks writes it.
    """
    T: tl.constexpr = x.dtype.element_ty
    if counts is not None:  # noqa: SIM102 - known at compile time
        if tl.program_id(0) == tl.num_programs(0) - 1:
            bins = tl.arange(0, BINS)
            found = count(ids, router_weights, counted_pairs(live, n_pairs), n_experts, BINS, FEW)
            tl.store(counts + bins, found, mask=bins < n_experts)
            return
    block, strip = _place(blocks, ff, BLOCK_N, GROUP_M)
    expert, pair = _block(block, ids, router_weights, live, pairs, experts, n_pairs, n_experts, BLOCK_M, FEW)
    if expert < 0:
        return
    live = pair < n_pairs
    n = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = n < ff
    gate_row = 2 * n if ACT == "swigluoai" else n
    up_row = 2 * n + 1 if ACT == "swigluoai" else n + ff
    k = tl.arange(0, BLOCK_K)
    weights = _expert(w13, expert, T)
    x_at = x + (pair // TOP_K).to(tl.int64)[:, None] * d + k[None, :]
    gate_at = weights + gate_row[None, :] * d + k[:, None]
    up_at = weights + up_row[None, :] * d + k[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, d, BLOCK_K):
        rows, columns = live[:, None], wanted[None, :]
        if not EVEN_K:
            inside = k < d - start
            rows, columns = rows & inside[None, :], columns & inside[:, None]
        a = tl.load(x_at + start, mask=rows, other=0.0)
        g = tl.load(gate_at + start, mask=columns, other=0.0)
        u = tl.load(up_at + start, mask=columns, other=0.0)
        if UPCAST:
            a, g, u = a.to(tl.float32), g.to(tl.float32), u.to(tl.float32)
        gate = tl.dot(a, g, gate, input_precision="ieee")
        up = tl.dot(a, u, up, input_precision="ieee")
    if BIAS:
        bias = _expert(b13, expert, T)
        gate += tl.load(bias + gate_row, mask=wanted, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + up_row, mask=wanted, other=0.0).to(tl.float32)[None, :]
    h = _activate(_round(gate, T), _round(up, T), ACT, T)
    tl.store(out + pair.to(tl.int64)[:, None] * ff + n[None, :], h.to(T), mask=live[:, None] & wanted[None, :])


@triton.jit(**_VARYING)
def _down_kernel(
    h: tl.tensor, w2: tl.tensor, b2: tl.tensor, ids: tl.tensor, router_weights: tl.tensor, live: tl.tensor,
    pairs: tl.tensor, experts: tl.tensor, out: tl.tensor, n_pairs: tl.tensor, n_experts: tl.tensor, blocks: tl.tensor,
    d: tl.tensor, ff: tl.tensor,
    BIAS: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """h [M * k, ff] -> out [M * k, d], times the router weight; row = pair."""
    T: tl.constexpr = h.dtype.element_ty
    block, strip = _place(blocks, d, BLOCK_N, GROUP_M)
    expert, pair = _block(block, ids, router_weights, live, pairs, experts, n_pairs, n_experts, BLOCK_M, FEW)
    if expert < 0:
        return
    live = pair < n_pairs
    n = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = n < d
    k = tl.arange(0, BLOCK_K)
    h_at = h + pair.to(tl.int64)[:, None] * ff + k[None, :]
    w_at = _expert(w2, expert, T) + n[None, :] * ff + k[:, None]
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, ff, BLOCK_K):
        rows, columns = live[:, None], wanted[None, :]
        if not EVEN_K:
            inside = k < ff - start
            rows, columns = rows & inside[None, :], columns & inside[:, None]
        a = tl.load(h_at + start, mask=rows, other=0.0)
        w = tl.load(w_at + start, mask=columns, other=0.0)
        if UPCAST:
            a, w = a.to(tl.float32), w.to(tl.float32)
        y = tl.dot(a, w, y, input_precision="ieee")
    if BIAS:
        y += tl.load(_expert(b2, expert, T) + n, mask=wanted, other=0.0).to(tl.float32)[None, :]
    y *= tl.load(router_weights + pair, mask=live, other=0.0)[:, None]
    tl.store(out + pair.to(tl.int64)[:, None] * d + n[None, :], y.to(T), mask=live[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["n_pairs"], do_not_specialize_on_alignment=["ids", "router_weights"])
def _combine_kernel(
    y: tl.tensor,
    ids: tl.tensor,
    router_weights: tl.tensor,
    live: tl.tensor,
    out: tl.tensor,
    n_pairs: tl.tensor,
    d: tl.tensor,
    n_experts: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [M, k, d] -> out [M, d], summed from slot 0 on. Pairs that are left out were never written and are not read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n_live = counted_pairs(live, n_pairs)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(TOP_K):
        pair = row * TOP_K + slot
        if routed(ids, router_weights, pair, n_live, n_experts) < n_experts:
            total += tl.load(y + pair * d + column, mask=column < d, other=0.0).to(tl.float32)
    tl.store(out + row * d + column, total.to(out.dtype.element_ty), mask=column < d)


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

    All addresses must be multiples of 16 and valid as long as the launches run; this is not checked. Only addresses of
    experts that a pair selects are dereferenced.

    Raises:
        AssertionError: a shape, dtype or layout is not as above.
    """
    _check(x, w13, w2, topk_weights, topk_ids, intermediate, b13, b2, activation, live)
    (rows, d), top_k, experts, ff = x.shape, topk_ids.shape[1], len(w13), intermediate
    out = torch.empty_like(x) if out is None else out
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous(), "out must be like x"
    if rows == 0:
        if counts is not None:
            counts.zero_()
        return out
    tile = tile_for(rows) if tile is None else tile
    block_k = tile.k_bytes // x.element_size()
    pairs = rows * top_k
    blocks = block_bound(pairs, experts, tile.block_m)
    work: tuple[Tensor | None, Tensor | None] = None, None
    counted = counts
    if not _unsorted(pairs, experts, tile):
        work, counted = align(topk_ids, topk_weights, experts, tile.block_m, counts, live)[:2], None
    routing = topk_ids, topk_weights, live, *work
    h, y = x.new_empty(pairs, ff), x.new_empty(pairs, d)
    shared = {
        "BIAS": b13 is not None, "UPCAST": _INTERPRETED, "BLOCK_K": block_k, "BLOCK_M": tile.block_m,
        "GROUP_M": tile.group_m, "FEW": FEW, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
        "enable_fp_fusion": False,
    }  # fmt: skip
    _gate_up_kernel[(blocks * triton.cdiv(ff, tile.gate_up_n) + (counted is not None),)](
        x, w13, b13, *routing, counted, h, pairs, experts, blocks, d, ff,
        TOP_K=top_k, ACT=activation, EVEN_K=d % block_k == 0, BLOCK_N=tile.gate_up_n, BINS=lanes(experts), **shared,
    )  # fmt: skip
    _down_kernel[(blocks * triton.cdiv(d, tile.down_n),)](
        h, w2, b2, *routing, y, pairs, experts, blocks, d, ff,
        EVEN_K=ff % block_k == 0, BLOCK_N=tile.down_n, **shared,
    )  # fmt: skip
    combine(y.view(rows, top_k, d), topk_weights, topk_ids, experts, out, live)
    return out


def combine(
    y: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: int, out: Tensor, live: Tensor | None = None
) -> None:
    """Sums y [M, k, d], already weighted, into out [M, d]; pairs that ``route.align`` leaves out count as zero."""
    rows, top_k, d = y.shape
    block = min(1024, triton.next_power_of_2(d))
    _combine_kernel[(rows, triton.cdiv(d, block))](
        y, topk_ids, topk_weights, live, out, rows * top_k, d, experts, TOP_K=top_k, BLOCK=block, enable_fp_fusion=False
    )


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
