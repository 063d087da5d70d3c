"""k-grouped GEMM in Gluon for sm_90: a producer warp and two consumer warpgroups, each with half the rows of a tile.

See docs/hopper.md for the pipeline.
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
from grouped_experts.ops.hopper.compat import async_load, async_store
from grouped_experts.ops.hopper.launch import descriptor, is_fast
from grouped_experts.ops.hopper.pipeline import advance, halves, row_pieces
from grouped_experts.ops.hopper.tiles import BLOCK_M, Tile, choose_tile
from grouped_experts.ops.portable.launch import Kernel, cdiv, kernel, num_processors
from grouped_experts.ops.portable.m_grouped import tile_position


@gluon.jit
def weight_tile(
    t, total, starts_ptr, ends_ptr, num_rows, num_m, num_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """Expert, first row and column of its weight, and its rows: start, end, clamped into the buffer. t is clamped."""
    t = gl.minimum(t, total - 1)
    e = t // (num_m * num_n)
    i_m, i_n = tile_position(t % (num_m * num_n), num_m, num_n, GROUP_M)
    start = gl.minimum(gl.maximum(gl.load(starts_ptr + e), 0), num_rows)
    end = gl.maximum(gl.minimum(gl.load(ends_ptr + e), num_rows), start)
    return e, i_m * BLOCK_M, i_n * BLOCK_N, start, end


@gluon.jit
def produce(
    a_desc, b_desc, c_desc, c_ptr, a_smem, b_smem, c_smem, full, empty, masked, starts_ptr, ends_ptr,
    num_rows, num_experts, M, N, ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    HALF: gl.constexpr = BLOCK_M // 2
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    stage = 0
    phase = 1
    total = num_experts * num_m * num_n
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        e, m0, n0, start, end = weight_tile(  # not loaded ahead, for the reasons in m_grouped.py
            t, total, starts_ptr, ends_ptr, num_rows, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M
        )
        steps = gl.cdiv(end - start, BLOCK_T)
        partial = (end - start) % BLOCK_T > 0
        for i in range(steps):
            # The last block, if it is not full, comes second.
            later = gl.where(i == 1, steps - 1, i - 1)
            t0 = start + gl.where(partial & (i > 0), later, i) * BLOCK_T
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            async_load(a_desc, [t0, m0], bar, a_smem.index(2 * stage))
            async_load(a_desc, [t0, m0 + HALF], bar, a_smem.index(2 * stage + 1))
            async_load(b_desc, [t0, n0], bar, b_smem.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def consume(
    half: gl.constexpr,
    a_desc, b_desc, c_desc, c_ptr, a_smem, b_smem, c_smem, full, empty, masked, starts_ptr, ends_ptr,
    num_rows, num_experts, M, N, ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    HALF: gl.constexpr = BLOCK_M // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    stage = 0
    phase = 0
    tail_phase = 0
    total = num_experts * num_m * num_n
    programs = gl.num_programs(0)
    e, m0, n0, start, end = weight_tile(
        gl.program_id(0), total, starts_ptr, ends_ptr, num_rows, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M
    )
    for t in range(gl.program_id(0), total, programs):
        e_next, m0_next, n0_next, start_next, end_next = weight_tile(
            t + programs, total, starts_ptr, ends_ptr, num_rows, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M
        )
        steps = (end - start) // BLOCK_T
        rest = end - start - steps * BLOCK_T
        first = gl.minimum(steps, 1)
        acc = gl.zeros((HALF, BLOCK_N), gl.float32, ACC)
        done = -1  # the stage that the next step is done with
        for _i in range(first):
            mbarrier.wait(full.index(stage), phase)
            acc, done = contract(half, stage, done, a_smem, b_smem, empty, acc)
            stage, phase = advance(stage, phase, STAGES)
        for _i in range(gl.minimum(rest, 1)):  # the rows that fill no block, masked while the first ones are contracted
            mbarrier.wait(full.index(stage), phase)
            keep_first(a_smem.index(2 * stage + half), rest)
            keep_first(b_smem.index(stage).slice(half * (BLOCK_N // 2), BLOCK_N // 2, 1), rest)
            fence_async_shared()
            mbarrier.arrive(masked, count=1)
            mbarrier.wait(masked, tail_phase)
            tail_phase ^= 1
            acc, done = contract(half, stage, done, a_smem, b_smem, empty, acc)
            stage, phase = advance(stage, phase, STAGES)
        for _i in range(first, steps):
            mbarrier.wait(full.index(stage), phase)
            acc, done = contract(half, stage, done, a_smem, b_smem, empty, acc)
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(gl.maximum(done, 0)), count=1, pred=done >= 0)
        row = m0 + half * HALF
        if ACCUMULATE:
            left, right = halves(acc)
            quarters = halves(left) + halves(right)
            parts = halves(quarters[0]) + halves(quarters[1]) + halves(quarters[2]) + halves(quarters[3])
            for i in gl.static_range(8):
                add_to(c_ptr, parts[i], e, gl.where(end > start, row, M), M, n0 + i * (BLOCK_N // 8), N)
        else:
            tma.store_wait(0)
            c_smem.index(half).reshape([HALF, BLOCK_N]).store(acc.to(c_desc.dtype))
            fence_async_shared()
            async_store(c_desc, [e, row, n0], c_smem.index(half))
        e, m0, n0, start, end = e_next, m0_next, n0_next, start_next, end_next
    if not ACCUMULATE:
        tma.store_wait(0)


@gluon.jit
def contract(half: gl.constexpr, stage, done, a_smem, b_smem, empty, acc):
    """Add one block of rows, leave it in flight, and give back the stage before it."""
    acc = warpgroup_mma(a_smem.index(2 * stage + half).permute((1, 0)), b_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(empty.index(gl.maximum(done, 0)), count=1, pred=done >= 0)
    return acc, stage


@gluon.jit
def keep_first(block, rows):
    """Zero what is behind the first `rows` rows of a block in shared memory: 0 * NaN would be NaN."""
    LAYOUT: gl.constexpr = row_pieces(block.shape[1])
    row = gl.arange(0, block.shape[0], gl.SliceLayout(1, LAYOUT))
    values = block.load(LAYOUT)
    block.store(gl.where((row < rows)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def add_to(c_ptr, acc, e, m0, M, n0, N):
    """c[e, m0.., n0..] += acc. Every element has one summand, so that the order of the atomic additions is no matter.

    They are not waited for, as loads would be. On a GPU they take numbers below the normal ones of fp32 for zero.
    """
    ACC: gl.constexpr = acc.type.layout
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, ACC))
    n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    inside = (m < M - m0)[:, None] & (n < N - n0)[None, :]
    tile = c_ptr + ((gl.to_tensor(e).to(gl.int64) * M + m0) * N + n0)
    gl.atomic_add(tile + (m[:, None] * N + n[None, :]), acc, mask=inside, sem="relaxed")


@gluon.jit
def k_grouped_kernel(
    a_desc,  # (T, M), block (BLOCK_T, BLOCK_M / 2)
    b_desc,  # (T, N), block (BLOCK_T, BLOCK_N)
    c_desc,  # (E, M, N), block (1, BLOCK_M / 2, BLOCK_N), or None with ACCUMULATE
    c_ptr,  # fp32, with ACCUMULATE
    starts_ptr,  # (E,)
    ends_ptr,
    num_rows,
    num_experts,
    M,
    N,
    ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (programs,), persistent, four warps. c[e] = a[r].T @ b[r], or c[e] += with ACCUMULATE."""
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    masked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(masked, count=2)
    fence_async_shared()
    c_smem = masked  # not used
    if not ACCUMULATE:
        c_smem = gl.allocate_shared_memory(c_desc.dtype, [2] + c_desc.block_type.shape, c_desc.layout)
    gl.warp_specialize(
        [
            (consume, (0, a_desc, b_desc, c_desc, c_ptr, a_smem, b_smem, c_smem, full, empty, masked, starts_ptr,
                ends_ptr, num_rows, num_experts, M, N, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_T, GROUP_M, STAGES)),
            (consume, (1, a_desc, b_desc, c_desc, c_ptr, a_smem, b_smem, c_smem, full, empty, masked, starts_ptr,
                ends_ptr, num_rows, num_experts, M, N, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_T, GROUP_M, STAGES)),
            (produce, (a_desc, b_desc, c_desc, c_ptr, a_smem, b_smem, c_smem, full, empty, masked, starts_ptr,
                ends_ptr, num_rows, num_experts, M, N, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_T, GROUP_M, STAGES)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


def k_grouped_gemm(a: Tensor, b: Tensor, starts: Tensor, ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    num_experts, rows, columns = starts.shape[0], a.shape[1], b.shape[1]
    but = None if out_dtype == a.dtype else f"the output is {out_dtype}"
    if not is_fast("k_grouped_gemm", a.shape[0], num_experts, columns, a, b, but=but):
        return portable.k_grouped_gemm(a, b, starts, ends, out_dtype)
    c = a.new_empty(num_experts, rows, columns)
    launch_k_grouped(c, a, b, starts, ends, accumulate=False)
    return c


def k_grouped_gemm_accumulate(c: Tensor, a: Tensor, b: Tensor, starts: Tensor, ends: Tensor) -> None:
    but = None
    if a.shape[0] < 768 * c.shape[0]:  # on an H200 Gluon is ahead at 1024 rows an expert, not at 512
        but = "additions outlast the products of so few rows"
    elif c.dtype != torch.float32 or not c.is_contiguous():
        but = f"the sum is {c.dtype} with strides {c.stride()}"
    if not is_fast("k_grouped_gemm_accumulate", a.shape[0], c.shape[0], c.shape[2], a, b, but=but):
        return portable.k_grouped_gemm_accumulate(c, a, b, starts, ends)
    launch_k_grouped(c, a, b, starts, ends, accumulate=True)


def launch_k_grouped(c: Tensor, a: Tensor, b: Tensor, starts: Tensor, ends: Tensor, accumulate: bool) -> None:
    num_experts, rows, columns = c.shape
    tile = choose_tile("wgrad", columns)
    half = BLOCK_M // 2
    c_block = (1, half, tile.block_n)
    k_grouped(tile, accumulate).launch(
        (min(num_processors(a.device), num_experts * cdiv(rows, BLOCK_M) * cdiv(columns, tile.block_n)),),
        a.device,
        descriptor(a, (a.shape[0], rows), (a.stride(0), 1), (tile.block_k, half)),
        descriptor(b, (b.shape[0], columns), (b.stride(0), 1), (tile.block_k, tile.block_n)),
        None if accumulate else descriptor(c, (num_experts, rows, columns), (rows * columns, columns, 1), c_block),
        c if accumulate else None,
        starts,
        ends,
        a.shape[0],
        num_experts,
        rows,
        columns,
    )


@functools.cache
def k_grouped(tile: Tile, accumulate: bool) -> Kernel:
    return kernel(
        k_grouped_kernel,
        ACCUMULATE=accumulate,
        BLOCK_M=BLOCK_M,
        BLOCK_N=tile.block_n,
        BLOCK_T=tile.block_k,
        GROUP_M=tile.group_m,
        STAGES=tile.stages,
        num_warps=4,
    )
