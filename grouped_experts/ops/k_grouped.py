"""k-grouped GEMM: every expert contracts its own rows. Weight gradients ("tn")."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.checks import (
    FLOATS,
    check_device,
    check_float,
    check_matrix,
    check_row_index,
    check_row_vector,
    check_rows,
    check_shape,
)
from grouped_experts.ops.families import by_family
from grouped_experts.registration import define_op, refuse_gradient
from grouped_experts.rows import RowRanges, num_rows


def k_grouped_gemm(
    a: Tensor,
    b: Tensor,
    rows: RowRanges,
    *,
    out_dtype: torch.dtype | None = None,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> Tensor:
    """c[e] = a[r].T @ b[r], contracted over the rows r of expert e; exact zeros for an expert without rows.

    a (T, M), b (T, N) in one dtype of bf16 | fp16 | fp32 | fp64, any strides. Rows of no expert are not read.
    out_dtype: the dtype of c, by default that of a.
    a_index, b_index (R,) int32, contiguous: which row of a, of b, is contracted as row r, as row_index in
    `m_grouped_gemm`; rows are of R rows then, as is what has no index.

    Returns c (E, M, N), accumulated in fp32 (fp64 for fp64), rounded once. Differentiable in a and b.
    Raises ValueError for a shape or device, TypeError for a dtype that does not fit.
    """
    _check_operands(a, b, rows, a_index, b_index)
    out_dtype = a.dtype if out_dtype is None else out_dtype
    _check_out_dtype(out_dtype)
    return k_grouped_gemm_op(a, b, rows.starts, rows.ends, out_dtype, a_index, b_index)


def k_grouped_gemm_accumulate(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    rows: RowRanges,
    *,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> None:
    """c[e] += a[r].T @ b[r], contracted over the rows r of expert e; an expert without rows leaves c[e] as it is.

    Product and sum are in fp32 (fp64 for fp64), rounded once to the dtype of c.

    c (E, M, N) in any floating dtype and of any strides without overlap, changed in place. a (T, M), b (T, N) in one
    dtype. a_index, b_index: as in `k_grouped_gemm`. Returns nothing. Not differentiable: c must not require a gradient.
    Raises as `k_grouped_gemm` does.
    """
    _check_operands(a, b, rows, a_index, b_index)
    check_float("c", c)
    check_shape("c", c, (rows.num_experts, a.shape[1], b.shape[1]), "(E, M, N)")
    check_device("c", c, like=a)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (a, b, c)):
        raise ValueError(
            "k_grouped_gemm_accumulate: wanted tensors without requires_grad (or torch.no_grad()), got one with it"
        )
    k_grouped_gemm_accumulate_op(c, a, b, rows.starts, rows.ends, a_index, b_index)


def k_grouped_sum(
    a: Tensor,
    rows: RowRanges,
    *,
    scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    row_index: Tensor | None = None,
) -> Tensor:
    """c[e] = sum of scale[r] * a[r] over the rows r of expert e; exact zeros for an expert without rows.

    a (T, N); scale (T,) in any floating dtype, ones if not given. The gradient of a bias.
    row_index (R,) int32: as in `m_grouped_gemm`, a[row_index[r]] is row r; scale (R,) then.
    Returns c (E, N) in out_dtype (by default that of a), summed in fp32 (fp64 for fp64). Not differentiable.
    Raises as `k_grouped_gemm` does.
    """
    check_float("a", a)
    check_shape("a", a, (None, None), "(T, N)")
    check_rows(rows, None, like=a)
    if row_index is not None:
        check_row_index("row_index", row_index, a, rows)
    if scale is not None:
        check_row_vector("scale", scale, num_rows(a, row_index), like=a)
    out_dtype = a.dtype if out_dtype is None else out_dtype
    _check_out_dtype(out_dtype)
    if torch.is_grad_enabled() and (a.requires_grad or (scale is not None and scale.requires_grad)):
        raise ValueError("k_grouped_sum: wanted tensors without requires_grad (or torch.no_grad()), got one with it")
    return k_grouped_sum_op(a, rows.starts, rows.ends, scale, out_dtype, row_index)


def _check_operands(a: Tensor, b: Tensor, rows: RowRanges, a_index: Tensor | None, b_index: Tensor | None) -> None:
    check_float("a", a)
    check_shape("a", a, (None, None), "(T, M)")
    check_rows(rows, None, like=a)
    if a_index is not None:
        check_row_index("a_index", a_index, a, rows)
    contracted = num_rows(a, a_index)
    if b_index is None:
        check_matrix("b", b, (contracted, None), "(T, N)", like=a)
    else:
        check_matrix("b", b, (None, None), "(T, N)", like=a)
        check_row_index("b_index", b_index, b, rows)
        check_shape("b_index", b_index, (contracted,), "(R,)")


def _check_out_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise TypeError(f"out_dtype: wanted one of {', '.join(map(str, FLOATS))}, got {dtype}")


k_grouped_gemm_op = define_op(
    "k_grouped_gemm(Tensor a, Tensor b, Tensor starts, Tensor ends, ScalarType out_dtype, Tensor? a_index=None,"
    " Tensor? b_index=None) -> Tensor",
    implementation=by_family("k_grouped_gemm"),
    fake=lambda a, b, starts, ends, out_dtype, *_: a.new_empty(
        starts.shape[0], a.shape[1], b.shape[1], dtype=out_dtype
    ),
)
k_grouped_gemm_accumulate_op = define_op(
    "k_grouped_gemm_accumulate(Tensor(a!) c, Tensor a, Tensor b, Tensor starts, Tensor ends, Tensor? a_index=None,"
    " Tensor? b_index=None) -> ()",
    implementation=by_family("k_grouped_gemm_accumulate", operands=2),
    fake=lambda c, a, b, starts, ends, *_: None,
)
k_grouped_sum_op = define_op(
    "k_grouped_sum(Tensor a, Tensor starts, Tensor ends, Tensor? scale, ScalarType out_dtype, Tensor? row_index=None)"
    " -> Tensor",
    implementation=by_family("k_grouped_sum"),
    fake=lambda a, starts, ends, scale, out_dtype, *_: a.new_empty(starts.shape[0], a.shape[1], dtype=out_dtype),
)
refuse_gradient(k_grouped_sum_op)
