"""The producer of k-grouped products: the warps that choose a tile of a weight and fill the ring with its rows.

One warp, and TMA for both operands; or four, where the rows of one are gathered (`gather.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from grouped_experts.ops.hopper.announcements import announce
from grouped_experts.ops.hopper.compat import async_load
from grouped_experts.ops.hopper.descriptors import rows_at
from grouped_experts.ops.hopper.gather import chunks_of_rows, copy_rows, rows_of
from grouped_experts.ops.hopper.pipeline import advance
from grouped_experts.ops.hopper.row_blocks import blocks_of
from grouped_experts.ops.portable.m_grouped import tile_position


@gluon.jit
def weight_tile(
    t, plan_ptr, counters, num_m, num_n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """Expert (-1: there are no more tiles), first row and column of its weight, rows: first, how many; piece.

    piece: 0, or of an expert in pieces its tile among those of the plan's entries, which piece (8 bits), of how many.
    """
    tiles = num_m * num_n
    place, tile = t // tiles, t % tiles
    i_m, i_n = tile_position(tile, num_m, num_n, GROUP_M)
    entries = gl.load(plan_ptr + 2)
    entry = plan_ptr + 4 + counters + 4 * gl.minimum(place, entries - 1)
    e = gl.where(place < entries, gl.load(entry), -1)
    piece = gl.load(entry + 3)
    piece = gl.where(piece > 0, ((piece >> 16) * tiles + tile) * 65536 + (piece & 65535), 0)
    return e, i_m * BLOCK_M, i_n * BLOCK_N, gl.load(entry + 1), gl.load(entry + 2), piece


@gluon.jit
def produce(
    a_desc, b_desc, a_ptr, b_ptr, index_ptr, num_source, eighths_of_stride, a_smem, b_smem, full, empty,
    places, announced, heard, plan_ptr, counters, M, eighths_of_N,
    SIDE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Chooses tiles, and loads for them; the next one is looked up while the ring is full.

    By one warp, or where the operand SIDE (a or b) is gathered by four.
    Unlike the one of m_producer.py it may carry what it loaded to the next turn, since its loop stores.
    """
    BLOCK_T: gl.constexpr = a_desc.block_type.shape[2]
    WIDTH: gl.constexpr = b_desc.block_type.shape[3] if SIDE == "b" else a_desc.block_type.shape[3]
    WARPS: gl.constexpr = 1 if SIDE is None else 4
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(8 * eighths_of_N, BLOCK_N)
    lane = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    claims = gl.load(plan_ptr + 1) > 0
    stage = 0
    phase = 1
    t = gl.program_id(0)
    e, m0, n0, start, rows, piece = weight_tile(t, plan_ptr, counters, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M)
    turn = gl.to_tensor(0)
    announce(turn, e, m0, n0, rows, piece, places, announced, heard, WARPS)
    while e >= 0:
        turn += 1
        # Nobody waits until the number is asked for. It counts the tiles behind those that programs begin with.
        claimed = gl.atomic_add(plan_ptr + 0 * lane, gl.full_like(lane, 1), mask=(lane == 0) & claims, sem="relaxed")
        steps = blocks_of(rows, BLOCK_T)
        first = gl.minimum(steps, STAGES)
        index = 0 if SIDE is None else load_index(index_ptr, 0, start, rows, WIDTH, BLOCK_T)
        for i in range(first):
            stage, phase, index = load_rows(
                i, index, start, rows, m0, n0, stage, phase, a_desc, b_desc, a_ptr, b_ptr, index_ptr, num_source,
                eighths_of_stride, M, eighths_of_N, a_smem, b_smem, full, empty, SIDE, STAGES
            )  # fmt: skip
        t = gl.where(claims, gl.sum(gl.where(lane == 0, claimed, 0), 0), t) + gl.num_programs(0)
        e_next, m0_next, n0_next, start_next, rows_next, piece_next = weight_tile(
            t, plan_ptr, counters, num_m, num_n, BLOCK_M, BLOCK_N, GROUP_M
        )
        for i in range(first, steps):
            stage, phase, index = load_rows(
                i, index, start, rows, m0, n0, stage, phase, a_desc, b_desc, a_ptr, b_ptr, index_ptr, num_source,
                eighths_of_stride, M, eighths_of_N, a_smem, b_smem, full, empty, SIDE, STAGES
            )  # fmt: skip
        e, m0, n0, start, rows, piece = e_next, m0_next, n0_next, start_next, rows_next, piece_next
        announce(turn, e, m0, n0, rows, piece, places, announced, heard, WARPS)


@gluon.jit
def load_rows(
    i, index, start, rows, m0, n0, stage, phase, a_desc, b_desc, a_ptr, b_ptr, index_ptr, num_source, eighths_of_stride,
    M, eighths_of_N, a_smem, b_smem, full, empty, SIDE: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Block i of a tile's rows; index: which they are of the operand that is gathered. Returns that of the next block.

    Of that operand rows behind the last are zeros as well.
    """
    BLOCK_T: gl.constexpr = a_desc.block_type.shape[2]
    HALF: gl.constexpr = a_desc.block_type.shape[3]
    WIDTH: gl.constexpr = b_desc.block_type.shape[3]
    A_BYTES: gl.constexpr = 0 if SIDE == "a" else 2 * a_desc.block_type.nbytes
    B_BYTES: gl.constexpr = 0 if SIDE == "b" else b_desc.block_type.nbytes
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(bar, A_BYTES + B_BYTES)
    wrap, until, first_row = rows_at(start + i * BLOCK_T, start + rows)
    next_index = index
    if SIDE is None:
        for half in gl.static_range(2):
            async_load(a_desc, [wrap, until, first_row, m0 + half * HALF], bar, a_smem.index(2 * stage + half))
        async_load(b_desc, [wrap, until, first_row, n0], bar, b_smem.index(stage))
    else:
        COLUMNS: gl.constexpr = HALF if SIDE == "a" else WIDTH
        LAYOUT: gl.constexpr = chunks_of_rows(COLUMNS)
        next_index = load_index(index_ptr, i + 1, start, rows, COLUMNS, BLOCK_T)
        known = (i * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(1, LAYOUT)) < rows)[:, None]
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        # A tile's first column is a multiple of its width, which the compiler does not know.
        if SIDE == "a":
            async_load(b_desc, [wrap, until, first_row, n0], bar, b_smem.index(stage))
            at = rows_of(a_ptr, index, num_source, eighths_of_stride)
            for half in gl.static_range(2):
                m = HALF * (m0 // HALF) + half * HALF + column
                copy_rows(at, m, known & (m < 8 * (M // 8))[None, :], a_smem.index(2 * stage + half))
        else:
            for half in gl.static_range(2):
                async_load(a_desc, [wrap, until, first_row, m0 + half * HALF], bar, a_smem.index(2 * stage + half))
            at = rows_of(b_ptr, index, num_source, eighths_of_stride)
            n = WIDTH * (n0 // WIDTH) + column
            copy_rows(at, n, known & (n < 8 * eighths_of_N)[None, :], b_smem.index(stage))
        async_copy.mbarrier_arrive(bar, increment_count=False)
    stage, phase = advance(stage, phase, STAGES)
    return stage, phase, next_index


@gluon.jit
def load_index(index_ptr, i, start, rows, COLUMNS: gl.constexpr, BLOCK_T: gl.constexpr):
    """Of block i of a tile's rows, for copies of so many columns; a block ahead, so that nobody waits for it."""
    row = i * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(1, chunks_of_rows(COLUMNS)))
    return gl.load(index_ptr + start + row, mask=row < rows, other=0)
