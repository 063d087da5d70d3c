"""m-grouped GEMM in Gluon for sm_90: a producer warp, and two consumer warpgroups that each have half a tile's rows.

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

from grouped_experts.ops.hopper.compat import async_load
from grouped_experts.ops.hopper.descriptors import rows_at
from grouped_experts.ops.hopper.pipeline import advance, ring
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
def multiply(
    half: gl.constexpr, steps, stage, phase, x_smem, w_smem, full, empty,
    TRANSPOSE_W: gl.constexpr, WIDTH: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The product of one consumer's rows with the block of weight, and where the ring stands behind the tile.

    A consumer without rows contracts zeros: processors that share what they load should stay in step.
    """
    HALF: gl.constexpr = x_smem.shape[3]
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    acc = gl.zeros((HALF, WIDTH), gl.float32, ACC)
    before = 0
    for i in range(steps):
        mbarrier.wait(full.index(stage), phase)
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
    GAPS: gl.constexpr, TRANSPOSE_W: gl.constexpr,
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
            half, steps, stage, phase, x_smem, w_smem, full, empty, TRANSPOSE_W, WIDTH, BLOCK_K, STAGES
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
    N,
    K,
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
    x_smem, w_smem, full, empty = ring(x_desc, w_desc, STAGES)
    fence_async_shared()
    if y_desc is not None:
        out_smem = gl.allocate_shared_memory(y_desc.dtype, [2 * BUFFERS] + y_desc.block_type.shape, y_desc.layout)
    else:
        out_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * BUFFERS] + a_desc.block_type.shape, a_desc.layout)
    gl.warp_specialize(
        [
            (consume, (0, y_desc, a_desc, h_desc, bias_ptr, probs_ptr, tiles_ptr,
                N, K, x_smem, w_smem, out_smem, full, empty, EPILOGUE, ACT, GATED, BUFFERS, GAPS, TRANSPOSE_W,
                BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            (consume, (1, y_desc, a_desc, h_desc, bias_ptr, probs_ptr, tiles_ptr,
                N, K, x_smem, w_smem, out_smem, full, empty, EPILOGUE, ACT, GATED, BUFFERS, GAPS, TRANSPOSE_W,
                BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            (produce, (x_desc, w_desc, tiles_ptr, N, K, x_smem, w_smem, full, empty, GAPS, TRANSPOSE_W,
                BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
