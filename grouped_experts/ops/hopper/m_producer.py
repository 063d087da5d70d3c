"""The producers of m-grouped products: the warps that fill the ring with rows and weight, tile after tile.

Rows that follow one another come by TMA, as the weight does. Rows of a row index are gathered by `cp.async`, 16 bytes a
thread, four warps of it: TMA on Hopper loads neighbouring rows only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from grouped_experts.ops.hopper.compat import async_load
from grouped_experts.ops.hopper.descriptors import rows_at
from grouped_experts.ops.hopper.gather import chunks_of_rows, copy_rows, rows_of
from grouped_experts.ops.hopper.pipeline import advance
from grouped_experts.ops.portable.m_grouped import tile_position


@gluon.jit
def row_tile(t, total, tiles_ptr, num_m, num_n, K, GROUP_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """Expert (-1: rows of no expert), first row, row behind the last, column tile, and steps along K; t is clamped."""
    i_m, i_n = tile_position(gl.maximum(gl.minimum(t, total - 1), 0), num_m, num_n, GROUP_M)
    tile = tiles_ptr + 4 * (1 + gl.maximum(gl.minimum(i_m, num_m - 1), 0))
    expert = gl.load(tile)
    return expert, gl.load(tile + 1), gl.load(tile + 2), i_n, gl.where(expert < 0, 0, gl.cdiv(K, BLOCK_K))


@gluon.jit
def produce(
    x_desc, x_ptr, index_ptr, num_source, eighths_of_stride, w_desc, tiles_ptr, N, K, x_smem, w_smem, full, empty,
    GAPS: gl.constexpr, TRANSPOSE_W: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """By an index or without one; with it, K is in eighths."""
    if index_ptr is None:
        produce_neighbours(
            x_desc, w_desc, tiles_ptr, N, K, x_smem, w_smem, full, empty, GAPS, TRANSPOSE_W, BLOCK_N, BLOCK_K,
            GROUP_M, STAGES
        )  # fmt: skip
    else:
        produce_gathered(
            x_ptr, index_ptr, num_source, eighths_of_stride, w_desc, tiles_ptr, N, K, x_smem, w_smem, full, empty,
            GAPS, TRANSPOSE_W, BLOCK_N, BLOCK_K, GROUP_M, STAGES
        )  # fmt: skip


@gluon.jit
def produce_neighbours(
    x_desc, w_desc, tiles_ptr, N, K, x_smem, w_smem, full, empty, GAPS: gl.constexpr, TRANSPOSE_W: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Every stage of the ring gets the rows of both consumers and the block of weight that they share."""
    HALF: gl.constexpr = x_desc.block_type.shape[2]
    num_m = gl.load(tiles_ptr + GAPS)
    num_n = gl.cdiv(N, BLOCK_N)
    total = num_m * num_n
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        # Not loaded ahead, as the consumers do: the ring gives time enough, and in a loop that stores nothing Triton
        # 3.6 takes what is loaded and carried along for its first value.
        expert, m0, end, i_n, steps = row_tile(t, total, tiles_ptr, num_m, num_n, K, GROUP_M, BLOCK_K)
        e = gl.maximum(expert, 0)
        for i in range(steps):
            k0 = i * BLOCK_K
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            for half in gl.static_range(2):
                wrap, until, row = rows_at(m0 + half * HALF, end)
                async_load(x_desc, [wrap, until, row, k0], bar, x_smem.index(2 * stage + half))
            if TRANSPOSE_W:
                async_load(w_desc, [e, 0, i_n * BLOCK_N, k0], bar, w_smem.index(stage))
            else:
                async_load(w_desc, [e, 0, k0, i_n * BLOCK_N], bar, w_smem.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def produce_gathered(
    x_ptr, index_ptr, num_source, eighths_of_stride, w_desc, tiles_ptr, N, eighths_of_K, x_smem, w_smem, full, empty,
    GAPS: gl.constexpr, TRANSPOSE_W: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Row r of a tile is row index[r] of x. Those behind the last are any row; nobody stores them.

    A stage is full when the copies of all threads have landed as well as the bytes of the weight.
    """
    HALF: gl.constexpr = x_smem.shape[3]
    LAYOUT: gl.constexpr = chunks_of_rows(BLOCK_K)
    K = 8 * eighths_of_K
    num_m = gl.load(tiles_ptr + GAPS)
    num_n = gl.cdiv(N, BLOCK_N)
    total = num_m * num_n
    row = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, m0, end, i_n, steps = row_tile(t, total, tiles_ptr, num_m, num_n, K, GROUP_M, BLOCK_K)
        e = gl.maximum(expert, 0)
        end = gl.where(expert < 0, m0, end)
        below = m0 + HALF + row
        upper_index = gl.load(index_ptr + m0 + row, mask=m0 + row < end, other=0)
        lower_index = gl.load(index_ptr + below, mask=below < end, other=0)
        upper = rows_of(x_ptr, upper_index, num_source, eighths_of_stride)
        lower = rows_of(x_ptr, lower_index, num_source, eighths_of_stride)
        for i in range(steps):
            k0 = i * BLOCK_K
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, w_desc.block_type.nbytes)
            if TRANSPOSE_W:
                async_load(w_desc, [e, 0, i_n * BLOCK_N, k0], bar, w_smem.index(stage))
            else:
                async_load(w_desc, [e, 0, k0, i_n * BLOCK_N], bar, w_smem.index(stage))
            k = k0 + column
            inside = (k < K)[None, :]  # behind is zero, as in the weight: 0 * NaN would be NaN
            copy_rows(upper, k, inside, x_smem.index(2 * stage))
            copy_rows(lower, k, inside, x_smem.index(2 * stage + 1))
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = advance(stage, phase, STAGES)
