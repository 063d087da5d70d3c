"""The layer's products in blockwise FP8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grouped_experts.nn.deferred import WeightGradient
from grouped_experts.nn.products import Products, Rows, cast
from grouped_experts.ops.activation import scaled_activation_backward_op, scaled_activation_op
from grouped_experts.ops.families import FP8, knows_fp8
from grouped_experts.ops.permute import gather_rows_op
from grouped_experts.ops.products_fp8 import (
    k_grouped_gemm_fp8_accumulate_op,
    k_grouped_gemm_fp8_op,
    m_grouped_gemm_fp8_op,
)
from grouped_experts.ops.quantize import quantize_blocks_op, quantize_columns_op, quantize_rows_op
from grouped_experts.rows import RowRanges


@dataclass(frozen=True)
class FP8Recipe:
    """How a layer computes in FP8: DeepSeek-V3's blocks of 128 (`grouped_experts.ops.quantize`).

    power_of_two_scales: scales of the next power of two (UE8M0), else any fp32 number.
    gradient_dtype: of dy and dh, float8_e4m3fn or float8_e5m2. Activations and weights are e4m3.
    fp8_wgrad: weight gradients in FP8 as well, else in the dtype of x.
    emulate: on a GPU below sm_89, which has no FP8, compute in fp32 with the rounded numbers, waiting for the GPU; as a
    CPU always does, but for the waiting.

    Raises TypeError for a gradient_dtype that is none of the two.
    """

    power_of_two_scales: bool = False
    gradient_dtype: torch.dtype = torch.float8_e4m3fn
    fp8_wgrad: bool = True
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.gradient_dtype not in FP8:
            raise TypeError(f"gradient_dtype: wanted float8_e4m3fn or float8_e5m2, got {self.gradient_dtype}")

    def products(self, x: Tensor, dtype: torch.dtype) -> FP8Products:
        """For that x. Raises TypeError for fp64, RuntimeError for a GPU without FP8 unless `emulate` says so."""
        if dtype == torch.float64:
            raise TypeError("x: wanted a dtype of bfloat16, float16, float32 for products in FP8, got float64")
        if not (self.emulate or knows_fp8(x.device)):
            name = torch.cuda.get_device_name(x.device)
            raise RuntimeError(
                f"precision: wanted a GPU with FP8 (sm_89 or later) or FP8Recipe(emulate=True), got {name}"
            )
        return FP8Products(dtype, self)


def recipe_of(precision: str | FP8Recipe | None) -> FP8Recipe | None:
    if precision is None or isinstance(precision, FP8Recipe):
        return precision
    if precision != "fp8":
        raise ValueError(f"precision: wanted None, 'fp8' or an FP8Recipe, got {precision!r}")
    return FP8Recipe()


@dataclass(frozen=True)
class FP8Products(Products):
    """h, y, dh and dx are in `dtype`; operands are cast from it, weights from their own dtype, at every call."""

    recipe: FP8Recipe

    def fc1_activation(
        self, x: Tensor, weight: Tensor, rows: Rows, bias: Tensor | None, probs: Tensor | None, activation: str
    ) -> tuple[Tensor, Tensor]:
        h = self._product(_gathered(x, rows.row_index), weight, rows, torch.float8_e4m3fn, self.dtype)
        return h, scaled_activation_op(h, probs, rows.starts, rows.ends, activation)

    def fc2(
        self, a: Tensor, weight: Tensor, rows: Rows, bias: Tensor | None, probs: Tensor | None, zero_gaps: bool
    ) -> Tensor:
        return self._product(a, weight, rows, torch.float8_e4m3fn, self.dtype)

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
        """da stays in fp32; a is rounded as in the forward."""
        dy = _gathered(dy, rows.row_index)
        da = self._product(dy, weight, rows, self.recipe.gradient_dtype, torch.float32, transpose=True)
        dh, a, dprobs = scaled_activation_backward_op(da, h, probs, rows.starts, rows.ends, activation)
        return dh, cast(a, self.dtype), dprobs

    def fc1_dgrad(self, dh: Tensor, weight: Tensor, rows: Rows, zero_gaps: bool) -> Tensor:
        return self._product(dh, weight, rows, self.recipe.gradient_dtype, self.dtype, transpose=True)

    def weight_gradient(
        self,
        left: Tensor,
        right: Tensor,
        rows: RowRanges,
        dtype: torch.dtype,
        left_index: Tensor | None = None,
        right_index: Tensor | None = None,
    ) -> WeightGradient:
        if not self.recipe.fp8_wgrad:
            return super().weight_gradient(left, right, rows, dtype, left_index, right_index)
        return FP8WeightGradient(left, right, rows, dtype, left_index, right_index, self.recipe)

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        rows: Rows,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        transpose: bool = False,
    ) -> Tensor:
        scales = self.recipe.power_of_two_scales
        w = quantize_blocks_op(weight, torch.float8_e4m3fn, scales, transpose)
        return m_grouped_gemm_fp8_op(
            *quantize_rows_op(x, dtype, scales), *w, rows.starts, rows.ends, out_dtype, rows.tiles
        )


@dataclass(frozen=True, slots=True, eq=False)
class FP8WeightGradient(WeightGradient):
    """Of operands that are cast when the gradient is computed; until then they wait as they are."""

    recipe: FP8Recipe = FP8Recipe()

    def compute(self) -> Tensor:
        return k_grouped_gemm_fp8_op(*self._operands(), self.rows.starts, self.rows.ends, self.dtype)

    def accumulate(self, total: Tensor) -> None:
        k_grouped_gemm_fp8_accumulate_op(total, *self._operands(), self.rows.starts, self.rows.ends)

    def _operands(self) -> tuple[Tensor, ...]:
        starts, ends, scales = self.rows.starts, self.rows.ends, self.recipe.power_of_two_scales
        left, right = _gathered(self.left, self.left_index), _gathered(self.right, self.right_index)
        return (
            *quantize_columns_op(left, starts, ends, self.recipe.gradient_dtype, scales),
            *quantize_columns_op(right, starts, ends, torch.float8_e4m3fn, scales),
        )


def _gathered(x: Tensor, row_index: Tensor | None) -> Tensor:
    return x if row_index is None else gather_rows_op(x, row_index)
