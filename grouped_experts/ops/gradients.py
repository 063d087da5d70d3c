"""Gradients of the grouped products.

Each is made of the other:

    y = x w^T      dx = dy w       dw = dy^T x     db_e = sum scale dy     dscale = dy . b_e
    c = a^T b      da = b dc^T     db = a dc
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grouped_experts.ops.k_grouped import k_grouped_gemm_op, k_grouped_sum_op
from grouped_experts.ops.m_grouped import m_grouped_gemm_op
from grouped_experts.ops.reference import accumulation_dtype
from grouped_experts.registration import define_gradient


def _save_m_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.transpose_w, _tiles, row_index, _zero_gaps, ctx.expected_rows = inputs
    ctx.save_for_backward(*tensors, row_index)


def _m_grouped_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, starts, ends, bias, bias_scale, row_index = ctx.saved_tensors
    need_x, need_w, _, _, need_bias, need_scale, *_ = ctx.needs_input_grad
    dx = dw = dbias = dscale = None
    if need_x:
        turned = not ctx.transpose_w
        dx = m_grouped_gemm_op(dy, w, starts, ends, None, None, turned, None, None, True, ctx.expected_rows)
        dx = _sum_rows(dx, row_index, x.shape[0])
    if need_w:
        if ctx.transpose_w:
            dw = k_grouped_gemm_op(dy, x, starts, ends, w.dtype, None, row_index)
        else:
            dw = k_grouped_gemm_op(x, dy, starts, ends, w.dtype, row_index, None)
    if need_bias:
        dbias = k_grouped_sum_op(dy, starts, ends, bias_scale, bias.dtype)
    if need_scale:  # a product with one column
        dtype = accumulation_dtype(dy.dtype)
        column = m_grouped_gemm_op(dy.to(dtype), bias[:, None, :].to(dtype), starts, ends, None, None, True, None)
        dscale = column[:, 0].to(bias_scale.dtype)
    return dx, dw, None, None, dbias, dscale, None, None, None, None, None


def _sum_rows(rows: Tensor, row_index: Tensor | None, num_rows: int) -> Tensor:
    """The adjoint of a row index: out[i] = sum of the rows r with row_index[r] = i, rounded once.

    In the order of the rows: index_add is serial on a CPU only, index_put on a GPU only, where it sorts.
    """
    if row_index is None:
        return rows
    out = rows.new_zeros(num_rows, rows.shape[1], dtype=accumulation_dtype(rows.dtype))
    if num_rows:
        index = row_index.clamp(0, num_rows - 1).long()  # rows of no expert are zero
        if out.device.type == "cpu":
            out.index_add_(0, index, rows.to(out.dtype))
        else:
            out.index_put_((index,), rows.to(out.dtype), accumulate=True)
    return out.to(rows.dtype)


def _save_k_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, starts, ends, _out_dtype, a_index, b_index = inputs
    ctx.save_for_backward(a, b, starts, ends, a_index, b_index)


def _k_grouped_backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
    a, b, starts, ends, a_index, b_index = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    dc = dc.to(a.dtype)
    da = db = None
    if need_a:
        da = m_grouped_gemm_op(b, dc, starts, ends, None, None, True, None, b_index)
        da = _sum_rows(da, a_index, a.shape[0])
    if need_b:
        db = m_grouped_gemm_op(a, dc, starts, ends, None, None, False, None, a_index)
        db = _sum_rows(db, b_index, b.shape[0])
    return da, db, None, None, None, None, None


define_gradient(m_grouped_gemm_op, _m_grouped_backward, _save_m_grouped)
define_gradient(k_grouped_gemm_op, _k_grouped_backward, _save_k_grouped)
