"""The layer's products in blockwise FP8."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from grouped_experts.nn.deferred import Gradient
from grouped_experts.nn.products import Products, Rows, Wanted, cast
from grouped_experts.ops.activation import scaled_activation_backward_op
from grouped_experts.ops.families import knows_fp8
from grouped_experts.ops.fused_fp8 import fc1_activation_fp8_op, fc2_dgrad_activation_fp8_op
from grouped_experts.ops.permute import gather_rows_op
from grouped_experts.ops.products_fp8 import (
    k_grouped_gemm_fp8_accumulate_op,
    k_grouped_gemm_fp8_op,
    m_grouped_gemm_fp8_op,
)
from grouped_experts.ops.quantize import (
    Quantized,
    check_fp8,
    quantize_blocks_op,
    quantize_columns_op,
    quantize_rows_and_columns_op,
    quantize_rows_op,
)
from grouped_experts.ops.reference.fused_fp8 import dtype_of_da
from grouped_experts.ops.reference.quantize import dequantize_rows
from grouped_experts.rows import RowRanges

E4M3 = torch.float8_e4m3fn  # of activations and weights


@dataclass(frozen=True)
class FP8Recipe:
    """How a layer computes in FP8: DeepSeek-V3's blocks of 128 (`grouped_experts.ops.quantize`).

    power_of_two_scales: scales of the next power of two (UE8M0), else any fp32 number.
    gradient_dtype: of dy and dh, float8_e4m3fn or float8_e5m2. Activations and weights are e4m3.
    fp8_wgrad: weight gradients in FP8 as well, else in the dtype of x.
    emulate: on a GPU below sm_89, which has no FP8, compute in fp32 with the rounded numbers, waiting for the GPU; as a
    CPU always does, but for the waiting.

    Raises TypeError for a gradient_dtype that is none of the two, and for a choice that is no bool.
    """

    power_of_two_scales: bool = False
    gradient_dtype: torch.dtype = torch.float8_e4m3fn
    fp8_wgrad: bool = True
    emulate: bool = False

    def __post_init__(self) -> None:
        check_fp8("gradient_dtype", self.gradient_dtype)
        for name in ("power_of_two_scales", "fp8_wgrad", "emulate"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"{name}: wanted a bool, got {getattr(self, name)!r}")

    def products(
        self, device: torch.device, dtype: torch.dtype, weights: QuantizedWeights | None = None, expected_rows: int = 0
    ) -> FP8Products:
        """On that device, with weights that are cast already or are to be; expected_rows as in `Products`.

        Raises TypeError for fp64, RuntimeError for a GPU without FP8 unless `emulate` says so.
        """
        if dtype == torch.float64:
            raise TypeError("x: wanted a dtype of bfloat16, float16, float32 for products in FP8, got float64")
        if not (self.emulate or knows_fp8(device)):
            name = torch.cuda.get_device_name(device)
            raise RuntimeError(
                f"precision: wanted a GPU with FP8 (sm_89 or later) or FP8Recipe(emulate=True), got {name}"
            )
        # By name, as Dynamo of PyTorch 2.11 binds what is not wrongly beside a field that is keyword only.
        return FP8Products(dtype=dtype, recipe=self, weights=weights, expected_rows=expected_rows)


def recipe_of(precision: object) -> FP8Recipe | None:
    if precision is None or isinstance(precision, FP8Recipe):
        return precision
    if not isinstance(precision, str) or precision != "fp8":
        raise ValueError(f"precision: wanted None, 'fp8' or an FP8Recipe, got {precision!r}")
    return FP8Recipe()


class QuantizedWeights(NamedTuple):
    """The casts of a layer's weights, of `GroupedMLP.quantize_weights`: as forward and, transposed, as dgrad take them.

    They stay what they are until they are told otherwise.
    """

    fc1_weight: Quantized
    fc1_weight_transposed: Quantized
    fc2_weight: Quantized
    fc2_weight_transposed: Quantized


@torch.no_grad()
def quantize_weights(fc1_weight: Tensor, fc2_weight: Tensor, recipe: FP8Recipe) -> QuantizedWeights:
    return QuantizedWeights(
        *(
            Quantized(*quantize_blocks_op(weight, E4M3, recipe.power_of_two_scales, transpose))
            for weight in (fc1_weight, fc2_weight)
            for transpose in (False, True)
        )
    )


class Columns(NamedTuple):
    """An operand of a weight gradient that is cast by columns already, its rows in the experts' order."""

    data: Tensor
    scales: Tensor


class Casts(NamedTuple):
    """dh for dgrad and for wgrad."""

    by_rows: Quantized
    by_columns: Columns


Operand = Tensor | Quantized | Columns  # a Quantized is cast by rows


@dataclass(frozen=True)
class FP8Products(Products):
    """h, y and dx are in `dtype`; operands are cast from it, weights from their own dtype, at every call.

    weights: the weights' casts, to be taken instead. x may be a Quantized; a leaves fc1 as one, and what wgrad takes in
    FP8 leaves fc2's dgrad as `Columns`, dh as `Casts`. With an index dy stays as it is, since it would be copied for
    every choice of a token.
    """

    recipe: FP8Recipe
    weights: QuantizedWeights | None = None
    copies_rows: ClassVar[bool] = True

    def fc1_activation(
        self,
        x: Tensor | Quantized,
        weight: Tensor,
        rows: Rows,
        bias: Tensor | None,
        probs: Tensor | None,
        activation: str,
    ) -> tuple[Tensor, Quantized]:
        scales = self.recipe.power_of_two_scales
        if not isinstance(x, Quantized):
            x = self._by_rows(x, E4M3, rows if rows.row_index is None else None)
        x = _gathered(x, rows.row_index)
        operands = *x, *self._weight("fc1_weight", weight)
        h, *a = fc1_activation_fp8_op(
            *operands, rows.starts, rows.ends, probs, activation, self.dtype, scales, rows.tiles, self.expected_rows
        )
        return h, Quantized(*a)

    def fc2(
        self, a: Quantized, weight: Tensor, rows: Rows, bias: Tensor | None, probs: Tensor | None, zero_gaps: bool
    ) -> Tensor:
        return self._fp8_product(a, self._weight("fc2_weight", weight), rows, self.dtype)

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
    ) -> tuple[Operand, Tensor | Casts, Operand, Tensor]:
        """da is in `dtype_of_da`; a is rounded as in the forward."""
        dtype, scales, (starts, ends, tiles, index) = self.recipe.gradient_dtype, self.recipe.power_of_two_scales, rows
        left: Operand = dy
        if wanted.fc2_weight and self.recipe.fp8_wgrad and index is None:
            *by_rows, data, column_scales = quantize_rows_and_columns_op(dy, starts, ends, dtype, scales)
            left = Columns(data, column_scales)
        else:
            by_rows = _gathered(self._by_rows(dy, dtype, rows if index is None else None), index)
        w = self._weight("fc2_weight", weight, transpose=True)
        if not self.recipe.fp8_wgrad and (wanted.fc1_weight or wanted.fc2_weight):
            da = self._fp8_product(by_rows, w, rows, dtype_of_da(h))
            dh, a, dprobs = scaled_activation_backward_op(da, h, probs, starts, ends, activation)
            return dy, dh, cast(a, self.dtype), dprobs
        needed = wanted.x, wanted.fc1_weight, wanted.fc2_weight, wanted.probs
        *made, dprobs = fc2_dgrad_activation_fp8_op(
            *by_rows, *w, h, starts, ends, probs, activation, dtype, scales, *needed, tiles, self.expected_rows
        )
        return left, Casts(Quantized(*made[:2]), Columns(*made[2:4])), Columns(*made[4:]), dprobs

    def fc1_dgrad(self, dh: Tensor | Casts, weight: Tensor, rows: Rows, zero_gaps: bool) -> Tensor:
        operand = dh.by_rows if isinstance(dh, Casts) else self._by_rows(dh, self.recipe.gradient_dtype, rows)
        return self._fp8_product(operand, self._weight("fc1_weight", weight, transpose=True), rows, self.dtype)

    def weight_gradient(
        self,
        left: Operand | Casts,
        right: Operand,
        rows: RowRanges,
        dtype: torch.dtype,
        left_index: Tensor | None = None,
        right_index: Tensor | None = None,
    ) -> Gradient:
        if not self.recipe.fp8_wgrad:
            right = dequantize_rows(*right).to(self.dtype) if isinstance(right, Quantized) else right
            return super().weight_gradient(left, right, rows, dtype, left_index, right_index)
        left = left.by_columns if isinstance(left, Casts) else left
        return FP8WeightGradient(left, right, rows, dtype, left_index, right_index, self.recipe)

    def _by_rows(self, x: Tensor, dtype: torch.dtype, rows: Rows | None) -> Quantized:
        """Of experts' rows, or of all, as of tokens, before they are gathered."""
        scales = self.recipe.power_of_two_scales
        if rows is None:
            return Quantized(*quantize_rows_op(x, dtype, scales))
        return Quantized(*quantize_rows_op(x, dtype, scales, rows.starts, rows.ends, rows.tiles, self.expected_rows))

    def _weight(self, name: str, weight: Tensor, transpose: bool = False) -> Quantized:
        if self.weights is not None:
            cast_already: Quantized = getattr(self.weights, f"{name}_transposed" if transpose else name)
            return cast_already
        return Quantized(*quantize_blocks_op(weight, E4M3, self.recipe.power_of_two_scales, transpose))

    def _fp8_product(self, x: Quantized, w: Quantized, rows: Rows, out_dtype: torch.dtype) -> Tensor:
        return m_grouped_gemm_fp8_op(*x, *w, rows.starts, rows.ends, out_dtype, rows.tiles, self.expected_rows)


@dataclass(frozen=True, slots=True, eq=False)
class FP8WeightGradient:
    """`WeightGradient` of operands in FP8; those that are not cast yet are when it is computed."""

    left: Operand
    right: Operand
    rows: RowRanges
    dtype: torch.dtype
    left_index: Tensor | None
    right_index: Tensor | None
    recipe: FP8Recipe

    def compute(self) -> Tensor:
        return k_grouped_gemm_fp8_op(*self._operands(), self.rows.starts, self.rows.ends, self.dtype)

    def accumulate(self, total: Tensor) -> None:
        k_grouped_gemm_fp8_accumulate_op(total, *self._operands(), self.rows.starts, self.rows.ends)

    def tensors(self) -> tuple[Tensor, ...]:
        operands = ((each,) if isinstance(each, Tensor) else each for each in (self.left, self.right))
        indices = (index for index in (self.left_index, self.right_index) if index is not None)
        return *itertools.chain(*operands), self.rows.starts, self.rows.ends, *indices

    def _operands(self) -> tuple[Tensor, ...]:
        left = self._columns(self.left, self.left_index, self.recipe.gradient_dtype)
        return *left, *self._columns(self.right, self.right_index, E4M3)

    def _columns(self, operand: Operand, index: Tensor | None, dtype: torch.dtype) -> Columns:
        if isinstance(operand, Columns):
            return operand
        operand = _gathered(operand, index)
        x, x_scales = operand if isinstance(operand, Quantized) else (operand, None)
        starts, ends, scales = self.rows.starts, self.rows.ends, self.recipe.power_of_two_scales
        return Columns(*quantize_columns_op(x, starts, ends, dtype, scales, x_scales))


def _gathered(x: Tensor | Quantized, row_index: Tensor | None) -> Tensor | Quantized:
    if row_index is None:
        return x
    if isinstance(x, Tensor):
        return gather_rows_op(x, row_index)
    bits = gather_rows_op(x.data.view(torch.uint8), row_index)
    return Quantized(bits.view(x.data.dtype), gather_rows_op(x.scales, row_index))
