"""Grouped products of FP8 operands with blockwise scales, as `grouped_experts.ops.quantize` makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.checks import FLOATS, check_device, check_expected_rows, check_rows, check_shape
from grouped_experts.ops.families import by_family
from grouped_experts.ops.quantize import Quantized, check_quantized, check_rows_of_scales
from grouped_experts.ops.reference.quantize import num_blocks
from grouped_experts.registration import define_op, refuse_gradient
from grouped_experts.rows import FP8_BLOCK, RowRanges


def m_grouped_gemm_fp8(
    x: Quantized,
    w: Quantized,
    rows: RowRanges,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    expected_rows: int | None = None,
) -> Tensor:
    """y[r] = x[r] @ w[e].T for the rows r of expert e, of the numbers that x and w stand for; zero for rows of none.

    x: of `quantize_rows`, data (T, K), scales (T, ceil(K / 128)); as a dispatcher sends them as well.
    w: of `quantize_blocks`, data (E, N, K), scales (E, ceil(N / 128), ceil(K / 128)). y[r] = x[r] @ w[e], as dgrad has
    it, is the product with the transposed cast.

    rows: the rows of every expert. Data e4m3 or e5m2, scales fp32, any strides. expected_rows: as in `m_grouped_gemm`.

    Returns y (T, N) in out_dtype, every 128 of K summed by itself and then in fp32. Not differentiable.
    Raises ValueError for a shape or device, TypeError for a dtype that does not fit.
    """
    check_m_grouped_fp8(x, w, rows)
    check_half_or_float("out_dtype", out_dtype)
    expected = check_expected_rows(expected_rows)
    return m_grouped_gemm_fp8_op(*x, *w, rows.starts, rows.ends, out_dtype, None, expected)


def k_grouped_gemm_fp8(
    a: Quantized, b: Quantized, rows: RowRanges, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """c[e] = a[r].T @ b[r], contracted over the rows r of expert e, of the numbers that a and b stand for.

    a, b: of `quantize_columns` of those same `rows`, data (M, P) and (N, P). Exact zeros for an expert without rows.

    Returns c (E, M, N) in out_dtype; sums and what it raises as in `m_grouped_gemm_fp8`. Not differentiable.
    """
    _check_columns(a, b, rows)
    check_half_or_float("out_dtype", out_dtype)
    return k_grouped_gemm_fp8_op(a.data, a.scales, b.data, b.scales, rows.starts, rows.ends, out_dtype)


def k_grouped_gemm_fp8_accumulate(c: Tensor, a: Quantized, b: Quantized, rows: RowRanges) -> None:
    """c[e] += a[r].T @ b[r] in fp32; an expert without rows leaves c[e] as it is.

    c (E, M, N) fp32 of any strides without overlap, changed in place; a, b, rows as in `k_grouped_gemm_fp8`. Returns
    nothing. Raises as it does, and ValueError for a c that requires a gradient.
    """
    _check_columns(a, b, rows)
    if not isinstance(c, Tensor):
        raise TypeError(f"c: wanted a tensor, got {type(c).__name__}")
    if c.dtype != torch.float32:
        raise TypeError(f"c: wanted dtype float32, got {c.dtype}")
    check_shape("c", c, (rows.num_experts, a.data.shape[0], b.data.shape[0]), "(E, M, N)")
    check_device("c", c, like=a.data)
    for name, tensor in (("c", c), ("a.scales", a.scales), ("b.scales", b.scales)):
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"k_grouped_gemm_fp8_accumulate: wanted {name} without requires_grad (or torch.no_grad()), "
                "got one with it"
            )
    k_grouped_gemm_fp8_accumulate_op(c, a.data, a.scales, b.data, b.scales, rows.starts, rows.ends)


def check_m_grouped_fp8(x: Quantized, w: Quantized, rows: RowRanges, x_name: str = "x", w_name: str = "w") -> None:
    check_rows_of_scales(x_name, x)
    check_quantized(w_name, w, 3, "(E, N, K)")
    experts, columns, depth = w.data.shape
    check_shape(f"{x_name}.data", x.data, (None, depth), "(T, K)")
    blocks = experts, num_blocks(columns), num_blocks(depth)
    check_shape(f"{w_name}.scales", w.scales, blocks, "(E, ceil(N / 128), ceil(K / 128))")
    for name, tensor in ((f"{w_name}.data", w.data), (f"{w_name}.scales", w.scales)):
        check_device(name, tensor, like=x.data)
    check_rows(rows, experts, like=x.data)


def _check_columns(a: Quantized, b: Quantized, rows: RowRanges) -> None:
    check_quantized("a", a, 2, "(M, P)")
    check_rows(rows, None, like=a.data)
    for name, each in (("a", a), ("b", b)):
        check_quantized(name, each, 2, "(M, P)")
        check_device(f"{name}.data", each.data, like=a.data)
        check_shape(f"{name}.data", each.data, (None, a.data.shape[1]), "(M, P)")
        check_shape(f"{name}.scales", each.scales, (each.data.shape[0], a.data.shape[1] // FP8_BLOCK), "(M, P / 128)")
    if a.data.shape[1] % FP8_BLOCK or a.data.shape[1] < FP8_BLOCK * rows.num_experts:
        raise ValueError(f"a.data: wanted (M, P) of `quantize_columns` of these rows, got {tuple(a.data.shape)}")


def check_half_or_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS[:3]:
        raise TypeError(f"{name}: wanted one of {', '.join(map(str, FLOATS[:3]))}, got {dtype}")


m_grouped_gemm_fp8_op = define_op(
    "m_grouped_gemm_fp8(Tensor x, Tensor x_scales, Tensor w, Tensor w_scales, Tensor starts, Tensor ends,"
    " ScalarType out_dtype, Tensor? tiles=None, SymInt expected_rows=0) -> Tensor",
    implementation=by_family("m_grouped_gemm_fp8"),
    fake=lambda x, x_scales, w, w_scales, starts, ends, out_dtype, *_: x.new_empty(
        x.shape[0], w.shape[1], dtype=out_dtype
    ),
)
k_grouped_gemm_fp8_op = define_op(
    "k_grouped_gemm_fp8(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor starts, Tensor ends,"
    " ScalarType out_dtype) -> Tensor",
    implementation=by_family("k_grouped_gemm_fp8"),
    fake=lambda a, a_scales, b, b_scales, starts, ends, out_dtype: a.new_empty(
        starts.shape[0], a.shape[0], b.shape[0], dtype=out_dtype
    ),
)
k_grouped_gemm_fp8_accumulate_op = define_op(
    "k_grouped_gemm_fp8_accumulate(Tensor(a!) c, Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor starts,"
    " Tensor ends) -> ()",
    implementation=by_family("k_grouped_gemm_fp8_accumulate", operands=2),
    fake=lambda *_: None,
)
for op in (m_grouped_gemm_fp8_op, k_grouped_gemm_fp8_op):
    refuse_gradient(op)
