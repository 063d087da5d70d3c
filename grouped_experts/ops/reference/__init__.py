"""Every op in plain torch: what it means, and how it runs on a CPU.

T rows, E experts, H hidden size, I intermediate size; M, N, K inside products. Arguments were checked by the callers.
The tile schedule, `tiles`, is for kernels: it is not read here. With a row index (R,), row r of an operand is row
index[r] of the tensor that is given: there are R rows then, and as many tokens as there may be.
"""

from grouped_experts.ops.reference.activation import scaled_activation, scaled_activation_backward
from grouped_experts.ops.reference.few_tokens import few_tokens
from grouped_experts.ops.reference.fp4 import m_grouped_gemm_fp8_fp4
from grouped_experts.ops.reference.fused import fc1_activation, fc2_dgrad_activation
from grouped_experts.ops.reference.fused_fp8 import fc1_activation_fp8, fc2_dgrad_activation_fp8
from grouped_experts.ops.reference.permute import permute, route, unpermute, unpermute_with_values
from grouped_experts.ops.reference.products import (
    accumulation_dtype,
    gather_rows,
    k_grouped_gemm,
    k_grouped_gemm_accumulate,
    k_grouped_sum,
    m_grouped_gemm,
)
from grouped_experts.ops.reference.products_fp8 import (
    k_grouped_gemm_fp8,
    k_grouped_gemm_fp8_accumulate,
    m_grouped_gemm_fp8,
)
from grouped_experts.ops.reference.quantize import (
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    quantize_rows_and_columns,
)

__all__ = [
    "accumulation_dtype",
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
    "route",
    "scaled_activation",
    "scaled_activation_backward",
    "unpermute",
    "unpermute_with_values",
]
