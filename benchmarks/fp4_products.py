"""Products of FP8 rows with FP4 weights, as in decoding, beside the same with FP8 weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.fp8_layers import DECODE, TOKENS
from benchmarks.fp8_products import PRODUCT_LIMIT, numbers_of, path
from benchmarks.gpu_inputs import DEVICE, Shape, check, normal
from benchmarks.records import Record, record
from benchmarks.routed_case import OURS, rounds_beside
from benchmarks.timing import event_ms_of
from grouped_experts import RowRanges
from grouped_experts.ops import (
    Quantized,
    QuantizedFP4,
    dequantize_fp4,
    m_grouped_gemm_fp8,
    m_grouped_gemm_fp8_fp4,
    quantize_blocks,
    quantize_fp4,
    quantize_rows,
)

IN_FP8 = "ours with FP8 weights"


def fp4_products(rounds: int, sizes: Shape = DECODE) -> list[Record]:
    """fc1 (N = 2I, K = H) and fc2 (N = H, K = I) in the masked layout, as many tokens for every expert, of C rows."""
    records = []
    for n, k in ((2 * sizes["I"], sizes["H"]), (sizes["H"], sizes["I"])):
        weight, x = normal(sizes["E"], n, k), quantize_rows(normal(sizes["E"] * sizes["C"], k))
        fp4, fp8 = quantize_fp4(weight), quantize_blocks(weight)
        for tokens in TOKENS:
            shape = {"E": sizes["E"], "C": sizes["C"], "N": n, "K": k, "tokens": tokens}
            pairs = rounds_beside(event_ms_of(products(x, fp4, fp8, shape), rounds), IN_FP8)
            made = record("m_grouped_fp8_fp4", shape, "all as many", "float4_e2m1fn_x2", path(), IN_FP8, pairs)
            print(
                f"FP4, N {n}, K {k}, {tokens:3} tokens an expert: {made.ms * 1e3:6.0f} us  {made.ratio:5.2f}x {IN_FP8}"
            )
            records.append(made)
    return records


def products(x: Quantized, fp4: QuantizedFP4, fp8: Quantized, shape: Shape) -> dict[str, Callable[[], Tensor]]:
    tokens = shape["tokens"]
    counts = torch.full((shape["E"],), tokens, dtype=torch.int32, device=DEVICE)
    rows = RowRanges.masked(counts, shape["C"])
    runs = {
        OURS: lambda: m_grouped_gemm_fp8_fp4(x, fp4, rows, expected_rows=tokens),
        IN_FP8: lambda: m_grouped_gemm_fp8(x, fp8, rows, expected_rows=tokens),
    }
    exact = numbers_of(x)[:tokens] @ dequantize_fp4(fp4)[0].T
    check("m_grouped_fp8_fp4", [runs[OURS]()[:tokens]], [exact], PRODUCT_LIMIT)
    return runs
