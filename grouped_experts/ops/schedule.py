"""What kernels need to know of the row ranges, made on the device: once for all products of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.families import by_family
from grouped_experts.registration import define_op, implement_op
from grouped_experts.rows import ranges_from_tensor, schedule_size


def _unwritten_schedule(starts: Tensor, ends: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Room for it: the reference, which loops over the ranges themselves, does not need its content."""
    return starts.new_empty(schedule_size(num_rows, starts.shape[0]), 4)


# Which rows each tile has, for products of `num_rows` rows in `dtype`. Its content is the kernel family's business.
tile_schedule_op = define_op(
    "tile_schedule(Tensor starts, Tensor ends, SymInt num_rows, ScalarType dtype) -> Tensor",
    implementation=by_family("tile_schedule", reference=_unwritten_schedule),
    fake=_unwritten_schedule,
)

# Device counts become ranges in one kernel instead of a dozen.
implement_op("ranges_from_tensor", by_family("ranges_from_tensor", reference=ranges_from_tensor), "CUDA")
