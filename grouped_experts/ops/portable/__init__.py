"""Triton kernels for any GPU that Triton supports; its interpreter runs them on a CPU in tests.

The functions below have the signatures of the ops, as those of `grouped_experts.ops.reference` have.
"""

from grouped_experts.ops.portable.elementwise import scaled_activation, scaled_activation_backward
from grouped_experts.ops.portable.few_tokens import few_tokens
from grouped_experts.ops.portable.fp4 import m_grouped_gemm_fp8_fp4
from grouped_experts.ops.portable.fused_fp8 import fc1_activation_fp8, fc2_dgrad_activation_fp8
from grouped_experts.ops.portable.k_grouped import k_grouped_gemm, k_grouped_gemm_accumulate, k_grouped_sum
from grouped_experts.ops.portable.permute import gather_rows, permute, unpermute, unpermute_with_values
from grouped_experts.ops.portable.products import fc1_activation, fc2_dgrad_activation, m_grouped_gemm
from grouped_experts.ops.portable.products_fp8 import (
    k_grouped_gemm_fp8,
    k_grouped_gemm_fp8_accumulate,
    m_grouped_gemm_fp8,
)
from grouped_experts.ops.portable.quantize import (
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    quantize_rows_and_columns,
)
from grouped_experts.ops.portable.route import route, route_rows
from grouped_experts.ops.portable.schedule import ranges_from_tensor, scheduled_ranges, tile_schedule

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
