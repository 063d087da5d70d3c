"""m-grouped GEMM in Gluon for sm_90: a producer, and two consumer warpgroups that each have half a tile's rows.

See docs/hopper.md for the pipeline.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from grouped_experts.ops.hopper.m_producer import produce, row_tile
from grouped_experts.ops.hopper.pipeline import advance, ring


@gluon.jit
def multiply(
    half: gl.constexpr, steps, stage, phase, x_smem, w_smem, full, empty, GATHERED: gl.constexpr,
    TRANSPOSE_W: gl.constexpr, WIDTH: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The product of one consumer's rows with the block of weight, and where the ring stands behind the tile.

    A consumer without rows contracts zeros: processors that share what they load should stay in step.
    GATHERED: the rows were copied by threads, and wgmma sees what threads wrote behind a fence only.
    """
    HALF: gl.constexpr = x_smem.shape[3]
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    acc = gl.zeros((HALF, WIDTH), gl.float32, ACC)
    before = 0
    for i in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            fence_async_shared()
        if TRANSPOSE_W:
            w = w_smem.index(stage).reshape([WIDTH, BLOCK_K]).permute((1, 0))
        else:
            w = w_smem.index(stage).reshape([BLOCK_K, WIDTH])
        acc = warpgroup_mma(x_smem.index(2 * stage + half).reshape([HALF, BLOCK_K]), w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(before), count=1, pred=i > 0)
        before = stage
        stage, phase = advance(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(before), count=1, pred=steps > 0)
    return acc, stage, phase


@gluon.jit
def consume(
    half: gl.constexpr,
    y_desc, a_desc, h_desc, bias_ptr, probs_ptr, tiles_ptr,
    N, K, x_smem, w_smem, out_smem, full, empty,
    EPILOGUE: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, BUFFERS: gl.constexpr,
    GAPS: gl.constexpr, GATHERED: gl.constexpr, TRANSPOSE_W: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    HALF: gl.constexpr = x_smem.shape[3]
    WIDTH: gl.constexpr = w_smem.shape[2] * BLOCK_N  # gate and up side by side
    num_m = gl.load(tiles_ptr + GAPS)
    num_n = gl.cdiv(N, BLOCK_N)
    total = num_m * num_n
    programs = gl.num_programs(0)
    stage = 0
    phase = 0
    expert, m0, end, i_n, steps = row_tile(gl.program_id(0), total, tiles_ptr, num_m, num_n, K, GROUP_M, BLOCK_K)
    for t in range(gl.program_id(0), total, programs):
        expert_next, m0_next, end_next, i_n_next, steps_next = row_tile(
            t + programs, total, tiles_ptr, num_m, num_n, K, GROUP_M, BLOCK_K
        )
        m0 += half * HALF
        acc, stage, phase = multiply(
            half, steps, stage, phase, x_smem, w_smem, full, empty, GATHERED, TRANSPOSE_W, WIDTH, BLOCK_K, STAGES
        )
        EPILOGUE(
            half, acc, expert, m0, end, i_n * BLOCK_N, y_desc, a_desc, h_desc, bias_ptr, probs_ptr,
            N, out_smem, ACT, GATED, BUFFERS
        )  # fmt: skip
        expert, m0, end, i_n, steps = expert_next, m0_next, end_next, i_n_next, steps_next
    tma.store_wait(0)


@gluon.jit
def m_grouped_kernel(
    x_desc,  # ragged (T, K), block (HALF, BLOCK_K): the rows of one consumer
    w_desc,  # (E, P, N, K), block (1, P, BLOCK_N, BLOCK_K), P = 2 for the products with gate and up side by side;
    #          without TRANSPOSE_W (E, 1, K, N), block (1, 1, BLOCK_K, BLOCK_N)
    y_desc,  # the epilogue's, from here to probs_ptr: see there. Ragged, with blocks (HALF, 1, columns)
    a_desc,
    h_desc,
    bias_ptr,
    probs_ptr,
    tiles_ptr,  # (1 + tiles, 4), tiles of 2 HALF rows
    x_ptr,  # with an index; x_desc is not loaded from then
    index_ptr,  # (R,) int32: rows of x, or None
    num_source,  # rows of x
    eighths_of_stride,  # of x
    N,
    K,  # with an index in eighths, so that 8 elements are one access
    EPILOGUE: gl.constexpr,
    ACT: gl.constexpr,  # of the activation, what the epilogue wants
    GATED: gl.constexpr,
    BUFFERS: gl.constexpr,  # for stores, of each consumer: 1 or 2
    GAPS: gl.constexpr,  # 1: rows of no expert are tiles as well, with a product of zero
    TRANSPOSE_W: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (programs,), persistent, four warps."""
    GATHERED: gl.constexpr = index_ptr is not None
    x_smem, w_smem, full, empty = ring(x_desc, w_desc, STAGES, 128 if GATHERED else 0)
    fence_async_shared()
    if y_desc is not None:
        out_smem = gl.allocate_shared_memory(y_desc.dtype, [2 * BUFFERS] + y_desc.block_type.shape, y_desc.layout)
    else:
        out_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * BUFFERS] + a_desc.block_type.shape, a_desc.layout)
    depth = 8 * K if GATHERED else K
    gl.warp_specialize(
        [
            (consume, (0, y_desc, a_desc, h_desc, bias_ptr, probs_ptr, tiles_ptr,
                N, depth, x_smem, w_smem, out_smem, full, empty, EPILOGUE, ACT, GATED, BUFFERS, GAPS,
                GATHERED, TRANSPOSE_W, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            (consume, (1, y_desc, a_desc, h_desc, bias_ptr, probs_ptr, tiles_ptr,
                N, depth, x_smem, w_smem, out_smem, full, empty, EPILOGUE, ACT, GATED, BUFFERS, GAPS,
                GATHERED, TRANSPOSE_W, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            (produce, (x_desc, x_ptr, index_ptr, num_source, eighths_of_stride, w_desc, tiles_ptr, N, K,
                x_smem, w_smem, full, empty, GAPS, TRANSPOSE_W, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 4 if GATHERED else 1],
        [232, 40 if GATHERED else 24],
    )  # fmt: skip
