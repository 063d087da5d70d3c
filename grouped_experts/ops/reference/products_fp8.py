"""Grouped products of FP8 numbers with scales: as those of the numbers that they stand for, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.host_ranges import host_ranges
from grouped_experts.ops.reference.products import row_product
from grouped_experts.ops.reference.quantize import dequantize_blocks, dequantize_rows
from grouped_experts.rows import FP8_BLOCK as BLOCK
from grouped_experts.rows import INT32_MAX


def m_grouped_gemm_fp8(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
) -> Tensor:
    """y[r] = x[r] @ w[e].T for the rows r of expert e; zero for rows of none."""
    x, w = dequantize_rows(x, x_scales), dequantize_blocks(w, w_scales)
    return row_product(x, w.transpose(1, 2), host_ranges(starts, ends, x.shape[0]), torch.float32).to(out_dtype)


def k_grouped_gemm_fp8(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, starts: Tensor, ends: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """c[e] = a of expert e @ (b of expert e).T, of column-wise casts; exact zeros for an expert without rows."""
    c = torch.zeros(starts.shape[0], a.shape[0], b.shape[0], device=a.device)
    k_grouped_gemm_fp8_accumulate(c, a, a_scales, b, b_scales, starts, ends)
    return c.to(out_dtype)


def k_grouped_gemm_fp8_accumulate(
    c: Tensor, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, starts: Tensor, ends: Tensor
) -> None:
    """c[e] += a of expert e @ (b of expert e).T, in fp32."""
    # Which rows they were is not known here, but more than P there cannot have been.
    bounds = host_ranges(starts, ends, INT32_MAX).bounds
    needed = sum(-(-(end - start) // BLOCK) for start, end in bounds)
    if needed > a_scales.shape[1]:
        raise ValueError(f"rows: wanted at most {a_scales.shape[1]} blocks of {BLOCK} rows, got {needed}")
    block = 0
    for expert, (start, end) in zip(c.unbind(), bounds, strict=True):
        behind = block + -(-(end - start) // BLOCK)
        rows, blocks = slice(BLOCK * block, BLOCK * behind), slice(block, behind)
        left = dequantize_rows(a[:, rows], a_scales[:, blocks])
        right = dequantize_rows(b[:, rows], b_scales[:, blocks])
        expert.add_(left @ right.t())
        block = behind
