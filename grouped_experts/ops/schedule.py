"""What kernels need to know of the row ranges, made on the device: once for all products of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.families import by_family
from grouped_experts.registration import define_op, implement_op
from grouped_experts.rows import ranges_from_tensor, schedule_size


def _unwritten_schedule(starts: Tensor, ends: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """The reference loops over the ranges themselves: on a CPU no room is made, on a GPU the size stays the same."""
    size = 0 if starts.device.type == "cpu" else schedule_size(num_rows, starts.shape[0])
    return starts.new_empty(size, 4)


# Which rows each tile has, for products of `num_rows` rows in `dtype`, which chooses the family that it is made for.
tile_schedule_op = define_op(
    "tile_schedule(Tensor starts, Tensor ends, SymInt num_rows, ScalarType dtype) -> Tensor",
    implementation=by_family("tile_schedule", reference=_unwritten_schedule),
    fake=_unwritten_schedule,
)

# Device counts become ranges in one kernel instead of a dozen.
implement_op("ranges_from_tensor", by_family("ranges_from_tensor", reference=ranges_from_tensor), "CUDA")
