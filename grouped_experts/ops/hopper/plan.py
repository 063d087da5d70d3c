"""What a k-grouped kernel contracts, in which order, and whether its programs share the tiles out or claim them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.ops.portable.launch import kernel, next_power_of_2
from grouped_experts.ops.portable.schedule import load_range

MOST_PIECES = 16  # of one expert
FEWEST_ROWS = 1024  # of a piece


@triton.jit
def pieces_of(rows, shares, MOST: tl.constexpr, FEWEST: tl.constexpr):
    """In how many pieces an expert is contracted, by how many times a program's share a tile of it is.

    shares: of a program, in one row. Pieces cost a few percent, so n + 1/4 shares, not n, are n + 1 pieces.
    """
    pieces = tl.fma(rows.to(tl.float32), shares, 0.75).to(tl.int32)  # computed twice, and must round alike
    return tl.maximum(tl.minimum(tl.minimum(pieces, rows // FEWEST), MOST), 1)


@triton.jit
def filled(rows, MULTIPLE: tl.constexpr):
    """Up to a multiple, if one is given; ranges that overlap must not lead beyond int32."""
    return rows // MULTIPLE * MULTIPLE + tl.where(rows % MULTIPLE > 0, MULTIPLE, 0) if MULTIPLE else rows


@triton.jit
def plan_kernel(
    starts_ptr,  # (E,)
    ends_ptr,  # (E,)
    plan_ptr,  # (4 + counters + 4 (E + split),)
    num_rows,
    num_experts,
    tiles,  # of each expert
    programs,
    counters,
    BLOCK_E: tl.constexpr,
    LANES: tl.constexpr,  # 0: in the order that they have
    MOST: tl.constexpr,  # pieces of an expert
    FEWEST: tl.constexpr,  # rows of a piece
    FILLED: tl.constexpr,  # 0, or the rows lie one expert behind the other, filled up to this multiple
):
    """Grid (1,). A head, counters, which are zero, and an entry for each piece of an expert.

    Head: [0, for the tiles that are claimed; whether they are; how many entries there are]. Entry: [expert, first row,
    rows, 0 or (place of the expert's first piece, which piece, of how many) as 12, 8 and 8 bits].

    The experts with most rows come first, unless there are more than a thousand. Tiles are claimed one by one where one
    of the largest piece is more than a sixteenth of what a program has to do; otherwise every program takes as many.
    Ranges are clamped into the buffer.
    """
    e = tl.arange(0, BLOCK_E)
    start, end = load_range(starts_ptr, ends_ptr, e, num_rows, num_experts)
    rows = filled(end - start, FILLED)
    all_rows = tl.sum(rows.to(tl.int64))
    shares = programs * 1.0 / tl.maximum(all_rows * tiles, 1).to(tl.float32)
    pieces = pieces_of(rows, shares, MOST, FEWEST)
    before = e
    if LANES:
        before = tl.zeros((BLOCK_E,), tl.int32)
        for i in range(0, num_experts, LANES):
            other = i + tl.arange(0, LANES)
            their_start, their_end = load_range(starts_ptr, ends_ptr, other, num_rows, num_experts)
            theirs = filled(their_end - their_start, FILLED)
            more = theirs[None, :] > rows[:, None]
            as_many = (theirs[None, :] == rows[:, None]) & (other[None, :] < e[:, None])
            first = (more | as_many) & (other < num_experts)[None, :]
            before += tl.sum(tl.where(first, pieces_of(theirs, shares, MOST, FEWEST)[None, :], 0), 1)
    known = e < num_experts
    if FILLED:
        start = tl.minimum(tl.cumsum(rows, 0) - rows, num_rows)
        rows = tl.minimum(rows, num_rows - start)  # not before the order is known, or it would not be the same for all
    blocks = rows // 64 + (rows % 64 > 0).to(tl.int32)
    quotient, remainder = blocks // pieces, blocks % pieces  # the first pieces have a block more
    largest = tl.max(tl.where(pieces == 1, rows, 64 * (quotient + 1))).to(tl.int64)
    tl.store(plan_ptr, 0)
    tl.store(plan_ptr + 1, (16 * programs * largest > tiles * all_rows).to(tl.int32))
    tl.store(plan_ptr + 2, tl.sum(tl.where(known, pieces, 0)))
    for i in range(tl.max(pieces)):
        to = plan_ptr + 4 + counters + 4 * (before + i)
        mask = known & (i < pieces)
        tl.store(to, e, mask=mask)
        first = tl.minimum(64 * (i * quotient + tl.minimum(i, remainder)), rows)
        last = tl.where(i == pieces - 1, rows, 64 * ((i + 1) * quotient + tl.minimum(i + 1, remainder)))
        tl.store(to + 1, start + first, mask=mask)
        tl.store(to + 2, last - first, mask=mask)
        tl.store(to + 3, tl.where(pieces == 1, 0, (before << 16) + (i << 8) + pieces), mask=mask)
    for i in range(0, counters, 512):
        counter = i + tl.arange(0, 512)
        tl.store(plan_ptr + 4 + counter, 0, mask=counter < counters)


def entries_of_pieces(num_experts: int, tiles: int, programs: int) -> int:
    """How many entries the experts that are contracted in pieces can have together, whatever the rows.

    They have more than the share of a program, tiles / programs of all rows, and so are fewer than programs / tiles;
    each has less than one piece more than it has shares.
    """
    return 2 * programs // tiles if tiles < programs and num_experts <= 1024 else 0


def make_plan(
    starts: Tensor, ends: Tensor, num_rows: int, tiles: int, programs: int, split: int = 0, filled: int = 0
) -> Tensor:
    """(4 + counters + 4 (E + split),) int32, for as many tiles of each expert, and programs; good for one launch.

    split: 0, or `entries_of_pieces`; each half of each of their tiles has a counter.
    filled: where not 0, the experts' rows lie one behind the other in `num_rows`, each filled up to that multiple.
    """
    counters = 2 * split * tiles
    num_experts = starts.shape[0]
    plan = starts.new_empty(4 + counters + 4 * (num_experts + split))
    block = next_power_of_2(num_experts)
    kernel(
        plan_kernel,
        BLOCK_E=block,
        LANES=min(32, 8192 // block) if block <= 1024 else 0,
        MOST=MOST_PIECES if split else 1,
        FEWEST=FEWEST_ROWS,
        FILLED=filled,
    ).launch((1,), starts.device, starts, ends, plan, num_rows, num_experts, tiles, programs, counters)
    return plan
