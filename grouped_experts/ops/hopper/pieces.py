"""The end of a tile whose expert is contracted in pieces: whoever is last adds them up, in their order."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from grouped_experts.ops.hopper.compat import barrier


@gluon.jit
def end_piece(half: gl.constexpr, acc, piece, m0, n0, c_ptr, partials_ptr, counters_ptr, blocks, M, N):
    """Of one expert's c the half tile m0.., n0..; piece: see `weight_tile`; blocks: of the workspace, for each piece.

    Each half of a tile has a block of the workspace, and a counter.
    """
    first = (piece >> 16) * 2 + half
    which, pieces = (piece >> 8) & 255, piece & 255
    store_piece(acc, first + blocks * which, partials_ptr)
    finish_pieces(
        first, blocks, pieces, counters_ptr + first, partials_ptr, c_ptr, m0, n0, M, N, acc.shape[0], acc.shape[1]
    )


@gluon.jit
def store_piece(acc, at, partials_ptr):
    """A consumer's half of a tile in fp32, as block `at` of the workspace, which has less than 2**31 elements."""
    LAYOUT: gl.constexpr = acc.type.layout
    row = at * acc.shape[0] + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(partials_ptr + (row[:, None] * acc.shape[1] + column[None, :]), acc)


@gluon.jit
def finish_pieces(
    first, blocks, pieces, counter_ptr, partials_ptr, c_ptr, m0, n0, M, N, HALF: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """c[m0.., n0..] = the sum of blocks first, first + blocks ..., if all of them are there by now.

    No piece waits for another, so that none need run at the same time.
    """
    BAND: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [2, 2], [1, 0])
    barrier()  # behind the stores of all threads
    if gl.atomic_add(counter_ptr, 1, sem="acq_rel") == pieces - 1:
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        for band in range(0, HALF, BAND):
            row = band + gl.arange(0, BAND, gl.SliceLayout(1, LAYOUT))
            total = gl.zeros((BAND, BLOCK_N), gl.float32, LAYOUT)
            for i in range(pieces):
                at = ((first + i * blocks) * HALF + row)[:, None] * BLOCK_N + column[None, :]
                total += gl.load(partials_ptr + at, cache_modifier=".cg")  # past the L1 cache: others wrote it
            m, n = m0 + row, n0 // BLOCK_N * BLOCK_N + column  # n0 is a multiple, which the compiler does not know
            inside = (m < M)[:, None] & (n < N)[None, :]
            gl.store(c_ptr + (m[:, None] * N + n[None, :]), total.to(c_ptr.dtype.element_ty), mask=inside)
