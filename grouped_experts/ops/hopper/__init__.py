"""Gluon kernels for sm_90, the Hopper GPUs, in bf16, fp16 and FP8; what they do not take goes to the portable ones.

The functions below have the signatures of the ops, as those of `grouped_experts.ops.reference` have. Which kernels a
call took is in the debug log of `grouped_experts.ops.hopper.dispatch`.
"""

from grouped_experts.ops.hopper.fc2_dgrad import fc2_dgrad_activation
from grouped_experts.ops.hopper.k_grouped import k_grouped_gemm, k_grouped_gemm_accumulate
from grouped_experts.ops.hopper.k_grouped_fp8 import k_grouped_gemm_fp8, k_grouped_gemm_fp8_accumulate
from grouped_experts.ops.hopper.products import fc1_activation, m_grouped_gemm
from grouped_experts.ops.hopper.products_fp8 import fc1_activation_fp8, fc2_dgrad_activation_fp8, m_grouped_gemm_fp8
from grouped_experts.ops.hopper.quantize import quantize_columns, quantize_rows_and_columns
from grouped_experts.ops.portable import (
    few_tokens,
    gather_rows,
    k_grouped_sum,
    m_grouped_gemm_fp8_fp4,
    permute,
    quantize_blocks,
    quantize_rows,
    ranges_from_tensor,
    route,
    route_rows,
    scaled_activation,
    scaled_activation_backward,
    scheduled_ranges,
    tile_schedule,
    unpermute,
    unpermute_with_values,
)

__all__ = [
    "fc1_activation",
    "fc1_activation_fp8",
    "fc2_dgrad_activation",
    "fc2_dgrad_activation_fp8",
    "few_tokens",
    "gather_rows",
    "k_grouped_gemm",
    "k_grouped_gemm_accumulate",
    "k_grouped_gemm_fp8",
    "k_grouped_gemm_fp8_accumulate",
    "k_grouped_sum",
    "m_grouped_gemm",
    "m_grouped_gemm_fp8",
    "m_grouped_gemm_fp8_fp4",
    "permute",
    "quantize_blocks",
    "quantize_columns",
    "quantize_rows",
    "quantize_rows_and_columns",
    "ranges_from_tensor",
    "route",
    "route_rows",
    "scaled_activation",
    "scaled_activation_backward",
    "scheduled_ranges",
    "tile_schedule",
    "unpermute",
    "unpermute_with_values",
]
