"""Grouped products, activations and permutations as functions of tensors."""

from grouped_experts.ops import gradients as _gradients  # noqa: F401  registers them
from grouped_experts.ops.activation import scaled_activation, scaled_activation_backward
from grouped_experts.ops.fp4 import QuantizedFP4, dequantize_fp4, m_grouped_gemm_fp8_fp4, quantize_fp4
from grouped_experts.ops.fused import fc1_activation, fc2_dgrad_activation
from grouped_experts.ops.fused_fp8 import fc1_activation_fp8, fc2_dgrad_activation_fp8
from grouped_experts.ops.k_grouped import k_grouped_gemm, k_grouped_gemm_accumulate, k_grouped_sum
from grouped_experts.ops.m_grouped import m_grouped_gemm
from grouped_experts.ops.permute import Permuted, Routing, permute, route, unpermute
from grouped_experts.ops.products_fp8 import (
    k_grouped_gemm_fp8,
    k_grouped_gemm_fp8_accumulate,
    m_grouped_gemm_fp8,
)
from grouped_experts.ops.quantize import (
    Quantized,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    quantize_rows_and_columns,
)
from grouped_experts.ops.ue8m0 import pack_ue8m0, unpack_ue8m0

__all__ = [
    "Permuted",
    "Quantized",
    "QuantizedFP4",
    "Routing",
    "dequantize_fp4",
    "fc1_activation",
    "fc1_activation_fp8",
    "fc2_dgrad_activation",
    "fc2_dgrad_activation_fp8",
    "k_grouped_gemm",
    "k_grouped_gemm_accumulate",
    "k_grouped_gemm_fp8",
    "k_grouped_gemm_fp8_accumulate",
    "k_grouped_sum",
    "m_grouped_gemm",
    "m_grouped_gemm_fp8",
    "m_grouped_gemm_fp8_fp4",
    "pack_ue8m0",
    "permute",
    "quantize_blocks",
    "quantize_columns",
    "quantize_fp4",
    "quantize_rows",
    "quantize_rows_and_columns",
    "route",
    "scaled_activation",
    "scaled_activation_backward",
    "unpack_ue8m0",
    "unpermute",
]
