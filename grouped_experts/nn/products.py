"""The products of the layer, apart from its mathematics: in the dtype of their operands here, in FP8 in `nn/fp8.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grouped_experts.nn.deferred import WeightGradient
from grouped_experts.ops.fused import fc1_activation_op, fc2_dgrad_activation_op
from grouped_experts.ops.m_grouped import m_grouped_gemm_op
from grouped_experts.rows import RowRanges


class Rows(NamedTuple):
    """What a product knows of its rows: the experts' ranges, their schedule, and which row of an operand each is."""

    starts: Tensor
    ends: Tensor
    tiles: Tensor | None
    row_index: Tensor | None = None

    def themselves(self) -> Rows:
        """Of an operand that has a row for each, in order."""
        return self._replace(row_index=None)


@dataclass(frozen=True)
class Products:
    """In `dtype`, to which weights are converted.

    Rows of no expert are zero where `zero_gaps` says so, and undefined else.
    """

    dtype: torch.dtype

    def fc1_activation(
        self, x: Tensor, weight: Tensor, rows: Rows, bias: Tensor | None, probs: Tensor | None, activation: str
    ) -> tuple[Tensor, Tensor]:
        """h, a."""
        w, b = cast(weight, self.dtype), None if bias is None else cast(bias, self.dtype)
        return fc1_activation_op(x, w, rows.starts, rows.ends, b, probs, activation, rows.tiles, rows.row_index)

    def fc2(
        self, a: Tensor, weight: Tensor, rows: Rows, bias: Tensor | None, probs: Tensor | None, zero_gaps: bool
    ) -> Tensor:
        w, b = cast(weight, self.dtype), None if bias is None else cast(bias, self.dtype)
        scale = None if b is None else probs
        return m_grouped_gemm_op(a, w, rows.starts, rows.ends, b, scale, True, rows.tiles, rows.row_index, zero_gaps)

    def fc2_dgrad_activation(
        self,
        dy: Tensor,
        weight: Tensor,
        h: Tensor,
        rows: Rows,
        bias: Tensor | None,
        probs: Tensor | None,
        activation: str,
        need_a: bool,
        need_dprobs: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dh, a, dprobs."""
        w, b = cast(weight, self.dtype), None if bias is None else cast(bias, self.dtype)
        starts, ends, tiles, index = rows
        return fc2_dgrad_activation_op(dy, w, h, starts, ends, probs, b, activation, need_a, need_dprobs, tiles, index)

    def fc1_dgrad(self, dh: Tensor, weight: Tensor, rows: Rows, zero_gaps: bool) -> Tensor:
        w = cast(weight, self.dtype)
        return m_grouped_gemm_op(
            dh, w, rows.starts, rows.ends, None, None, False, rows.tiles, rows.row_index, zero_gaps
        )

    def weight_gradient(
        self,
        left: Tensor,
        right: Tensor,
        rows: RowRanges,
        dtype: torch.dtype,
        left_index: Tensor | None = None,
        right_index: Tensor | None = None,
    ) -> WeightGradient:
        """In `dtype`, that of the weight, as work to be done. left: the gradient of the product's output."""
        return WeightGradient(left, right, rows, dtype, left_index, right_index)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`to`, which takes ten times as long to find that there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
