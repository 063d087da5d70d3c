"""m-grouped GEMM of FP8 operands with blockwise scales in Gluon for sm_90.

The pipeline is that of `m_grouped.py`: a producer, and two consumer warpgroups that each have half a tile's rows. What
differs is how scales of x come, by `cp.async` (TMA cannot begin at any row of a column), and the sum: every 128 of a
contraction are a product of their own in the tensor cores, which keep fewer bits than fp32 has; scaled, it is added in
registers. A consumer takes the left and the right 128 columns of its tile in turn, so that only one product is in
registers beside both sums, and one consumer adds while the other one multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from grouped_experts.ops.hopper.compat import async_load, async_load_by_pointer
from grouped_experts.ops.hopper.descriptors import rows_at
from grouped_experts.ops.hopper.m_producer import row_tile
from grouped_experts.ops.hopper.pipeline import advance, before, ring

LARGEST = gl.constexpr(3.4028234663852886e38)  # of fp32


@gluon.jit
def produce(
    x_desc, x_scales_ptr, stride_xm, stride_xk, w_desc, tiles_ptr, N, K, x_smem, x_scales_smem, w_smem, full, empty,
    GAPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """As `m_producer.produce_neighbours`, by one warp. A stage is full when the scales that each of its threads copies
    have landed as well. Behind `end` they are any number, which rows of zeros are multiplied with that nobody stores.
    """
    HALF: gl.constexpr = x_desc.block_type.shape[2]
    num_m = gl.load(tiles_ptr + GAPS)
    num_n = gl.cdiv(N, BLOCK_N)
    total = num_m * num_n
    row = gl.arange(0, HALF, gl.BlockedLayout([1], [32], [1], [0]))
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, m0, end, i_n, steps = row_tile(t, total, tiles_ptr, num_m, num_n, K, GROUP_M, BLOCK_K)
        e = gl.maximum(expert, 0)
        scales = x_scales_ptr + (m0 + row).to(gl.int64) * stride_xm
        for i in range(steps):
            k0 = i * BLOCK_K
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            for half in gl.static_range(2):
                wrap, until, first = rows_at(m0 + half * HALF, end)
                async_load(x_desc, [wrap, until, first, k0], bar, x_smem.index(2 * stage + half))
                at, inside = scales + half * HALF * stride_xm, m0 + half * HALF + row < end
                async_load_by_pointer(x_scales_smem.index(2 * stage + half), at, mask=inside)
            async_load(w_desc, [e, 0, i_n * BLOCK_N, k0], bar, w_smem.index(stage))
            async_copy.mbarrier_arrive(bar, increment_count=False)
            scales += stride_xk
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def multiply(
    half: gl.constexpr, steps, stage, phase, x_smem, x_scales_smem, w_smem, left_scales, right_scales, stride_k,
    full, empty, never, STAGES: gl.constexpr
):  # fmt: skip
    """The two sums of one consumer, 128 columns each, and where the ring stands behind the tile.

    left_scales, right_scales: of the two blocks of weight, the first of each; one every stride_k. never: false, which
    the compiler must not know, or it would keep a second product in registers.
    """
    HALF: gl.constexpr = x_smem.shape[3]
    BLOCK: gl.constexpr = x_smem.shape[4]  # of a scale
    SUM: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    left = gl.zeros((HALF, BLOCK), gl.float32, SUM)
    right = gl.zeros((HALF, BLOCK), gl.float32, SUM)
    product = gl.zeros((HALF, BLOCK), gl.float32, SUM)
    if steps > 0:
        mbarrier.wait(full.index(stage), phase)
    for i in range(steps):
        x = x_smem.index(2 * stage + half).reshape([HALF, BLOCK])
        w = w_smem.index(stage).reshape([2 * BLOCK, BLOCK])
        product = warpgroup_mma(x, w.slice(0, BLOCK, 0).permute((1, 0)), product, use_acc=never, is_async=True)
        if i > 0:
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        scale = x_scales_smem.index(2 * stage + half).load(gl.SliceLayout(1, SUM))
        left_scale = settled(bounded(scale * gl.load(left_scales)))
        right_scale = settled(bounded(scale * gl.load(right_scales)))
        product = warpgroup_mma_wait(0, deps=[product])
        left = settled(left + product * left_scale[:, None])
        product = warpgroup_mma(x, w.slice(BLOCK, BLOCK, 0).permute((1, 0)), product, use_acc=never, is_async=True)
        left_scales += stride_k
        right_scales += stride_k
        stage, phase = advance(stage, phase, STAGES)
        if i + 1 < steps:  # while that is multiplied
            mbarrier.wait(full.index(stage), phase)
        product = warpgroup_mma_wait(0, deps=[product])
        right = settled(right + product * right_scale[:, None])
    if steps > 0:
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
    return left, right, stage, phase


@gluon.jit
def settled(x):
    """x, computed ahead of what follows: LLVM would move the additions behind the next product, for which that one has
    to wait in registers of its own.
    """
    return gl.inline_asm_elementwise("", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def bounded(scale):
    """A product of scales that is beyond fp32 as its largest number: infinity times a sum of zero would be NaN.

    One that is infinite itself belongs to a block with NaN among its numbers. A product below fp32's normal numbers,
    2^-126, has fewer bits.
    """
    return gl.minimum(scale, LARGEST)


@gluon.jit
def consume(
    half: gl.constexpr,
    y_desc, a_desc, h_desc, a_scales_ptr, probs_ptr, tiles_ptr, w_scales_ptr, stride_we, stride_wn, stride_wk,
    stride_as, N, K, x_smem, x_scales_smem, w_smem, out_smem, a_smem, full, empty,
    EPILOGUE: gl.constexpr, ACT: gl.constexpr, POWER_OF_TWO: gl.constexpr, GAPS: gl.constexpr, PARTS: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    HALF: gl.constexpr = x_smem.shape[3]
    BLOCK: gl.constexpr = x_smem.shape[4]
    BLOCK_N: gl.constexpr = 2 * BLOCK // PARTS
    num_m = gl.load(tiles_ptr + GAPS)
    num_n = gl.cdiv(N, BLOCK_N)
    total = num_m * num_n
    programs = gl.num_programs(0)
    stage = 0
    phase = 0
    expert, m0, end, i_n, steps = row_tile(gl.program_id(0), total, tiles_ptr, num_m, num_n, K, GROUP_M, BLOCK)
    for t in range(gl.program_id(0), total, programs):
        expert_next, m0_next, end_next, i_n_next, steps_next = row_tile(
            t + programs, total, tiles_ptr, num_m, num_n, K, GROUP_M, BLOCK
        )
        m0 += half * HALF
        if PARTS == 2:  # N is a multiple of a block then
            left_block, right_block = i_n, i_n + N // BLOCK
        else:
            left_block, right_block = 2 * i_n, gl.minimum(2 * i_n + 1, gl.cdiv(N, BLOCK) - 1)
        scales = w_scales_ptr + gl.maximum(expert, 0).to(gl.int64) * stride_we
        left, right, stage, phase = multiply(
            half, steps, stage, phase, x_smem, x_scales_smem, w_smem, scales + left_block.to(gl.int64) * stride_wn,
            scales + right_block.to(gl.int64) * stride_wn, stride_wk, full, empty, N < 0, STAGES
        )  # fmt: skip
        EPILOGUE(
            half, left, right, m0, end, i_n, y_desc, a_desc, h_desc, a_scales_ptr, probs_ptr, stride_as,
            out_smem, a_smem, ACT, POWER_OF_TWO
        )  # fmt: skip
        expert, m0, end, i_n, steps = expert_next, m0_next, end_next, i_n_next, steps_next
    tma.store_wait(0)


@gluon.jit
def m_grouped_fp8_kernel(
    x_desc,  # ragged (T, K), block (64, 128): the rows of one consumer
    x_scales_ptr,  # (T, K / 128)
    w_desc,  # (E, P, N, K), block (1, P, 256 / P, 128), P = 2 for the products with gate and up side by side
    w_scales_ptr,  # (E, P N / 128, K / 128)
    y_desc,  # the epilogue's, from here to probs_ptr: see there. Ragged, with blocks (64, 1, 128)
    a_desc,
    h_desc,
    a_scales_ptr,
    probs_ptr,
    tiles_ptr,  # (1 + tiles, 4), tiles of 128 rows
    stride_as,  # of block columns of a_scales
    N,
    K,
    stride_xm,  # of x_scales
    stride_xk,
    stride_we,  # of w_scales
    stride_wn,
    stride_wk,
    EPILOGUE: gl.constexpr,
    ACT: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
    BUFFERS: gl.constexpr,  # for stores, of each consumer: 1 or 2
    GAPS: gl.constexpr,  # 1: rows of no expert are tiles as well, with a product of zero
    BLOCK_N: gl.constexpr,  # of w_desc, as the next
    BLOCK_K: gl.constexpr,  # a scale's
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (programs,), persistent, four warps."""
    PARTS: gl.constexpr = w_desc.block_type.shape[1]
    gl.static_assert(PARTS * BLOCK_N == 2 * BLOCK_K)
    x_smem, w_smem, full, empty = ring(x_desc, w_desc, STAGES, COPIES=32)
    x_scales_smem = gl.allocate_shared_memory(
        gl.float32, [2 * STAGES, x_desc.block_type.shape[2]], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    if y_desc is not None:
        out_smem = gl.allocate_shared_memory(y_desc.dtype, [2 * BUFFERS] + y_desc.block_type.shape, y_desc.layout)
        a_smem = out_smem
    else:
        out_smem = gl.allocate_shared_memory(h_desc.dtype, [2 * BUFFERS] + h_desc.block_type.shape, h_desc.layout)
        a_smem = gl.allocate_shared_memory(a_desc.dtype, [2] + a_desc.block_type.shape, a_desc.layout)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (0, y_desc, a_desc, h_desc, a_scales_ptr, probs_ptr, tiles_ptr, w_scales_ptr, stride_we,
                stride_wn, stride_wk, stride_as, N, K, x_smem, x_scales_smem, w_smem, out_smem, a_smem, full, empty,
                EPILOGUE, ACT, POWER_OF_TWO, GAPS, PARTS, GROUP_M, STAGES)),
            (consume, (1, y_desc, a_desc, h_desc, a_scales_ptr, probs_ptr, tiles_ptr, w_scales_ptr, stride_we,
                stride_wn, stride_wk, stride_as, N, K, x_smem, x_scales_smem, w_smem, out_smem, a_smem, full, empty,
                EPILOGUE, ACT, POWER_OF_TWO, GAPS, PARTS, GROUP_M, STAGES)),
            (produce, (x_desc, x_scales_ptr, stride_xm, stride_xk, w_desc, tiles_ptr, N, K, x_smem, x_scales_smem,
                w_smem, full, empty, GAPS, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
