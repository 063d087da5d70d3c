"""m-grouped products in FP8 with counts in multiples of 128, as DeepGEMM wants them, beside what it reached."""

from __future__ import annotations

import torch

from benchmarks.fp8_products import BLOCK, DTYPE, E4M3, PRODUCT_LIMIT, numbers_of, path
from benchmarks.gpu_inputs import Shape, check, normal, uneven_ends
from benchmarks.records import Record, record
from benchmarks.timing import Round, event_ms_of
from grouped_experts import RowRanges
from grouped_experts.ops import m_grouped_gemm_fp8, quantize_blocks, quantize_rows

# TFLOP/s of its m_grouped_fp8_gemm_nt_contiguous on an H200, by (E, N, K), on a day on which torch._scaled_mm with one
# scale a tensor reached YARDSTICK at CUBE^3, by which days are compared: DeepGEMM is no dependency of this project.
DEEPGEMM = {
    (8, 4096, 7168): 1377,
    (8, 7168, 2048): 1248,
    (128, 1536, 2048): 1265,
    (128, 2048, 768): 973,
    (64, 2048, 2048): 1190,
    (64, 2048, 1024): 1095,
}
YARDSTICK = 1225
CUBE = 8192
COUNTS = "random, +-30 %, multiples of 128"
PEER = "DeepGEMM of another day, by torch._scaled_mm at 8192^3"


def aligned(shape: Shape, rounds: int) -> list[Record]:
    ends = (uneven_ends(shape["M"] // BLOCK, shape["E"]) * BLOCK).int()
    rows = RowRanges.contiguous(ends.diff(prepend=ends.new_zeros(1)), num_rows=shape["M"])
    left, right = (normal(CUBE, CUBE).to(E4M3) for _ in range(2))
    one = torch.ones((), device=left.device)
    records = []
    for n, k in ((2 * shape["I"], shape["H"]), (shape["H"], shape["I"])):
        x, w = quantize_rows(normal(shape["M"], k)), quantize_blocks(normal(shape["E"], n, k))
        first = int(ends[0])
        exact = numbers_of(x)[:first] @ numbers_of(w)[0].T
        check("m_grouped_fp8", [m_grouped_gemm_fp8(x, w, rows)[:first]], [exact], PRODUCT_LIMIT)
        times = event_ms_of(
            {
                "ours": lambda x=x, w=w: m_grouped_gemm_fp8(x, w, rows),  # type: ignore[misc]
                "cube": lambda: torch._scaled_mm(left, right.T, one, one, out_dtype=torch.bfloat16),
            },
            rounds,
        )
        flops = 2.0 * shape["M"] * n * k
        of_a_cube = flops / (2.0 * CUBE**3) * YARDSTICK / DEEPGEMM[shape["E"], n, k]
        pairs = [Round(ours, of_a_cube * cube) for ours, cube in zip(times["ours"], times["cube"], strict=True)]
        sizes = {"E": shape["E"], "M": shape["M"], "N": n, "K": k}
        made = record("m_grouped_fp8", sizes, COUNTS, DTYPE, path(), PEER, pairs, flops=flops, variant="aligned")
        print(f"aligned, N {n}, K {k}: {made.tflops:6.0f} TFLOP/s  {made.ratio:5.2f}x {PEER}", flush=True)
        records.append(made)
    return records
