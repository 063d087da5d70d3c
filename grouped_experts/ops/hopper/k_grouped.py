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
from grouped_experts.ops.hopper.announcements import announce, announcements, hear
from grouped_experts.ops.hopper.compat import async_add, async_load, async_store
from grouped_experts.ops.hopper.launch import descriptor, is_fast
from grouped_experts.ops.hopper.pipeline import advance, halves, ring, row_pieces
from grouped_experts.ops.hopper.plan import make_plan
from grouped_experts.ops.hopper.tiles import BLOCK_M, Tile, choose_tile
from grouped_experts.ops.portable.launch import Kernel, cdiv, kernel, num_processors, suits_tma
from grouped_experts.ops.portable.m_grouped import tile_position


@gluon.jit
def weight_tile(
    t, plan_ptr, num_experts, num_m, num_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """Expert (-1: there are no more tiles), first row and column of its weight, and its rows: first, how many."""
    place = t // (num_m * num_n)
    i_m, i_n = tile_position(t % (num_m * num_n), num_m, num_n, GROUP_M)
    expert = plan_ptr + 4 * (1 + gl.minimum(place, num_experts - 1))
    e = gl.where(place < num_experts, gl.load(expert), -1)
    return e, i_m * BLOCK_M, i_n * BLOCK_N, gl.load(expert + 1), gl.load(expert + 2)


@gluon.jit
def produce(
    a_desc, b_desc, a_smem, b_smem, full, empty, places, announced, heard, plan_ptr, num_experts, M, N,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Chooses tiles, and loads for them; the next one is looked up while the ring is full.

    Unlike m_grouped.py's producer it may carry what it loaded to the next turn, since its loop stores.
    """
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    claims = gl.load(plan_ptr + 1) > 0
    stage = 0
    phase = 1
    t = gl.program_id(0)
    e, m0, n0, start, rows = weight_tile(t, plan_ptr, num_experts, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M)
    turn = gl.to_tensor(0)
    announce(turn, e, m0, n0, rows, places, announced, heard)
    while e >= 0:
        turn += 1
        # Nobody waits until the number is asked for. It counts the tiles behind those that programs begin with.
        claimed = gl.atomic_add(plan_ptr + 0 * lane, gl.full_like(lane, 1), mask=(lane == 0) & claims, sem="relaxed")
        steps = gl.cdiv(rows, BLOCK_T)
        first = gl.minimum(steps, STAGES)
        for i in range(first):
            stage, phase = load_rows(
                i, steps, start, rows, m0, n0, stage, phase, a_desc, b_desc, a_smem, b_smem, full, empty, STAGES
            )
        t = gl.where(claims, gl.sum(gl.where(lane == 0, claimed, 0), 0), t) + gl.num_programs(0)
        e_next, m0_next, n0_next, start_next, rows_next = weight_tile(
            t, plan_ptr, num_experts, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M
        )
        for i in range(first, steps):
            stage, phase = load_rows(
                i, steps, start, rows, m0, n0, stage, phase, a_desc, b_desc, a_smem, b_smem, full, empty, STAGES
            )
        e, m0, n0, start, rows = e_next, m0_next, n0_next, start_next, rows_next
        announce(turn, e, m0, n0, rows, places, announced, heard)


@gluon.jit
def load_rows(
    i, steps, start, rows, m0, n0, stage, phase, a_desc, b_desc, a_smem, b_smem, full, empty, STAGES: gl.constexpr
):
    """Block i of a tile's rows; the last one, if it is not full, comes second."""
    HALF: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_T: gl.constexpr = a_desc.block_type.shape[0]
    later = gl.where(i == 1, steps - 1, i - 1)
    t0 = start + gl.where((rows % BLOCK_T > 0) & (i > 0), later, i) * BLOCK_T
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(bar, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    async_load(a_desc, [t0, m0], bar, a_smem.index(2 * stage))
    async_load(a_desc, [t0, m0 + HALF], bar, a_smem.index(2 * stage + 1))
    async_load(b_desc, [t0, n0], bar, b_smem.index(stage))
    return advance(stage, phase, STAGES)


@gluon.jit
def consume(
    half: gl.constexpr,
    c_desc, a_smem, b_smem, c_smem, full, empty, masked, places, announced, heard, ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """A fresh tile is stored at once. A sum leaves in parts while the next tile is contracted.

    All at once, by all processors, the additions would hold up what they load.
    """
    HALF: gl.constexpr = BLOCK_M // 2
    PARTS: gl.constexpr = c_smem.shape[0] // 2
    WIDTH: gl.constexpr = BLOCK_N // PARTS
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    stage = 0
    phase = 0
    tail_phase = 0
    turn = gl.to_tensor(0)
    e, m0, n0, rows = hear(turn, places, announced, heard)
    # Not to begin with e, m0, n0: what follows one turn behind another value, Triton 3.6 takes for that value, if both
    # begin as one.
    e_before, m0_before, n0_before, rows_before = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    while e >= 0:
        turn += 1
        steps = rows // BLOCK_T
        rest = rows - steps * BLOCK_T
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
            acc, done = contract_first(rest, half, stage, done, a_smem, b_smem, empty, acc)
            stage, phase = advance(stage, phase, STAGES)
        for i in gl.static_range(PARTS):
            if ACCUMULATE:
                add_part(
                    rows_before, c_desc, e_before, m0_before, n0_before + i * WIDTH, c_smem.index(half * PARTS + i)
                )
            for _i in range(first + (steps - first) * i // PARTS, first + (steps - first) * (i + 1) // PARTS):
                mbarrier.wait(full.index(stage), phase)
                acc, done = contract(half, stage, done, a_smem, b_smem, empty, acc)
                stage, phase = advance(stage, phase, STAGES)
        e_before, m0_before, n0_before, rows_before = e, m0 + half * HALF, n0, rows
        e, m0, n0, rows = hear(turn, places, announced, heard)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(gl.maximum(done, 0)), count=1, pred=done >= 0)
        tma.store_wait(0)
        if ACCUMULATE:
            left, right = halves(acc)
            parts = halves(left) + halves(right)
            for i in gl.static_range(PARTS):
                c_smem.index(half * PARTS + i).reshape([HALF, WIDTH]).store(parts[i])
            fence_async_shared()
        else:
            c_smem.index(half).reshape([HALF, BLOCK_N]).store(acc.to(c_desc.dtype))
            fence_async_shared()
            async_store(c_desc, [e_before, m0_before, n0_before], c_smem.index(half))
    if ACCUMULATE:
        for i in gl.static_range(PARTS):
            add_part(rows_before, c_desc, e_before, m0_before, n0_before + i * WIDTH, c_smem.index(half * PARTS + i))
    tma.store_wait(0)


@gluon.jit
def add_part(rows, c_desc, e, m0, n0, part):
    """c[e, m0.., n0..] += part, unless it is of no rows."""
    if rows > 0:
        async_add(c_desc, [e, m0, n0], part)


@gluon.jit
def contract(half: gl.constexpr, stage, done, a_smem, b_smem, empty, acc):
    """Add one block of rows, leave it in flight, and give back the stage before it."""
    acc = warpgroup_mma(a_smem.index(2 * stage + half).permute((1, 0)), b_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(empty.index(gl.maximum(done, 0)), count=1, pred=done >= 0)
    return acc, stage


@gluon.jit
def contract_first(rows, half: gl.constexpr, stage, done, a_smem, b_smem, empty, acc):
    """The same for the first rows of a block, sixteen by sixteen."""
    a = a_smem.index(2 * stage + half)
    b = b_smem.index(stage)
    for i in gl.static_range(a.shape[0] // 16):
        for _i in range(gl.where(rows > 16 * i, 1, 0)):
            acc = warpgroup_mma(a.slice(16 * i, 16, 0).permute((1, 0)), b.slice(16 * i, 16, 0), acc, is_async=True)
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
def k_grouped_kernel(
    a_desc,  # (T, M), block (BLOCK_T, BLOCK_M / 2)
    b_desc,  # (T, N), block (BLOCK_T, BLOCK_N)
    c_desc,  # (E, M, N), block (1, BLOCK_M / 2, BLOCK_N); with ACCUMULATE fp32, (1, BLOCK_M / 2, BLOCK_N / 4)
    plan_ptr,  # (1 + E, 4): see `plan_kernel`
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
    """Grid (programs,), persistent, four warps. c[e] = a[r].T @ b[r], or c[e] += with ACCUMULATE.

    Every element of a sum has one summand, so that no order of additions matters. On a GPU such additions take numbers
    below the normal ones of fp32 for zero.
    """
    PARTS: gl.constexpr = BLOCK_N // c_desc.block_type.shape[2]
    a_smem, b_smem, full, empty = ring(a_desc, b_desc, STAGES)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2 * PARTS] + c_desc.block_type.shape, c_desc.layout)
    masked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    places, announced, heard = announcements(2)
    mbarrier.init(masked, count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (0, c_desc, a_smem, b_smem, c_smem, full, empty, masked, places, announced, heard, ACCUMULATE,
                BLOCK_M, BLOCK_N, BLOCK_T, STAGES)),
            (consume, (1, c_desc, a_smem, b_smem, c_smem, full, empty, masked, places, announced, heard, ACCUMULATE,
                BLOCK_M, BLOCK_N, BLOCK_T, STAGES)),
            (produce, (a_desc, b_desc, a_smem, b_smem, full, empty, places, announced, heard, plan_ptr,
                num_experts, M, N, BLOCK_M, BLOCK_N, BLOCK_T, GROUP_M, STAGES)),
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
    elif c.dtype != torch.float32 or not suits_tma(c):
        but = f"TMA cannot add to {c.dtype} with strides {c.stride()}, or its first element is not aligned to 16 bytes"
    if not is_fast("k_grouped_gemm_accumulate", a.shape[0], c.shape[0], c.shape[2], a, b, but=but):
        return portable.k_grouped_gemm_accumulate(c, a, b, starts, ends)
    launch_k_grouped(c, a, b, starts, ends, accumulate=True)


def launch_k_grouped(c: Tensor, a: Tensor, b: Tensor, starts: Tensor, ends: Tensor, accumulate: bool) -> None:
    num_experts, rows, columns = c.shape
    tile = choose_tile("sum" if accumulate else "wgrad", columns)
    half = BLOCK_M // 2
    tiles = cdiv(rows, BLOCK_M) * cdiv(columns, tile.block_n)
    programs = min(num_processors(a.device), num_experts * tiles)
    k_grouped(tile, accumulate).launch(
        (programs,),
        a.device,
        descriptor(a, (a.shape[0], rows), (a.stride(0), 1), (tile.block_k, half)),
        descriptor(b, (b.shape[0], columns), (b.stride(0), 1), (tile.block_k, tile.block_n)),
        descriptor(c, c.shape, c.stride(), (1, half, tile.block_n // 4 if accumulate else tile.block_n)),
        make_plan(starts, ends, a.shape[0], tiles, programs),
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
