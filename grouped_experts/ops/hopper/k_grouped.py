"""k-grouped GEMM in Gluon for sm_90: a producer and two consumer warpgroups, each with half the rows of a tile.

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
    warpgroup_mma_wait,
)

from grouped_experts.ops import portable
from grouped_experts.ops.hopper.announcements import announcements, hear
from grouped_experts.ops.hopper.compat import async_add, async_store
from grouped_experts.ops.hopper.descriptors import descriptor, ragged_descriptor
from grouped_experts.ops.hopper.dispatch import is_fast
from grouped_experts.ops.hopper.k_producer import produce
from grouped_experts.ops.hopper.pieces import end_piece
from grouped_experts.ops.hopper.pipeline import halves, ring
from grouped_experts.ops.hopper.plan import entries_of_pieces, make_plan
from grouped_experts.ops.hopper.row_blocks import begin_tile, blocks_of, contract_blocks
from grouped_experts.ops.hopper.tiles import BLOCK_M, Tile, choose_tile
from grouped_experts.ops.portable.launch import Kernel, cdiv, kernel, num_processors, suits_tma
from grouped_experts.ops.portable.permute import gather_rows
from grouped_experts.rows import num_rows


@gluon.jit
def consume(
    half: gl.constexpr,
    c_desc, c_ptr, partials_ptr, plan_ptr, halves_of_tiles, M, eighths_of_N,
    a_smem, b_smem, c_smem, full, empty, places, announced, heard,
    GATHERED: gl.constexpr, ACCUMULATE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """A tile leaves in parts while the next one is contracted; a sum is kept in registers until that one is under way.

    All at once, by all processors, what leaves would hold up what they load.
    """
    BLOCK_T: gl.constexpr = a_smem.shape[3]
    HALF: gl.constexpr = a_smem.shape[4]
    PARTS: gl.constexpr = c_smem.shape[0] // 2
    WIDTH: gl.constexpr = BLOCK_N // PARTS
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    UNDER_WAY: gl.constexpr = 3 if half else 1  # steps; so that both consumers seldom write to shared memory at a time
    # Parts of a fresh tile leave at 0, 1/8, 2/8 and 3/8 of the next one's steps, for that has to find its place empty;
    # those of a sum at 0, 1/4, 1/2 and 3/4, since it waits in registers for longer.
    PORTIONS: gl.constexpr = PARTS if ACCUMULATE else 2 * PARTS
    stage = 0
    phase = 0
    turn = gl.to_tensor(0)
    e, m0, n0, rows, piece = hear(turn, places, announced, heard)
    # Not to begin with e, m0, n0: what follows one turn behind another value, Triton 3.6 takes for that value, if both
    # begin as one.
    e_before, m0_before, n0_before, held = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    kept = gl.zeros((HALF, BLOCK_N), gl.float32, ACC)
    while e >= 0:
        turn += 1
        steps = blocks_of(rows, BLOCK_T)
        acc, done, stage, phase = begin_tile(half, stage, phase, a_smem, b_smem, full, empty, GATHERED, BLOCK_N, STAGES)
        step = 1
        if ACCUMULATE:
            step = gl.minimum(UNDER_WAY, steps)
            acc, done, stage, phase = contract_blocks(
                half, 1, step, acc, done, stage, phase, a_smem, b_smem, full, empty, GATHERED, STAGES
            )
            hold_parts(half, kept, c_smem)
        for i in range(PARTS):  # unrolled it is slower
            send_part(
                held, c_desc, e_before, m0_before, n0_before + i * WIDTH, c_smem.index(half * PARTS + i), ACCUMULATE
            )
            portion = (steps - step) * i // PORTIONS
            next_portion = gl.where(i == PARTS - 1, steps - step, (steps - step) * (i + 1) // PORTIONS)
            acc, done, stage, phase = contract_blocks(
                half, step + portion, step + next_portion, acc, done, stage, phase, a_smem, b_smem, full, empty,
                GATHERED, STAGES
            )  # fmt: skip
        e_before, m0_before, n0_before, rows_before, piece_before = e, m0 + half * HALF, n0, rows, piece
        e, m0, n0, rows, piece = hear(turn, places, announced, heard)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(done), count=1)
        if ACCUMULATE:
            held = gl.where(rows_before > 0, 1, 0)
            kept = acc
        else:
            held = gl.where(piece_before == 0, 1, 0)
            end_tile(
                half, acc, piece_before, e_before, m0_before, n0_before, c_smem, c_ptr, partials_ptr, plan_ptr + 4,
                halves_of_tiles, M, 8 * eighths_of_N
            )  # fmt: skip
    if ACCUMULATE:
        hold_parts(half, kept, c_smem)
    for i in range(PARTS):
        send_part(held, c_desc, e_before, m0_before, n0_before + i * WIDTH, c_smem.index(half * PARTS + i), ACCUMULATE)
    tma.store_wait(0)


@gluon.jit
def end_tile(half: gl.constexpr, acc, piece, e, m0, n0, c_smem, c_ptr, partials_ptr, counters_ptr, blocks, M, N):
    """Hold a fresh tile, or, of an expert in pieces, leave it to the last of them."""
    if partials_ptr is None or piece == 0:
        hold_parts(half, acc, c_smem)
    else:
        c_of_expert = c_ptr + gl.to_tensor(e).to(gl.int64) * M * N
        end_piece(half, acc, piece, m0, n0, c_of_expert, partials_ptr, counters_ptr, blocks, M, N)


@gluon.jit
def hold_parts(half: gl.constexpr, tile, c_smem):
    """A tile as PARTS blocks of shared memory, once the one before it has left them."""
    PARTS: gl.constexpr = c_smem.shape[0] // 2
    tma.store_wait(0)
    left, right = halves(tile)
    parts = halves(left) + halves(right)
    for i in gl.static_range(PARTS):
        part = parts[i].to(c_smem.dtype)
        c_smem.index(half * PARTS + i).reshape([tile.shape[0], tile.shape[1] // PARTS]).store(part)
    fence_async_shared()


@gluon.jit
def send_part(held, c_desc, e, m0, n0, part, ACCUMULATE: gl.constexpr):
    """c[e, m0.., n0..] = part, or += part, if one is held."""
    if held > 0:
        if ACCUMULATE:
            async_add(c_desc, [e, m0, n0], part)
        else:
            async_store(c_desc, [e, m0, n0], part)


@gluon.jit
def k_grouped_kernel(
    a_desc,  # ragged (T, M), block (BLOCK_T, BLOCK_M / 2)
    b_desc,  # ragged (T, N), block (BLOCK_T, BLOCK_N)
    c_desc,  # (E, M, N), block (1, BLOCK_M / 2, BLOCK_N / 4); with ACCUMULATE fp32
    c_ptr,  # contiguous; or None, as the next, where no expert is contracted in pieces
    partials_ptr,  # (pieces, tiles, 2, BLOCK_M / 2, BLOCK_N) in fp32
    plan_ptr,  # see `plan_kernel`
    a_ptr,  # or b_ptr: of the operand with an index; its descriptor is not loaded from then
    b_ptr,
    index_ptr,  # (R,) int32: rows of that operand, or None
    num_source,  # its rows
    eighths_of_stride,  # its
    halves_of_tiles,  # of an expert
    counters,  # of the plan
    M,
    eighths_of_N,  # so that 8 elements are one access, whatever else divides N
    ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (programs,), persistent, four warps. c[e] = a[r].T @ b[r], or c[e] += with ACCUMULATE.

    Every element of a sum has one summand, so that no order of additions matters. On a GPU such additions take numbers
    below the normal ones of fp32 for zero.
    """
    PARTS: gl.constexpr = BLOCK_N // c_desc.block_type.shape[2]
    GATHERED: gl.constexpr = index_ptr is not None
    SIDE: gl.constexpr = None if index_ptr is None else "b" if a_ptr is None else "a"
    WARPS: gl.constexpr = 4 if GATHERED else 1
    a_smem, b_smem, full, empty = ring(a_desc, b_desc, STAGES, 128 if GATHERED else 0)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2 * PARTS] + c_desc.block_type.shape, c_desc.layout)
    places, announced, heard = announcements(2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (0, c_desc, c_ptr, partials_ptr, plan_ptr, halves_of_tiles, M, eighths_of_N,
                a_smem, b_smem, c_smem, full, empty, places, announced, heard,
                GATHERED, ACCUMULATE, BLOCK_M, BLOCK_N, STAGES)),
            (consume, (1, c_desc, c_ptr, partials_ptr, plan_ptr, halves_of_tiles, M, eighths_of_N,
                a_smem, b_smem, c_smem, full, empty, places, announced, heard,
                GATHERED, ACCUMULATE, BLOCK_M, BLOCK_N, STAGES)),
            (produce, (a_desc, b_desc, a_ptr, b_ptr, index_ptr, num_source, eighths_of_stride,
                a_smem, b_smem, full, empty, places, announced, heard, plan_ptr, counters,
                M, eighths_of_N, SIDE, BLOCK_M, BLOCK_N, GROUP_M, STAGES)),
        ],
        [4, WARPS],
        [216 if GATHERED else 232, 80 if GATHERED else 40],
    )  # fmt: skip


def k_grouped_gemm(
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> Tensor:
    num_experts, rows, columns = starts.shape[0], a.shape[1], b.shape[1]
    but = None if out_dtype == a.dtype else f"the output is {out_dtype}"
    indexed, contracted = (a_index, b_index), num_rows(a, a_index)
    if not is_fast("k_grouped_gemm", contracted, num_experts, columns, a, b, indexed=indexed, but=but):
        return portable.k_grouped_gemm(a, b, starts, ends, out_dtype, a_index, b_index)
    c = a.new_empty(num_experts, rows, columns)
    launch_k_grouped(c, a, b, starts, ends, a_index, b_index, accumulate=False)
    return c


def k_grouped_gemm_accumulate(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> None:
    indexed, contracted = (a_index, b_index), num_rows(a, a_index)
    but = None
    if contracted < 640 * c.shape[0]:  # on an H200 Gluon is ahead at 655 rows an expert, not at 512
        but = "additions outlast the products of so few rows"
    elif c.dtype != torch.float32 or not suits_tma(c):
        but = f"TMA cannot add to {c.dtype} with strides {c.stride()}, or its first element is not aligned to 16 bytes"
    if not is_fast("k_grouped_gemm_accumulate", contracted, c.shape[0], c.shape[2], a, b, indexed=indexed, but=but):
        return portable.k_grouped_gemm_accumulate(c, a, b, starts, ends, a_index, b_index)
    launch_k_grouped(c, a, b, starts, ends, a_index, b_index, accumulate=True)


def launch_k_grouped(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    a_index: Tensor | None,
    b_index: Tensor | None,
    accumulate: bool,
) -> None:
    num_experts, rows, columns = c.shape
    contracted = num_rows(a, a_index)
    if accumulate:  # its tiles are smaller: a copy is faster than their loads
        a, a_index = gather_rows(a, a_index), None
    if accumulate or a_index is not None:  # one operand is gathered at a time
        b, b_index = gather_rows(b, b_index), None
    index, gathered = (a_index, a) if a_index is not None else (b_index, b)
    tile = choose_tile("sum" if accumulate else "wgrad", columns)
    half = BLOCK_M // 2
    tiles = cdiv(rows, BLOCK_M) * cdiv(columns, tile.block_n)
    processors = num_processors(a.device)
    # A sum may have one summand only, or the order of additions would matter.
    pieces = 0 if accumulate else entries_of_pieces(num_experts, tiles, processors)
    programs = min(processors, (num_experts + pieces) * tiles)
    k_grouped(tile, accumulate).launch(
        (programs,),
        a.device,
        ragged_descriptor(a, (rows,), (a.stride(0), 1), (tile.block_k, half)),
        ragged_descriptor(b, (columns,), (b.stride(0), 1), (tile.block_k, tile.block_n)),
        descriptor(c, c.shape, c.stride(), (1, half, tile.block_n // 4)),
        c if pieces else None,
        a.new_empty(pieces * tiles * BLOCK_M * tile.block_n, dtype=torch.float32) if pieces else None,
        make_plan(starts, ends, contracted, tiles, programs, pieces),
        a if a_index is not None else None,
        b if b_index is not None else None,
        index,
        0 if index is None else gathered.shape[0],
        0 if index is None else gathered.stride(0) // 8,
        2 * tiles,
        2 * pieces * tiles,
        rows,
        columns // 8,
    )


@functools.cache
def k_grouped(tile: Tile, accumulate: bool) -> Kernel:
    return kernel(
        k_grouped_kernel,
        ACCUMULATE=accumulate,
        BLOCK_M=BLOCK_M,
        BLOCK_N=tile.block_n,
        GROUP_M=tile.group_m,
        STAGES=tile.stages,
        num_warps=4,
    )
