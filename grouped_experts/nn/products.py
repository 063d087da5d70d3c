"""The products of the layer, apart from its mathematics: in the dtype of their operands here, in FP8 in `nn/fp8.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from grouped_experts.nn.deferred import Gradient, WeightGradient
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


class Wanted(NamedTuple):
    """The gradients that a backward is to bring."""

    x: bool
    probs: bool
    fc1_weight: bool
    fc2_weight: bool


@dataclass(frozen=True)
class Products:
    """In `dtype`, to which weights are converted.

    What one product leaves for another alone, a in the forward and dy, dh and a in the backward, is what they agree
    upon: tensors here, as x is. Rows of no expert are zero where `zero_gaps` says so, and undefined else.
    expected_rows: how many rows an expert will have on average, if that is known; for the tiles, else 0.
    copies_rows: those of an operand with an index are copied in their order, by every product that takes it.
    """

    dtype: torch.dtype
    expected_rows: int = field(default=0, kw_only=True)
    copies_rows: ClassVar[bool] = False

    def fc1_activation(
        self, x: Any, weight: Tensor, rows: Rows, bias: Tensor | None, probs: Tensor | None, activation: str
    ) -> tuple[Tensor, Any]:
        """h, and a for `fc2`."""
        w, b = cast(weight, self.dtype), None if bias is None else cast(bias, self.dtype)
        starts, ends, tiles, index = rows
        return fc1_activation_op(x, w, starts, ends, b, probs, activation, tiles, index, self.expected_rows)

    def fc2(
        self, a: Any, weight: Tensor, rows: Rows, bias: Tensor | None, probs: Tensor | None, zero_gaps: bool
    ) -> Tensor:
        w, b = cast(weight, self.dtype), None if bias is None else cast(bias, self.dtype)
        scale = None if b is None else probs
        return self._product(a, w, rows, b, scale, True, zero_gaps)

    def fc2_dgrad_activation(
        self,
        dy: Tensor,
        weight: Tensor,
        h: Tensor,
        rows: Rows,
        bias: Tensor | None,
        probs: Tensor | None,
        activation: str,
        wanted: Wanted,
    ) -> tuple[Any, Any, Any, Tensor]:
        """dy, dh and a for `fc1_dgrad` and `weight_gradient`, and dprobs; undefined what is not needed."""
        w, b = cast(weight, self.dtype), None if bias is None else cast(bias, self.dtype)
        starts, ends, tiles, index = rows
        needed = wanted.fc2_weight, wanted.probs
        dh, a, dprobs = fc2_dgrad_activation_op(
            dy, w, h, starts, ends, probs, b, activation, *needed, tiles, index, self.expected_rows
        )
        return dy, dh, a, dprobs

    def fc1_dgrad(self, dh: Any, weight: Tensor, rows: Rows, zero_gaps: bool) -> Tensor:
        return self._product(dh, cast(weight, self.dtype), rows, None, None, False, zero_gaps)

    def _product(
        self,
        x: Tensor,
        w: Tensor,
        rows: Rows,
        bias: Tensor | None,
        bias_scale: Tensor | None,
        transpose_w: bool,
        zero_gaps: bool,
    ) -> Tensor:
        starts, ends, tiles, index = rows
        return m_grouped_gemm_op(
            x, w, starts, ends, bias, bias_scale, transpose_w, tiles, index, zero_gaps, self.expected_rows
        )  # fmt: skip

    def weight_gradient(
        self,
        left: Any,
        right: Any,
        rows: RowRanges,
        dtype: torch.dtype,
        left_index: Tensor | None = None,
        right_index: Tensor | None = None,
    ) -> Gradient:
        """In `dtype`, that of the weight, as work to be done. left: the gradient of the product's output."""
        return WeightGradient(left, right, rows, dtype, left_index, right_index)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`to`, which takes ten times as long to find that there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
