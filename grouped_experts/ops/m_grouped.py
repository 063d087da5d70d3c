"""m-grouped GEMM: every expert multiplies its own rows with its own weight. Forward ("nt") and dgrad ("nn")."""

from __future__ import annotations

from torch import Tensor

from grouped_experts.ops.checks import (
    check_expected_rows,
    check_float,
    check_matrix,
    check_row_index,
    check_row_vector,
    check_rows,
    check_shape,
)
from grouped_experts.ops.families import by_family
from grouped_experts.registration import define_op
from grouped_experts.rows import RowRanges, num_rows


def m_grouped_gemm(
    x: Tensor,
    w: Tensor,
    rows: RowRanges,
    bias: Tensor | None = None,
    *,
    bias_scale: Tensor | None = None,
    transpose_w: bool = True,
    row_index: Tensor | None = None,
    expected_rows: int | None = None,
) -> Tensor:
    """y[r] = x[r] @ w[e].T (+ bias_scale[r] * bias[e]) for every row r of expert e; zero for rows of no expert.

    x (T, K) bf16 | fp16 | fp32 | fp64, any strides.
    w (E, N, K) in the dtype of x ("nt"), or with transpose_w=False (E, K, N), y[r] = x[r] @ w[e] ("nn").
    rows: the rows of every expert.
    bias (E, N) in the dtype of x; bias_scale (T,) in any floating dtype, ones if not given.
    row_index (R,) int32, contiguous: which row of x is multiplied as row r, y[r] = x[row_index[r]] @ w[e].T. Then rows,
    bias_scale and y are of R rows. Of rows of no expert it may be anything. Indices that leave x raise ValueError on
    the CPU; on a device they are not read on the host, and such a row is undefined.
    expected_rows: how many rows an expert will have on average, for the choice of tiles; T / E if not given, which is
    too many where rows are mostly unused, as in a masked buffer. Whatever it says, y is right.

    Returns y (T, N) in the dtype of x, accumulated in fp32 (fp64 for fp64), rounded once. Differentiable in x, w, bias
    and bias_scale. Raises ValueError for a shape or device, TypeError for a dtype that does not fit.
    """
    check_float("x", x)
    check_shape("x", x, (None, None), "(T, K)")
    columns = x.shape[1]
    if transpose_w:
        check_matrix("w", w, (None, None, columns), "(E, N, K)", like=x)
    else:
        check_matrix("w", w, (None, columns, None), "(E, K, N)", like=x)
    check_rows(rows, w.shape[0], like=x)
    if bias is not None:
        check_matrix("bias", bias, (w.shape[0], w.shape[1 if transpose_w else 2]), "(E, N)", like=x)
    if row_index is not None:
        check_row_index("row_index", row_index, x, rows)
    if bias_scale is not None:
        if bias is None:
            raise ValueError("bias_scale: wanted a bias beside it, got none")
        check_row_vector("bias_scale", bias_scale, num_rows(x, row_index), like=x)
    expected = check_expected_rows(expected_rows)
    return m_grouped_gemm_op(
        x, w, rows.starts, rows.ends, bias, bias_scale, transpose_w, None, row_index, True, expected
    )


def _fake(
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
    return x.new_empty(num_rows(x, row_index), w.shape[1 if transpose_w else 2])


# zero_gaps: whether rows of no expert are zero, or undefined. expected_rows: 0 if not known.
m_grouped_gemm_op = define_op(
    "m_grouped_gemm(Tensor x, Tensor w, Tensor starts, Tensor ends, Tensor? bias, Tensor? bias_scale, bool transpose_w,"
    " Tensor? tiles=None, Tensor? row_index=None, bool zero_gaps=True, SymInt expected_rows=0)"
    " -> Tensor",
    implementation=by_family("m_grouped_gemm"),
    fake=_fake,
)
