"""What kernels need to know of the row ranges, made on the device: once for all products of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.families import by_family
from grouped_experts.registration import define_op, implement_op
from grouped_experts.rows import RowRanges, check_integers, ranges_from_tensor, schedule_size


def unwritten_schedule(
    starts: Tensor, ends: Tensor, num_rows: int, dtype: torch.dtype, expected_rows: int = 0
) -> Tensor:
    """The reference loops over the ranges themselves: on a CPU no room is made, on a GPU the size stays the same."""
    size = 0 if starts.device.type == "cpu" else schedule_size(num_rows, starts.shape[0])
    return starts.new_empty(size, 4)


# Which rows each tile has, for products of `num_rows` rows in `dtype`, which chooses the family that it is made for.
# expected_rows: of the products as well.
tile_schedule_op = define_op(
    "tile_schedule(Tensor starts, Tensor ends, SymInt num_rows, ScalarType dtype, SymInt expected_rows=0) -> Tensor",
    implementation=by_family("tile_schedule", reference=unwritten_schedule),
    fake=unwritten_schedule,
)


def unscheduled_ranges(
    counts: Tensor, capacity: int, num_rows: int, dtype: torch.dtype, expected_rows: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    starts, ends = ranges_from_tensor(counts, 1, capacity, num_rows, capacity > 0)
    return starts, ends, unwritten_schedule(starts, ends, num_rows, dtype)


def _fake_scheduled_ranges(
    counts: Tensor, capacity: int, num_rows: int, dtype: torch.dtype, expected_rows: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    starts, ends = (counts.new_empty(counts.shape, dtype=torch.int32) for _ in range(2))
    return starts, ends, unwritten_schedule(starts, ends, num_rows, dtype)


# The ranges of counts, contiguous (capacity 0) or masked, and their tiles: what a layer starts with, in one kernel.
scheduled_ranges_op = define_op(
    "scheduled_ranges(Tensor counts, SymInt capacity, SymInt num_rows, ScalarType dtype, SymInt expected_rows=0)"
    " -> (Tensor, Tensor, Tensor)",
    implementation=by_family("scheduled_ranges", reference=unscheduled_ranges, operands=0),
    fake=_fake_scheduled_ranges,
)


def scheduled_ranges(
    counts: Tensor, num_rows: int, capacity: int | None, dtype: torch.dtype, expected_rows: int = 0
) -> tuple[RowRanges, Tensor]:
    """`RowRanges.contiguous`, or `RowRanges.masked` with a capacity, of counts on a device, and the tiles of its rows.

    Raises TypeError or ValueError for counts of another dtype or dimension.
    """
    check_integers("counts", counts)
    starts, ends, tiles = scheduled_ranges_op(counts, capacity or 0, num_rows, dtype, expected_rows)
    return RowRanges(starts, ends), tiles


# Device counts become ranges in one kernel instead of a dozen.
implement_op("ranges_from_tensor", by_family("ranges_from_tensor", reference=ranges_from_tensor), "CUDA")
