"""k-grouped GEMM of column-wise FP8 casts in Gluon for sm_90: a producer and two consumer warpgroups.

Operands are (M, P) and (N, P): what is contracted lies in one piece, and every expert's rows are filled up to whole
blocks of 128. Blocks are summed as in `m_grouped_fp8.py`, with a scale for each row and each column.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from grouped_experts.ops import portable
from grouped_experts.ops.hopper.announcements import announce, announcements, hear
from grouped_experts.ops.hopper.compat import async_add, async_load, async_store
from grouped_experts.ops.hopper.descriptors import descriptor
from grouped_experts.ops.hopper.dispatch import is_fast
from grouped_experts.ops.hopper.k_producer import weight_tile
from grouped_experts.ops.hopper.m_grouped_fp8 import settled
from grouped_experts.ops.hopper.pipeline import advance, before, halves, ring
from grouped_experts.ops.hopper.plan import make_plan
from grouped_experts.ops.hopper.tiles import BLOCK_M, Tile, choose_tile
from grouped_experts.ops.portable.launch import Kernel, cdiv, kernel, num_processors, suits_tma
from grouped_experts.ops.reference.quantize import empty_scales
from grouped_experts.rows import FP8_BLOCK


@gluon.jit
def produce(
    a_desc, a_scales_desc, b_desc, b_scales_desc, a_smem, a_scales_smem, b_smem, b_scales_smem, full, empty,
    places, announced, heard, plan_ptr, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr
):  # fmt: skip
    """Chooses tiles, and loads for them, by one warp; the next one is looked up while the ring is full."""
    BLOCK: gl.constexpr = a_desc.block_type.shape[1]
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    claims = gl.load(plan_ptr + 1) > 0
    stage = 0
    phase = 1
    t = gl.program_id(0)
    e, m0, n0, start, rows, _piece = weight_tile(t, plan_ptr, 0, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M)
    turn = gl.to_tensor(0)
    announce(turn, e, m0, n0, rows, 0, places, announced, heard)
    while e >= 0:
        turn += 1
        claimed = gl.atomic_add(plan_ptr + 0 * lane, gl.full_like(lane, 1), mask=(lane == 0) & claims, sem="relaxed")
        block, blocks = start // BLOCK, rows // BLOCK
        first = gl.minimum(blocks, STAGES)
        stage, phase = load_blocks(
            block, block + first, m0, n0, stage, phase, a_desc, a_scales_desc, b_desc, b_scales_desc,
            a_smem, a_scales_smem, b_smem, b_scales_smem, full, empty, STAGES
        )  # fmt: skip
        t = gl.where(claims, gl.sum(gl.where(lane == 0, claimed, 0), 0), t) + gl.num_programs(0)
        e_next, m0_next, n0_next, start_next, rows_next, _piece = weight_tile(
            t, plan_ptr, 0, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M
        )
        stage, phase = load_blocks(
            block + first, block + blocks, m0, n0, stage, phase, a_desc, a_scales_desc, b_desc, b_scales_desc,
            a_smem, a_scales_smem, b_smem, b_scales_smem, full, empty, STAGES
        )  # fmt: skip
        e, m0, n0, start, rows = e_next, m0_next, n0_next, start_next, rows_next
        announce(turn, e, m0, n0, rows, 0, places, announced, heard)


@gluon.jit
def load_blocks(
    first, last, m0, n0, stage, phase, a_desc, a_scales_desc, b_desc, b_scales_desc,
    a_smem, a_scales_smem, b_smem, b_scales_smem, full, empty, STAGES: gl.constexpr
):  # fmt: skip
    """Blocks first : last of the operands, for the tile m0, n0; and where the ring stands behind them."""
    HALF: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK: gl.constexpr = a_desc.block_type.shape[1]
    BYTES: gl.constexpr = 2 * (a_desc.block_type.nbytes + a_scales_desc.block_type.nbytes)
    SHARED_BYTES: gl.constexpr = b_desc.block_type.nbytes + b_scales_desc.block_type.nbytes
    for i in range(first, last):
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(bar, BYTES + SHARED_BYTES)
        for half in gl.static_range(2):
            m = m0 + half * HALF
            async_load(a_desc, [m, i * BLOCK], bar, a_smem.index(2 * stage + half))
            async_load(a_scales_desc, [i, m], bar, a_scales_smem.index(2 * stage + half))
        async_load(b_desc, [n0, i * BLOCK], bar, b_smem.index(stage))
        async_load(b_scales_desc, [i, n0], bar, b_scales_smem.index(stage))
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def multiply(
    half: gl.constexpr, steps, stage, phase, a_smem, a_scales_smem, b_smem, b_scales_smem, full, empty, never,
    STAGES: gl.constexpr
):  # fmt: skip
    """The two sums of one consumer, of the tile's first and last 64 rows, and where the ring stands behind the tile.

    As `m_grouped_fp8.multiply`, but for how the tile is shared: both products of a step have the same columns, so that
    their 32 scales are loaded once for both. A product is multiplied by its rows' scales in place, in the registers
    that the next one is told not to add to: with others for that, there would be too few.
    """
    HALF: gl.constexpr = a_smem.shape[1]
    BLOCK: gl.constexpr = a_smem.shape[2]
    SUM: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, SUM)
    upper = gl.zeros((HALF, BLOCK), gl.float32, SUM)
    lower = gl.zeros((HALF, BLOCK), gl.float32, SUM)
    product = gl.zeros((HALF, BLOCK), gl.float32, SUM)
    if steps > 0:
        mbarrier.wait(full.index(stage), phase)
    for i in range(steps):
        b = b_smem.index(stage).slice(half * BLOCK, BLOCK, 0).permute((1, 0))
        product = warpgroup_mma(a_smem.index(2 * stage), b, product, use_acc=never, is_async=True)
        b_scales = b_scales_smem.index(stage).reshape([2 * BLOCK]).slice(half * BLOCK, BLOCK, 0)
        b_scale = b_scales.load(gl.SliceLayout(0, SUM))
        a_scale = a_scales_smem.index(2 * stage).reshape([HALF]).load(ROWS)
        product = warpgroup_mma_wait(0, deps=[product])
        product = product * a_scale[:, None]
        upper = settled(upper + product * b_scale[None, :])
        product = warpgroup_mma(a_smem.index(2 * stage + 1), b, product, use_acc=never, is_async=True)
        a_scale = a_scales_smem.index(2 * stage + 1).reshape([HALF]).load(ROWS)
        stage, phase = advance(stage, phase, STAGES)
        if i + 1 < steps:  # while that is multiplied
            mbarrier.wait(full.index(stage), phase)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        product = product * a_scale[:, None]
        lower = settled(lower + product * b_scale[None, :])
    return upper, lower, stage, phase


@gluon.jit
def consume(
    half: gl.constexpr, c_desc, M, N, a_smem, a_scales_smem, b_smem, b_scales_smem, c_smem, full, empty,
    places, announced, heard, ACCUMULATE: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """All rows of a tile, and the left or the right half of its columns."""
    HALF: gl.constexpr = a_smem.shape[1]
    BLOCK: gl.constexpr = a_smem.shape[2]
    stage = 0
    phase = 0
    turn = gl.to_tensor(0)
    e, m0, n0, rows, _piece = hear(turn, places, announced, heard)
    while e >= 0:
        turn += 1
        upper, lower, stage, phase = multiply(
            half, rows // BLOCK, stage, phase, a_smem, a_scales_smem, b_smem, b_scales_smem, full, empty, N < 0, STAGES
        )
        n = n0 + half * BLOCK
        if ACCUMULATE:
            if rows > 0:
                for i in gl.static_range(2):
                    send(2 * half + i, halves(upper)[i], c_desc, e, m0, n + i * BLOCK // 2, c_smem, True)
                for i in gl.static_range(2):
                    send(2 * half + i, halves(lower)[i], c_desc, e, m0 + HALF, n + i * BLOCK // 2, c_smem, True)
        else:
            send(2 * half, upper, c_desc, e, m0, n, c_smem, False)
            send(2 * half + 1, lower, c_desc, e, m0 + HALF, n, c_smem, False)
        e, m0, n0, rows, _piece = hear(turn, places, announced, heard)
    tma.store_wait(0)


@gluon.jit
def send(buffer: gl.constexpr, part, c_desc, e, m, n, c_smem, ACCUMULATE: gl.constexpr):
    """c[e, m.., n..] = part, or += part, by way of a buffer, which the store before the last has left."""
    tma.store_wait(1)
    smem = c_smem.index(buffer)
    smem.reshape([part.shape[0], part.shape[1]]).store(part.to(c_desc.dtype))
    fence_async_shared()
    if ACCUMULATE:
        async_add(c_desc, [e, m, n], smem)
    else:
        async_store(c_desc, [e, m, n], smem)


@gluon.jit
def k_grouped_fp8_kernel(
    a_desc,  # (M, P), block (64, 128)
    a_scales_desc,  # (P / 128, M), block (1, 64)
    b_desc,  # (N, P), block (256, 128)
    b_scales_desc,  # (P / 128, N), block (1, 256)
    c_desc,  # (E, M, N), block (1, 64, 128), or with ACCUMULATE fp32 and 64 columns
    plan_ptr,  # see `plan_kernel`
    M,
    N,
    ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (programs,), persistent, four warps. c[e] = a of expert e @ (b of expert e).T; with ACCUMULATE c[e] +=.

    Of such additions see `k_grouped.k_grouped_kernel`.
    """
    a_smem, b_smem, full, empty = ring(a_desc, b_desc, STAGES)
    a_scales_smem = gl.allocate_shared_memory(
        gl.float32, [2 * STAGES] + a_scales_desc.block_type.shape, a_scales_desc.layout
    )
    b_scales_smem = gl.allocate_shared_memory(
        gl.float32, [STAGES] + b_scales_desc.block_type.shape, b_scales_desc.layout
    )
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [4] + c_desc.block_type.shape, c_desc.layout)
    places, announced, heard = announcements(2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (0, c_desc, M, N, a_smem, a_scales_smem, b_smem, b_scales_smem, c_smem, full, empty,
                places, announced, heard, ACCUMULATE, STAGES)),
            (consume, (1, c_desc, M, N, a_smem, a_scales_smem, b_smem, b_scales_smem, c_smem, full, empty,
                places, announced, heard, ACCUMULATE, STAGES)),
            (produce, (a_desc, a_scales_desc, b_desc, b_scales_desc, a_smem, a_scales_smem, b_smem, b_scales_smem,
                full, empty, places, announced, heard, plan_ptr, M, N, BLOCK_M, BLOCK_N, GROUP_M, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def k_grouped_gemm_fp8(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, starts: Tensor, ends: Tensor, out_dtype: torch.dtype
) -> Tensor:
    shape = starts.shape[0], a.shape[0], b.shape[0]
    if not is_fast("k_grouped_gemm_fp8", a.shape[1], starts.shape[0], b.shape[0], a, b):
        return portable.k_grouped_gemm_fp8(a, a_scales, b, b_scales, starts, ends, out_dtype)
    adds = out_dtype == torch.float32  # for stores of fp32 there is no room beside the ring
    c = a.new_zeros(shape, dtype=out_dtype) if adds else a.new_empty(shape, dtype=out_dtype)
    launch_k_grouped_fp8(c, a, a_scales, b, b_scales, starts, ends, accumulate=adds)
    return c


def k_grouped_gemm_fp8_accumulate(
    c: Tensor, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, starts: Tensor, ends: Tensor
) -> None:
    but = None
    if not suits_tma(c):
        but = f"TMA cannot add to strides {c.stride()}, or the first element is not aligned to 16 bytes"
    if not is_fast("k_grouped_gemm_fp8_accumulate", a.shape[1], starts.shape[0], c.shape[2], a, b, but=but):
        return portable.k_grouped_gemm_fp8_accumulate(c, a, a_scales, b, b_scales, starts, ends)
    launch_k_grouped_fp8(c, a, a_scales, b, b_scales, starts, ends, accumulate=True)


def launch_k_grouped_fp8(
    c: Tensor,
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    accumulate: bool,
) -> None:
    num_experts, rows, columns = c.shape
    tile = choose_tile("fp8 wgrad", columns)
    tiles = cdiv(rows, BLOCK_M) * cdiv(columns, tile.block_n)
    programs = min(num_processors(a.device), num_experts * tiles)
    half = BLOCK_M // 2
    k_grouped_fp8(tile, accumulate).launch(
        (programs,),
        a.device,
        descriptor(a, a.shape, a.stride(), (half, FP8_BLOCK)),
        scales_descriptor(a_scales, half),
        descriptor(b, b.shape, b.stride(), (tile.block_n, FP8_BLOCK)),
        scales_descriptor(b_scales, tile.block_n),
        descriptor(c, c.shape, c.stride(), (1, half, FP8_BLOCK // 2 if accumulate else FP8_BLOCK)),
        make_plan(starts, ends, a.shape[1], tiles, programs, filled=FP8_BLOCK),
        rows,
        columns,
    )


def scales_descriptor(scales: Tensor, rows: int) -> object:
    """Of scales (M, blocks), so many rows at a time, from a multiple of 4 on.

    TMA wants block columns in one piece each, as casts leave them.
    """
    across = scales.t()
    if not suits_tma(across):
        across = empty_scales(scales, *scales.shape).copy_(scales).t()
    return descriptor(across, across.shape, across.stride(), (1, rows))


@functools.cache
def k_grouped_fp8(tile: Tile, accumulate: bool) -> Kernel:
    return kernel(
        k_grouped_fp8_kernel,
        ACCUMULATE=accumulate,
        BLOCK_M=BLOCK_M,
        BLOCK_N=tile.block_n,
        GROUP_M=tile.group_m,
        STAGES=tile.stages,
        num_warps=4,
    )
