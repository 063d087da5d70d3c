"""Grouped products of floating-point numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from grouped_experts.ops.host_ranges import HostRanges, host_ranges


def gather_rows(x: Tensor, row_index: Tensor | None) -> Tensor:
    """x[row_index[r]] as row r; indices are clamped into x, since those of no expert's rows may be anything."""
    if row_index is None:
        return x
    if x.shape[0] == 0:
        return x.new_zeros(row_index.shape[0], x.shape[1])
    return x.index_select(0, row_index.clamp(0, x.shape[0] - 1))


def row_product(x: Tensor, w: Tensor, ranges: HostRanges, dtype: torch.dtype) -> Tensor:
    """y[r] = x[r] @ w[e] for the rows r of expert e, zero for rows of no expert; w (E, K, N), computed in `dtype`.

    The three ways are one product, fastest first: `bmm` where all experts have as many rows, else `grouped_mm` where
    it may run, else a loop.
    """
    exact = x.dtype == dtype
    if exact and ranges.even is None and ranges.offs is not None and suits_grouped_mm(w.shape[2], x, w):
        y = F.grouped_mm(x, w, offs=ranges.offs.to(x.device))
        ranges.zero_gaps(y)
        return y
    y = x.new_empty(x.shape[0], w.shape[2], dtype=dtype)
    ranges.zero_gaps(y)
    if exact and ranges.even is not None:
        torch.bmm(ranges.batch(x), w, out=ranges.batch(y))
        return y
    for rows, expert, product in zip(ranges.cut(x), w.unbind(), ranges.cut(y), strict=True):
        if rows.shape[0]:
            torch.mm(rows.to(dtype), expert.to(dtype), out=product)
    return y


def suits_grouped_mm(columns: int, *operands: Tensor) -> bool:
    """What F.grouped_mm asks for: no fp64, operands with something in them, 16-byte strides and base, a unit stride."""

    def suits(t: Tensor) -> bool:
        *outer, rows, columns = t.stride()
        pitch, least = (rows, t.shape[-1]) if columns == 1 else (columns, t.shape[-2])
        aligned = all(stride * t.element_size() % 16 == 0 for stride in (*outer, pitch)) and t.data_ptr() % 16 == 0
        return aligned and 1 in (rows, columns) and pitch >= least

    whole = columns * operands[0].element_size() % 16 == 0  # else its output comes with padded rows
    return whole and operands[0].dtype != torch.float64 and all(t.numel() > 0 and suits(t) for t in operands)


def m_grouped_gemm(
    x: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    transpose_w: bool,
    tiles: Tensor | None = None,
    row_index: Tensor | None = None,
    zero_gaps: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    """y[r] = x[r] @ w[e].T (or @ w[e]) + bias_scale[r] * bias[e] for the rows r of expert e; zero for rows of none."""
    x = gather_rows(x, row_index)
    ranges = host_ranges(starts, ends, x.shape[0])
    w = w.transpose(1, 2) if transpose_w else w
    if bias is None:
        return row_product(x, w, ranges, x.dtype)
    y = row_product(x, w, ranges, accumulation_dtype(x.dtype))
    products = ranges.cut(y)
    scales = None if bias_scale is None else ranges.cut(bias_scale.to(y.dtype)[:, None])
    for e, expert_bias in enumerate(bias.to(y.dtype).unbind()):
        products[e].add_(expert_bias if scales is None else scales[e] * expert_bias)
    return y.to(x.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def k_grouped_gemm(
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> Tensor:
    """c[e] = a[r].T @ b[r] over the rows r of expert e; exact zeros for an expert without rows."""
    a, b = gather_rows(a, a_index), gather_rows(b, b_index)
    ranges = host_ranges(starts, ends, a.shape[0])
    exact = a.dtype == out_dtype
    if exact and ranges.even is not None:
        return torch.bmm(ranges.batch(a).transpose(1, 2), ranges.batch(b))
    if exact and len(ranges) and ranges.offs is not None and suits_grouped_mm(b.shape[1], a, b):
        return F.grouped_mm(a.t(), b, offs=ranges.offs.to(a.device))
    c = a.new_empty(len(ranges), a.shape[1], b.shape[1], dtype=out_dtype)
    dtype = torch.promote_types(a.dtype, out_dtype)
    for left, right, expert in zip(ranges.cut(a), ranges.cut(b), c.unbind(), strict=True):
        if not left.shape[0]:
            expert.zero_()
        elif exact:
            torch.mm(left.t(), right, out=expert)
        else:
            expert.copy_(torch.mm(left.to(dtype).t(), right.to(dtype)))
    return c


def k_grouped_gemm_accumulate(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> None:
    """c[e] += a[r].T @ b[r] over the rows r of expert e."""
    a, b = gather_rows(a, a_index), gather_rows(b, b_index)
    ranges = host_ranges(starts, ends, a.shape[0])
    dtype = accumulation_dtype(torch.promote_types(a.dtype, c.dtype))
    for left, right, expert in zip(ranges.cut(a), ranges.cut(b), c.unbind(), strict=True):
        if left.shape[0]:
            expert += torch.mm(left.to(dtype).t(), right.to(dtype))


def k_grouped_sum(
    a: Tensor,
    starts: Tensor,
    ends: Tensor,
    scale: Tensor | None,
    out_dtype: torch.dtype,
    row_index: Tensor | None = None,
) -> Tensor:
    """c[e] = sum of scale[r] * a[r] over the rows r of expert e."""
    a = gather_rows(a, row_index)
    ranges = host_ranges(starts, ends, a.shape[0])
    c = a.new_empty(len(ranges), a.shape[1], dtype=out_dtype)
    dtype = accumulation_dtype(a.dtype)
    scales = None if scale is None else ranges.cut(scale.to(dtype)[:, None])
    for e, (rows, expert) in enumerate(zip(ranges.cut(a), c.unbind(), strict=True)):
        rows = rows.to(dtype)
        expert.copy_((rows if scales is None else rows * scales[e]).sum(0))
    return c
