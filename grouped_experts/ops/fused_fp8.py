"""The two products of the layer that are fused with the activation, in FP8: fc1 forward and fc2 dgrad.

What the next products multiply leaves them cast already, from the rounded numbers that a chain of ops would cast.
Neither is differentiable: they are the two halves of `GroupedMLP`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.activations import get_activation
from grouped_experts.ops.activation import check_h
from grouped_experts.ops.checks import check_device, check_expected_rows, check_row_vector, check_shape
from grouped_experts.ops.families import by_family
from grouped_experts.ops.products_fp8 import check_half_or_float, check_m_grouped_fp8
from grouped_experts.ops.quantize import Quantized, check_fp8
from grouped_experts.ops.reference.fused_fp8 import E4M3, empty_gradients
from grouped_experts.ops.reference.quantize import empty_rows
from grouped_experts.registration import define_op, refuse_gradient
from grouped_experts.rows import RowRanges


def fc1_activation_fp8(
    x: Quantized,
    fc1_weight: Quantized,
    rows: RowRanges,
    probs: Tensor | None = None,
    *,
    activation: str = "swiglu",
    h_dtype: torch.dtype = torch.bfloat16,
    power_of_two: bool = False,
    expected_rows: int | None = None,
) -> tuple[Tensor, Quantized]:
    """h[r] = x[r] @ W1_e.T, rounded to h_dtype; a[r] = p[r] * act(h[r]), in fp32 from the rounded h, rounded as h.

    x: of `quantize_rows`, data (T, H); fc1_weight: of `quantize_blocks`, data (E, 2I, H), or (E, I, H) without a gate;
    e4m3 or e5m2, scales fp32. probs (T,) in any floating dtype, ones if not given. h_dtype: bf16 | fp16 | fp32.
    expected_rows: as in `m_grouped_gemm`.

    Returns h (T, 2I) or (T, I), and `quantize_rows` of a (T, I) in e4m3, with scales as power_of_two says: bit for bit
    what `m_grouped_gemm_fp8`, `scaled_activation` and that cast give. Both are undefined in rows of no expert.
    Raises ValueError for a shape, device or unknown activation, TypeError for a dtype that does not fit.
    """
    act = get_activation(activation)
    check_m_grouped_fp8(x, fc1_weight, rows, "x", "fc1_weight")
    if fc1_weight.data.shape[1] % act.width(1):
        raise ValueError(
            f"fc1_weight: wanted an even number of rows, [gate | up], got {fc1_weight.data.shape[1]}"
        )  # fmt: skip
    if probs is not None:
        check_row_vector("probs", probs, x.data.shape[0], like=x.data)
    check_half_or_float("h_dtype", h_dtype)
    expected = check_expected_rows(expected_rows)
    _refuse_gradients("fc1_activation_fp8", probs)
    h, data, scales = fc1_activation_fp8_op(
        *x, *fc1_weight, rows.starts, rows.ends, probs, activation, h_dtype, power_of_two, None, expected
    )
    return h, Quantized(data, scales)


def fc2_dgrad_activation_fp8(
    dy: Quantized,
    fc2_weight: Quantized,
    h: Tensor,
    rows: RowRanges,
    probs: Tensor | None = None,
    *,
    activation: str = "swiglu",
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    need_columns: bool = True,
    expected_rows: int | None = None,
) -> tuple[Quantized, Quantized | None, Quantized | None, Tensor]:
    """dh = act'(h) (p * da), a = p * act(h), dprobs[r] = sum_j da_j act(h)_j, where da = dy W2_e.

    da is rounded to bf16 where h is in bf16, and in fp32 otherwise.

    dy: of `quantize_rows`, data (T, H); fc2_weight: of `quantize_blocks` with transpose, data (E, I, H); e4m3 or e5m2,
    scales fp32. h (T, 2I), or (T, I) without a gate, in bf16 | fp16 | fp32. probs (T,) in any floating dtype, ones if
    not given. dtype: of dh, float8_e4m3fn or float8_e5m2. expected_rows: as in `m_grouped_gemm`.

    Returns `quantize_rows` of dh, undefined in rows of no expert; with need_columns, else None, `quantize_columns` of
    dh and of a, that in e4m3, for the weights' gradients; and dprobs (T,) in fp32, zero in rows of no expert, summed in
    a fixed order. dh and a are rounded as h before they are cast, so that all casts are bit for bit what a chain of the
    product, the activation's backward from that da, and casts gives. Raises as `fc1_activation_fp8` does.
    """
    act = get_activation(activation)
    check_m_grouped_fp8(dy, fc2_weight, rows, "dy", "fc2_weight")
    check_h(h, act, probs, rows)
    check_half_or_float("h", h.dtype)
    width = act.width(fc2_weight.data.shape[1])
    check_shape("h", h, (dy.data.shape[0], width), "(T, 2I)" if act.gated else "(T, I)")
    check_device("h", h, like=dy.data)
    check_fp8("dtype", dtype)
    _refuse_gradients("fc2_dgrad_activation_fp8", h, probs)
    needed = True, need_columns, need_columns, True
    expected = check_expected_rows(expected_rows)
    *made, dprobs = fc2_dgrad_activation_fp8_op(
        *dy, *fc2_weight, h, rows.starts, rows.ends, probs, activation, dtype, power_of_two, *needed, None, expected
    )
    by_rows, by_columns, a = (Quantized(*made[i : i + 2]) for i in (0, 2, 4))
    return (by_rows, by_columns, a, dprobs) if need_columns else (by_rows, None, None, dprobs)


def _refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(
            f"{name}: wanted tensors without requires_grad (or torch.no_grad()), got one with it: "
            "gradients are GroupedMLP's business"
        )


def _fake_fc1_activation(
    x: Tensor,
    x_scales: Tensor,
    fc1_weight: Tensor,
    fc1_weight_scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    probs: Tensor | None,
    activation: str,
    h_dtype: torch.dtype,
    power_of_two: bool,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    h = x.new_empty(x.shape[0], fc1_weight.shape[1], dtype=h_dtype)
    return h, *empty_rows(h[:, : h.shape[1] // get_activation(activation).width(1)], E4M3)


def _fake_fc2_dgrad_activation(
    dy: Tensor,
    dy_scales: Tensor,
    fc2_weight: Tensor,
    fc2_weight_scales: Tensor,
    h: Tensor,
    starts: Tensor,
    ends: Tensor,
    probs: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    power_of_two: bool,
    need_rows: bool,
    need_columns: bool,
    need_a: bool,
    need_dprobs: bool,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, ...]:
    needed = need_rows, need_columns, need_a, need_dprobs
    return empty_gradients(h, fc2_weight.shape[1], starts.shape[0], dtype, *needed)


fc1_activation_fp8_op = define_op(
    "fc1_activation_fp8(Tensor x, Tensor x_scales, Tensor w, Tensor w_scales, Tensor starts, Tensor ends,"
    " Tensor? probs, str activation, ScalarType h_dtype, bool power_of_two, Tensor? tiles=None, SymInt expected_rows=0)"
    " -> (Tensor, Tensor, Tensor)",
    implementation=by_family("fc1_activation_fp8"),
    fake=_fake_fc1_activation,
)
fc2_dgrad_activation_fp8_op = define_op(
    "fc2_dgrad_activation_fp8(Tensor dy, Tensor dy_scales, Tensor w, Tensor w_scales, Tensor h, Tensor starts,"
    " Tensor ends, Tensor? probs, str activation, ScalarType dtype, bool power_of_two, bool need_rows,"
    " bool need_columns, bool need_a, bool need_dprobs, Tensor? tiles=None, SymInt expected_rows=0)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    implementation=by_family("fc2_dgrad_activation_fp8", operands=5),
    fake=_fake_fc2_dgrad_activation,
)
refuse_gradient(fc1_activation_fp8_op)
refuse_gradient(fc2_dgrad_activation_fp8_op)
