"""Blockwise casts to FP8: data, and an fp32 scale for every block, the number that stands for x being data * scale.

A scale is the largest |number| of its block over the largest of the dtype, with `power_of_two` up to the next power of
two (UE8M0), at least 2^-126; the data are x * (1 / scale), rounded to the nearest, ties to even. A block of zeros stays
exactly zero, one with NaN or infinity becomes NaN. Blocks are those of DeepSeek-V3 (arXiv 2412.19437, section 3.3):
1 x 128 of activations and gradients along what a product contracts, 128 x 128 of weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grouped_experts.ops.checks import check_device, check_float, check_rows, check_shape
from grouped_experts.ops.families import FP8, by_family
from grouped_experts.ops.reference.quantize import empty_blocks, empty_columns, empty_rows, num_blocks
from grouped_experts.registration import define_op, refuse_gradient
from grouped_experts.rows import RowRanges


class Quantized(NamedTuple):
    """data in FP8 and scales in fp32; the shapes are those of the cast that made them."""

    data: Tensor
    scales: Tensor


def quantize_rows(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    rows: RowRanges | None = None,
) -> Quantized:
    """Blocks of 128 numbers of a row: the operand of an m-grouped product.

    x (T, K) bf16 | fp16 | fp32 | fp64, any strides. dtype: float8_e4m3fn or float8_e5m2. power_of_two: scales of the
    next power of two. rows: of every expert; those of none are undefined then, and not read on a GPU.

    Returns data (T, K) and scales (T, ceil(K / 128)), which lie in memory column by column, each at a multiple of 16
    bytes. Not differentiable. Raises TypeError for a dtype, ValueError for a shape that does not fit.
    """
    _check(x, "(T, K)", 2, dtype)
    if rows is None:
        return Quantized(*quantize_rows_op(x, dtype, power_of_two))
    check_rows(rows, None, like=x)
    return Quantized(*quantize_rows_op(x, dtype, power_of_two, rows.starts, rows.ends))


def quantize_blocks(
    w: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False, transpose: bool = False
) -> Quantized:
    """Blocks of 128 x 128 numbers of every expert's weight.

    w (E, N, K) bf16 | fp16 | fp32 | fp64, any strides. transpose: the cast of w[e].T, what dgrad multiplies with; its
    blocks have the same scales. dtype, power_of_two: as in `quantize_rows`.

    Returns data (E, N, K) and scales (E, ceil(N / 128), ceil(K / 128)), with N and K exchanged if transposed. Not
    differentiable. Raises as `quantize_rows` does.
    """
    _check(w, "(E, N, K)", 3, dtype, "w")
    return Quantized(*quantize_blocks_op(w, dtype, power_of_two, transpose))


def quantize_columns(
    x: Tensor | Quantized, rows: RowRanges, *, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> Quantized:
    """Blocks of 128 rows of a column, anew from every expert's first row on: the operand of a k-grouped product.

    No scale crosses experts or is of rows of no expert. The data are transposed, so that what is contracted lies in one
    piece, and every expert's rows are filled up with zeros to a multiple of 128: those of expert e are P_e and on, P_e
    the sum of the counts before e, each rounded up. P = 128 (T // 128 + E) is room for any counts.

    x (T, K) bf16 | fp16 | fp32 | fp64, any strides; or a cast by rows, of which the numbers that it stands for are cast
    again. rows: the rows of every expert; those of none are not read. dtype, power_of_two: as in `quantize_rows`.

    Returns data (K, P) and scales (K, P / 128), which lie in memory as those of `quantize_rows`; both are undefined
    behind the last expert's. Not differentiable. Raises as `quantize_rows` does.
    """
    if isinstance(x, Quantized):
        check_rows_of_scales("x", x)
        check_fp8("dtype", dtype)
        check_rows(rows, None, like=x.data)
        return Quantized(*quantize_columns_op(x.data, rows.starts, rows.ends, dtype, power_of_two, x.scales))
    _check(x, "(T, K)", 2, dtype)
    check_rows(rows, None, like=x)
    return Quantized(*quantize_columns_op(x, rows.starts, rows.ends, dtype, power_of_two))


def quantize_rows_and_columns(
    x: Tensor, rows: RowRanges, *, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[Quantized, Quantized]:
    """`quantize_rows` and `quantize_columns` from one read of x (T, K); rows of no expert are undefined in the first.

    Raises as they do.
    """
    _check(x, "(T, K)", 2, dtype)
    check_rows(rows, None, like=x)
    data, scales, column_data, column_scales = quantize_rows_and_columns_op(
        x, rows.starts, rows.ends, dtype, power_of_two
    )
    return Quantized(data, scales), Quantized(column_data, column_scales)


def _check(x: Tensor, legend: str, dims: int, dtype: torch.dtype, name: str = "x") -> None:
    check_float(name, x)
    check_shape(name, x, (None,) * dims, legend)
    check_fp8("dtype", dtype)


def check_quantized(name: str, quantized: Quantized, dims: int, legend: str) -> None:
    if not isinstance(quantized, Quantized):
        raise TypeError(f"{name}: wanted a Quantized, got {type(quantized).__name__}")
    data, scales = quantized
    for part, tensor in (("data", data), ("scales", scales)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}.{part}: wanted a tensor, got {type(tensor).__name__}")
    if data.dtype not in FP8:
        raise TypeError(f"{name}.data: wanted dtype float8_e4m3fn or float8_e5m2, got {data.dtype}")
    check_shape(f"{name}.data", data, (None,) * dims, legend)
    if scales.dtype != torch.float32:
        raise TypeError(f"{name}.scales: wanted dtype float32, got {scales.dtype}")
    check_device(f"{name}.scales", scales, like=data)


def check_rows_of_scales(name: str, quantized: Quantized) -> None:
    """A cast by rows."""
    check_quantized(name, quantized, 2, "(T, K)")
    rows, columns = quantized.data.shape
    check_shape(f"{name}.scales", quantized.scales, (rows, num_blocks(columns)), "(T, ceil(K / 128))")


def check_fp8(name: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in FP8:
        raise TypeError(f"{name}: wanted float8_e4m3fn or float8_e5m2, got {dtype}")


quantize_rows_op = define_op(
    "quantize_rows(Tensor x, ScalarType dtype, bool power_of_two, Tensor? starts=None, Tensor? ends=None,"
    " Tensor? tiles=None, SymInt expected_rows=0) -> (Tensor, Tensor)",
    implementation=by_family("quantize_rows"),
    fake=lambda x, dtype, *_: empty_rows(x, dtype),
)
quantize_blocks_op = define_op(
    "quantize_blocks(Tensor w, ScalarType dtype, bool power_of_two, bool transpose) -> (Tensor, Tensor)",
    implementation=by_family("quantize_blocks"),
    fake=lambda w, dtype, power_of_two, transpose: empty_blocks(w, dtype, transpose),
)
quantize_columns_op = define_op(
    "quantize_columns(Tensor x, Tensor starts, Tensor ends, ScalarType dtype, bool power_of_two, Tensor? x_scales=None)"
    " -> (Tensor, Tensor)",
    implementation=by_family("quantize_columns"),
    fake=lambda x, starts, ends, dtype, power_of_two, *_: empty_columns(x, starts.shape[0], dtype),
)
quantize_rows_and_columns_op = define_op(
    "quantize_rows_and_columns(Tensor x, Tensor starts, Tensor ends, ScalarType dtype, bool power_of_two)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    implementation=by_family("quantize_rows_and_columns"),
    fake=lambda x, starts, ends, dtype, power_of_two: (
        *empty_rows(x, dtype),
        *empty_columns(x, starts.shape[0], dtype),
    ),
)
for op in (quantize_rows_op, quantize_blocks_op, quantize_columns_op, quantize_rows_and_columns_op):
    refuse_gradient(op)
