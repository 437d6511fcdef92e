"""Block sizes of ``grouped_gemm``, by rows. No Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .formats import Format


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
# weights take registers: wider tiles of 64 rows, or more stages of them, spill on sm_80 or sm_120. INT4 by 32 with zero
# points still spills 8 bytes on sm_80 there, and INT4 by 32 without them 16 on sm_120 at M = 32; with 8 warps it is
# sm_100 that spills.
_QUANTISED = (
    (16, Tile(block_m=16, gate_up_n=32, down_n=64, k_bytes=256, num_warps=4, num_stages=4)),
    (32, Tile(block_m=32, gate_up_n=32, down_n=64, k_bytes=256, num_warps=4, num_stages=3)),
    (64, Tile(block_m=64, gate_up_n=32, down_n=32, k_bytes=256, num_warps=4, num_stages=2)),
)
# Of INT4 by 128 columns or more and few rows: 256 columns deep, so that a row of a tile is 128 bytes of codes. A GPU
# reads pinned memory in lines of as many: an H100 reached 87 to 91 % of a copy, and 72 with rows of 64 bytes. In HBM
# it takes 4 to 20 % longer. By 32 columns with zero points it spills on sm_89, and so do such tiles of more rows, which
# read as much faster there.
_INT4 = Tile(block_m=16, gate_up_n=32, down_n=64, k_bytes=512, num_warps=4, num_stages=3)
_QUANTISED_PREFILL = Tile(block_m=64, gate_up_n=32, down_n=32, k_bytes=256, num_warps=4, num_stages=2, group_m=8)


# Bytes of shared memory that a block may have, at least, on sm_80, sm_90 and sm_100. With the 99 KB of sm_86, sm_89 and
# sm_120 one program of the first tile fits a multiprocessor at its depth, and two at three stages, with the same bits.
# Reasoned and compiled, not measured.
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
    if kind is not None and kind.codes == "int4" and rows <= _FEW_ROWS and (kind.group == 0 or kind.group >= 128):
        return _INT4
    tiles, prefill = (_TILES, _PREFILL) if kind is None else (_QUANTISED, _QUANTISED_PREFILL)
    tile = next((tile for most, tile in tiles if rows <= most), prefill)
    if across and tile.block_m < ACROSS:
        tile = replace(tile, gate_up_n=ACROSS, num_stages=3)
    return replace(tile, num_stages=3) if rows <= _FEW_ROWS and shared is not None and shared < _AMPLE else tile
