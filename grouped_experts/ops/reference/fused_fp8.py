"""The two products of the layer that are fused with the activation, in FP8, and with the casts of what they make."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.reference.activation import scaled_activation, scaled_activation_backward
from grouped_experts.ops.reference.products_fp8 import m_grouped_gemm_fp8
from grouped_experts.ops.reference.quantize import empty_columns, empty_rows, quantize_columns, quantize_rows

E4M3 = torch.float8_e4m3fn  # of activations


def fc1_activation_fp8(
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
    """h = x W1_e^T, rounded; a = p * act(h), rounded as h and cast by rows. Both undefined in rows of no expert."""
    h = m_grouped_gemm_fp8(x, x_scales, fc1_weight, fc1_weight_scales, starts, ends, h_dtype)
    return h, *quantize_rows(scaled_activation(h, probs, starts, ends, activation), E4M3, power_of_two)


def fc2_dgrad_activation_fp8(
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
    """da = dy W2_e, W2_e transposed and da in `dtype_of_da`; dh = act'(h) (p * da) and a = p * act(h), rounded as h.

    The casts of dh by rows and by columns in `dtype` and of a by columns in e4m3, data and scales each, and dprobs.
    What is not needed comes back empty.
    """
    da = m_grouped_gemm_fp8(dy, dy_scales, fc2_weight, fc2_weight_scales, starts, ends, dtype_of_da(h))
    dh, a, dprobs = scaled_activation_backward(da.float(), h, probs, starts, ends, activation)
    needed = need_rows, need_columns, need_a, need_dprobs
    made = list(empty_gradients(h, fc2_weight.shape[1], starts.shape[0], dtype, *needed))
    if need_rows:
        made[0:2] = quantize_rows(dh, dtype, power_of_two)
    if need_columns:
        made[2:4] = quantize_columns(dh, starts, ends, dtype, power_of_two)
    if need_a:
        made[4:6] = quantize_columns(a.to(h.dtype), starts, ends, E4M3, power_of_two)
    if need_dprobs:
        made[6] = dprobs
    return tuple(made)


def dtype_of_da(h: Tensor) -> torch.dtype:
    """bf16, whose rounding is little beside that of dh's cast, with an h in bf16; else fp32: fp16 has not the range."""
    return torch.bfloat16 if h.dtype == torch.bfloat16 else torch.float32


def empty_gradients(
    h: Tensor,
    columns: int,
    num_experts: int,
    dtype: torch.dtype,
    need_rows: bool,
    need_columns: bool,
    need_a: bool,
    need_dprobs: bool,
) -> tuple[Tensor, ...]:
    """Room for `fc2_dgrad_activation_fp8` of an a with that many columns."""
    a = h[:, :columns]  # by its shape
    return (
        *empty_rows(h if need_rows else h[:0], dtype),
        *(empty_columns(h, num_experts, dtype) if need_columns else empty_columns(h[:0], 0, dtype)),
        *(empty_columns(a, num_experts, E4M3) if need_a else empty_columns(a[:0], 0, E4M3)),
        h.new_empty(h.shape[0] if need_dprobs else 0, dtype=torch.float32),
    )
