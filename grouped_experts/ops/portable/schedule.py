"""Row ranges and the tile schedule, built on the device, once for all products of a layer.

The schedule is (1 + max_tiles, 4) int32. Row 0: how many tiles are owned, how many there are with those of the gaps.
Every other row is a tile: expert (-1: rows of no expert), first row, row behind the last. Owned tiles come first, by
expert; those of the gaps follow.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.ops.portable.launch import Kernel, kernel, next_power_of_2
from grouped_experts.ops.portable.tiles import row_block
from grouped_experts.rows import schedule_size


def max_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Tiles that E ranges and E + 1 gaps can take: each has at most one that is not full."""
    return num_rows // block_m + 2 * num_experts + 1


@triton.jit
def ceil_div(a, b):
    """a / b, rounded up, for a from 0 to the largest int32: `tl.cdiv` goes beyond it."""
    return a // b + (a % b > 0).to(tl.int32)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def write_tiles(tiles_ptr, first_tile, expert, start, end, BLOCK_M: tl.constexpr, LANES: tl.constexpr):
    count = ceil_div(end - start, BLOCK_M)
    for i in range(0, count, LANES):
        tile = i + tl.arange(0, LANES)
        row = start + tile * BLOCK_M
        to = tiles_ptr + 4 * (1 + first_tile + tile)
        tl.store(to, tl.zeros_like(tile) + expert, mask=tile < count)
        tl.store(to + 1, row, mask=tile < count)
        tl.store(to + 2, row + tl.minimum(end - row, BLOCK_M), mask=tile < count)


@triton.jit
def schedule_kernel(
    counts_ptr,  # (E,) int32 or int64, or None
    starts_ptr,  # (E,)
    ends_ptr,  # (E,)
    tiles_ptr,  # (1 + max_tiles, 4)
    num_rows,
    num_experts,
    stride,  # of counts
    capacity,  # with MASKED
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,  # at least E + 1
    LANES: tl.constexpr,
):
    """Grid (E + 1,)."""
    write_schedule(
        tl.program_id(0), counts_ptr, starts_ptr, ends_ptr, tiles_ptr, num_rows, num_experts, stride, capacity, MASKED,
        BLOCK_M, BLOCK_E, LANES
    )  # fmt: skip


@triton.jit
def write_schedule(
    expert, counts_ptr, starts_ptr, ends_ptr, tiles_ptr, num_rows, num_experts, stride, capacity,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """One of E + 1 parts: that of expert e has its tiles and those of the gap before it; part E, those of the last gap.

    With counts, starts and ends are written too.
    """
    e = tl.arange(0, BLOCK_E)
    # The end of the last range with rows before e's: an empty range may lie anywhere.
    if counts_ptr is not None:
        start, end = counted_range(counts_ptr, e, stride, num_experts, 1, capacity, num_rows, MASKED)
        start_before, end_before = counted_range(counts_ptr, e - 1, stride, num_experts, 1, capacity, num_rows, MASKED)
        mine = (e == expert) & (e < num_experts)
        tl.store(starts_ptr + e, start, mask=mine)
        tl.store(ends_ptr + e, end, mask=mine)
        start = tl.where(e < num_experts, start, num_rows)
        end = tl.where(e < num_experts, end, num_rows)
    else:
        start, end = load_range(starts_ptr, ends_ptr, e, num_rows, num_experts)
        start_before, end_before = load_range(starts_ptr, ends_ptr, e - 1, num_rows, num_experts)
    reached = tl.associative_scan(tl.where(end_before > start_before, end_before, 0), 0, maximum)
    start = tl.maximum(start, tl.where(end > start, reached, 0))  # ranges that overlap break a promise, not memory
    end = tl.maximum(end, start)
    bounds_gap = (end > start) | (e == num_experts)
    gap = tl.where(bounds_gap, start - tl.minimum(reached, start), 0)
    owned_tiles = ceil_div(end - start, BLOCK_M)
    gap_tiles = ceil_div(gap, BLOCK_M)
    num_owned = tl.sum(owned_tiles)

    mine = e == expert
    my_start, my_end, my_gap = (
        tl.sum(tl.where(mine, start, 0)),
        tl.sum(tl.where(mine, end, 0)),
        tl.sum(tl.where(mine, gap, 0)),
    )
    before = e < expert
    write_tiles(tiles_ptr, tl.sum(tl.where(before, owned_tiles, 0)), expert, my_start, my_end, BLOCK_M, LANES)
    first_gap = num_owned + tl.sum(tl.where(before, gap_tiles, 0))
    write_tiles(tiles_ptr, first_gap, -1, my_start - my_gap, my_start, BLOCK_M, LANES)
    if expert == 0:
        tl.store(tiles_ptr, num_owned)
        tl.store(tiles_ptr + 1, num_owned + tl.sum(gap_tiles))


@triton.jit
def load_range(starts_ptr, ends_ptr, e, num_rows, num_experts):
    """Ranges clamped into the buffer; behind the last expert's an empty one at its end."""
    known = (e >= 0) & (e < num_experts)
    start = tl.load(starts_ptr + e, mask=known, other=0)
    end = tl.load(ends_ptr + e, mask=known, other=0)
    start = tl.minimum(tl.maximum(start, 0), num_rows)
    end = tl.maximum(tl.minimum(end, num_rows), start)
    past = e >= num_experts
    return tl.where(past, num_rows, start), tl.where(past, num_rows, end)


@triton.jit
def counted_range(counts_ptr, e, stride, num_experts, alignment, capacity, limit, MASKED: tl.constexpr):
    """Ranges from counts; e ascends by one. Clamps as `grouped_experts.rows`: negative counts to 0, ends into limit."""
    known = (e >= 0) & (e < num_experts)
    count = tl.load(counts_ptr + e.to(tl.int64) * stride, mask=known, other=0).to(tl.int64)
    count = tl.minimum(tl.maximum(count, 0), limit)
    if MASKED:
        start = tl.maximum(e, 0).to(tl.int64) * capacity
        end = start + tl.minimum(count, capacity)
    else:
        length = tl.cdiv(count, alignment) * alignment
        start = tl.cumsum(length, 0) - length
        end = start + count
    return tl.minimum(start, limit).to(tl.int32), tl.minimum(end, limit).to(tl.int32)


def build_schedule(starts: Tensor, ends: Tensor, num_rows: int, block_m: int) -> Tensor:
    """block_m: rows of a tile, at least SMALLEST_TILE, for which the schedule has room."""
    tiles = starts.new_empty(schedule_size(num_rows, starts.shape[0]), 4)
    schedule_kernel_for(starts.shape[0], block_m, masked=False).launch(
        (starts.shape[0] + 1,), starts.device, None, starts, ends, tiles, num_rows, starts.shape[0], 1, 1
    )
    return tiles


def scheduled_ranges(
    counts: Tensor, capacity: int, num_rows: int, dtype: torch.dtype, expected_rows: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """starts, ends and their tiles. Capacity 0: contiguous, else masked. Of counts on a GPU."""
    num_experts = counts.shape[0]
    starts, ends, tiles = empty_schedule(counts.device, num_experts, num_rows)
    schedule_kernel_for(num_experts, row_block(num_rows, num_experts, expected_rows), masked=capacity > 0).launch(
        (num_experts + 1,),
        counts.device,
        counts,
        starts,
        ends,
        tiles,
        num_rows,
        num_experts,
        counts.stride(0),
        capacity,
    )
    return starts, ends, tiles


def empty_schedule(device: torch.device, num_experts: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """starts, ends, tiles."""
    starts, ends = (torch.empty(num_experts, dtype=torch.int32, device=device) for _ in range(2))
    return starts, ends, starts.new_empty(schedule_size(num_rows, num_experts), 4)


@functools.cache
def schedule_kernel_for(num_experts: int, block_m: int, masked: bool) -> Kernel:
    block_e = next_power_of_2(num_experts + 1)
    return kernel(schedule_kernel, MASKED=masked, BLOCK_M=block_m, BLOCK_E=block_e, LANES=32)


def schedule_of(tiles: Tensor | None, starts: Tensor, ends: Tensor, num_rows: int, expected_rows: int = 0) -> Tensor:
    """The layer's, if it is given and written, else one for these ranges."""
    if tiles is not None and tiles.shape[0]:
        return tiles
    return build_schedule(starts, ends, num_rows, row_block(num_rows, starts.shape[0], expected_rows))


def tile_schedule(starts: Tensor, ends: Tensor, num_rows: int, dtype: torch.dtype, expected_rows: int = 0) -> Tensor:
    """On a CPU, where only the interpreter runs these kernels, empty as the reference's: products make their own."""
    if starts.device.type == "cpu":
        return starts.new_empty(0, 4)
    return schedule_of(None, starts, ends, num_rows, expected_rows)


@triton.jit
def ranges_kernel(
    counts_ptr,  # (E,) int32 or int64
    starts_ptr,  # (E,)
    ends_ptr,  # (E,)
    stride,
    num_experts,
    alignment,
    capacity,
    limit,
    MASKED: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid (1,)."""
    e = tl.arange(0, BLOCK_E)
    start, end = counted_range(counts_ptr, e, stride, num_experts, alignment, capacity, limit, MASKED)
    tl.store(starts_ptr + e, start, mask=e < num_experts)
    tl.store(ends_ptr + e, end, mask=e < num_experts)


def ranges_from_tensor(
    counts: Tensor, alignment: int, capacity: int, limit: int, masked: bool
) -> tuple[Tensor, Tensor]:
    # Two allocations: inductor counts on outputs that are aligned to 16 bytes.
    starts, ends = (torch.empty(counts.shape, dtype=torch.int32, device=counts.device) for _ in range(2))
    if counts.shape[0]:
        kernel(ranges_kernel, MASKED=masked, BLOCK_E=next_power_of_2(counts.shape[0])).launch(
            (1,), counts.device, counts, starts, ends, counts.stride(0), counts.shape[0], alignment, capacity, limit
        )
    return starts, ends
