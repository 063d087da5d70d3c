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
    *tensors, ctx.transpose_w, _ = inputs
    ctx.save_for_backward(*tensors)


def _m_grouped_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, starts, ends, bias, bias_scale = ctx.saved_tensors
    need_x, need_w, _, _, need_bias, need_scale, *_ = ctx.needs_input_grad
    dx = dw = dbias = dscale = None
    if need_x:
        dx = m_grouped_gemm_op(dy, w, starts, ends, None, None, not ctx.transpose_w, None)
    if need_w:
        a, b = (dy, x) if ctx.transpose_w else (x, dy)
        dw = k_grouped_gemm_op(a, b, starts, ends, w.dtype)
    if need_bias:
        dbias = k_grouped_sum_op(dy, starts, ends, bias_scale, bias.dtype)
    if need_scale:  # a product with one column
        dtype = accumulation_dtype(dy.dtype)
        column = m_grouped_gemm_op(dy.to(dtype), bias[:, None, :].to(dtype), starts, ends, None, None, True, None)
        dscale = column[:, 0].to(bias_scale.dtype)
    return dx, dw, None, None, dbias, dscale, None, None


def _save_k_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _k_grouped_backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
    a, b, starts, ends = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    dc = dc.to(a.dtype)
    da = m_grouped_gemm_op(b, dc, starts, ends, None, None, True, None) if need_a else None
    db = m_grouped_gemm_op(a, dc, starts, ends, None, None, False, None) if need_b else None
    return da, db, None, None, None


define_gradient(m_grouped_gemm_op, _m_grouped_backward, _save_m_grouped)
define_gradient(k_grouped_gemm_op, _k_grouped_backward, _save_k_grouped)
