"""FP4 weights for inference: e2m1 numbers with a scale for every 32, and their product with rows in FP8.

The number that stands for w is number * scale. A scale is the next power of two of the largest |number| of its block
over 6, the largest of e2m1, at least 2^-126, so that nothing is clipped; the numbers are w / scale, rounded to the
nearest, ties to an even mantissa. A block of zeros stays exactly zero, one with NaN or infinity becomes NaN as a whole;
signs are kept, those of zeros too. In memory both are as the OCP's MXFP4 and gpt-oss's checkpoints have them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grouped_experts.ops.checks import (
    FLOATS,
    check_device,
    check_expected_rows,
    check_float,
    check_rows,
    check_shape,
)
from grouped_experts.ops.families import by_family
from grouped_experts.ops.products_fp8 import check_half_or_float
from grouped_experts.ops.quantize import Quantized, check_rows_of_scales
from grouped_experts.ops.reference import fp4 as reference
from grouped_experts.registration import define_op, refuse_gradient
from grouped_experts.rows import FP4_BLOCK, RowRanges


class QuantizedFP4(NamedTuple):
    """data uint8 (E, N, K / 2), two e2m1 numbers a byte, that of the even column in its low four bits.

    scales uint8 (E, N, K / 32), UE8M0: byte b is 2^(b - 127), 255 is NaN. Tensors of torch's own dtypes for them are
    bytes with `.view(torch.uint8)`.
    """

    data: Tensor
    scales: Tensor


def quantize_fp4(w: Tensor) -> QuantizedFP4:
    """Blocks of 32 numbers of a row of every expert's weight.

    w (E, N, K) bf16 | fp16 | fp32 | fp64, any strides; K a multiple of 32. It is cast from fp32: numbers of fp64 beyond
    that are NaN, and those of fp32 from 7 * 2^125 on stand for 2^128.

    In plain torch on every device, with room for some copies of one expert's weight in fp32: a weight is cast once.
    Not differentiable. Raises TypeError for a dtype, ValueError for a shape that does not fit.
    """
    check_float("w", w)
    check_shape("w", w, (None, None, None), "(E, N, K)")
    if w.shape[2] % FP4_BLOCK:
        raise ValueError(f"w: wanted (E, N, K) with K a multiple of {FP4_BLOCK}, got {tuple(w.shape)}")
    return QuantizedFP4(*reference.quantize_fp4(w.detach()))


def dequantize_fp4(w: QuantizedFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers (E, N, K) that w stands for, in bf16 | fp16 | fp32 | fp64.

    All are numbers of bf16 and of fp32, but for those from 2^128 on, which are infinite there. Raises as
    `quantize_fp4` does.
    """
    _check_fp4("w", w)
    if dtype not in FLOATS:
        raise TypeError(f"dtype: wanted one of {', '.join(map(str, FLOATS))}, got {dtype}")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return reference.dequantize_fp4(*w, wide).to(dtype)


def m_grouped_gemm_fp8_fp4(
    x: Quantized,
    w: QuantizedFP4,
    rows: RowRanges,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    expected_rows: int | None = None,
) -> Tensor:
    """y[r] = x[r] @ w[e].T for the rows r of expert e, of the numbers that x and w stand for; zero for rows of none.

    x: of `quantize_rows`, data (T, K) e4m3 or e5m2, scales (T, ceil(K / 128)) fp32. w: of `quantize_fp4`, or as it
    makes them, data (E, N, K / 2), scales (E, N, K / 32). rows: the rows of every expert. Any strides.
    expected_rows: as in `m_grouped_gemm`.

    Returns y (T, N) in out_dtype, every 128 of K summed by itself, scaled by x's scale and then summed in fp32. On a
    GPU a block's sum must be a number of fp32 before x's scale too. Not differentiable.
    Raises ValueError for a shape or device, TypeError for a dtype that does not fit.
    """
    check_rows_of_scales("x", x)
    _check_fp4("w", w)
    experts, _, half = w.data.shape
    check_shape("x.data", x.data, (None, 2 * half), "(T, K)")
    for name, tensor in (("w.data", w.data), ("w.scales", w.scales)):
        check_device(name, tensor, like=x.data)
    check_rows(rows, experts, like=x.data)
    check_half_or_float("out_dtype", out_dtype)
    expected = check_expected_rows(expected_rows)
    return m_grouped_gemm_fp8_fp4_op(*x, *w, rows.starts, rows.ends, out_dtype, None, expected)


def _check_fp4(name: str, quantized: QuantizedFP4) -> None:
    if not isinstance(quantized, QuantizedFP4):
        raise TypeError(f"{name}: wanted a QuantizedFP4, got {type(quantized).__name__}")
    for part, tensor in zip(quantized._fields, quantized, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}.{part}: wanted a tensor, got {type(tensor).__name__}")
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name}.{part}: wanted dtype uint8, got {tensor.dtype}")
    data, scales = quantized
    check_shape(f"{name}.data", data, (None, None, None), "(E, N, K / 2)")
    experts, columns, half = data.shape
    if 2 * half % FP4_BLOCK:
        raise ValueError(f"{name}.data: wanted (E, N, K / 2) with K a multiple of {FP4_BLOCK}, got {tuple(data.shape)}")
    check_shape(f"{name}.scales", scales, (experts, columns, 2 * half // FP4_BLOCK), "(E, N, K / 32)")
    check_device(f"{name}.scales", scales, like=data)


m_grouped_gemm_fp8_fp4_op = define_op(
    "m_grouped_gemm_fp8_fp4(Tensor x, Tensor x_scales, Tensor w, Tensor w_scales, Tensor starts, Tensor ends,"
    " ScalarType out_dtype, Tensor? tiles=None, SymInt expected_rows=0) -> Tensor",
    implementation=by_family("m_grouped_gemm_fp8_fp4"),
    fake=lambda x, x_scales, w, w_scales, starts, ends, out_dtype, *_: x.new_empty(
        x.shape[0], w.shape[1], dtype=out_dtype
    ),
)
refuse_gradient(m_grouped_gemm_fp8_fp4_op)
