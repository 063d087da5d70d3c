"""The products in FP8 against cuBLAS's of one expert and against ours in bf16, and the casts against a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_inputs import COUNTS, DEVICE, Shape, check, normal, uneven_ends
from benchmarks.gpu_moves import beside_copy
from benchmarks.records import Record, record
from benchmarks.routed_case import OURS, Times, rounds_beside
from benchmarks.timing import event_ms_of
from grouped_experts import RowRanges
from grouped_experts.ops import (
    Quantized,
    k_grouped_gemm,
    k_grouped_gemm_fp8,
    m_grouped_gemm,
    m_grouped_gemm_fp8,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    quantize_rows_and_columns,
)
from grouped_experts.ops.families import choose_family

E4M3 = torch.float8_e4m3fn
DTYPE = "float8_e4m3fn"
BLOCK = 128
IN_BF16 = "ours in bf16"
DENSE, DENSE_FAST = "torch._scaled_mm, M rows", "torch._scaled_mm, M rows, fast sums"
PRODUCT_LIMIT = 5e-3  # of |result - fp32| / |fp32|, of the numbers that operands stand for: one rounding to bf16
CAST_LIMIT = 5e-2  # of a cast: numbers of four bits
DENSE_LIMIT = 8e-2  # of a product of two operands with one scale each


@dataclass(frozen=True)
class Segment:
    """The rows of an expert, and where they are in a cast by columns."""

    rows: slice
    columns: slice


def path() -> str:
    return choose_family(torch.device(DEVICE), (E4M3, torch.bfloat16))


def uneven_rows(shape: Shape) -> tuple[RowRanges, list[Segment]]:
    ends = uneven_ends(shape["M"], shape["E"])
    counts = ends.diff(prepend=ends.new_zeros(1))
    segments, row, column = [], 0, 0
    for count in counts.tolist():
        segments.append(Segment(slice(row, row + count), slice(column, column + count)))
        row, column = row + count, column + -(-count // BLOCK) * BLOCK
    return RowRanges.contiguous(counts, num_rows=shape["M"]), segments


def numbers_of(quantized: Quantized) -> Tensor:
    """What the operand of a product stands for, in fp32: (T, K), (K, P) or (E, N, K)."""
    data, scales = quantized
    each = scales.repeat_interleave(BLOCK, -1)[..., : data.shape[-1]]
    if data.dim() == 3:
        each = each.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]
    return data.float() * each


def products(shape: Shape, rounds: int) -> list[Record]:
    """m-grouped, forward and dgrad, and k-grouped, of fc1 (N = 2I, K = H) and fc2 (N = H, K = I). Casts not counted."""
    records = []
    rows, segments = uneven_rows(shape)
    for layer, n, k in (("fc1", 2 * shape["I"], shape["H"]), ("fc2", shape["H"], shape["I"])):
        sizes = {"E": shape["E"], "M": shape["M"], "N": n, "K": k}
        x, w, dy = normal(shape["M"], k), normal(shape["E"], n, k), normal(shape["M"], n)
        for op, variant, times in (
            ("m_grouped_fp8", None, _m_grouped(x, w, rows, segments, rounds, transpose_w=True)),
            ("m_grouped_fp8", "dgrad", _m_grouped(dy, w, rows, segments, rounds, transpose_w=False)),
            ("k_grouped_fp8", None, _k_grouped(dy, x, rows, segments, rounds)),
        ):
            made = list(_records(op, variant, sizes, times, 2.0 * shape["M"] * n * k))
            beside = "  ".join(f"{r.ratio:5.2f}x {r.peer}" for r in made)
            print(f"{layer} {op} {variant or '':5} {made[0].tflops:6.0f} TFLOP/s  {beside}", flush=True)
            records += made
    return records


def _m_grouped(
    x: Tensor, w: Tensor, rows: RowRanges, segments: list[Segment], rounds: int, *, transpose_w: bool
) -> Times:
    """dgrad, without transpose_w, is the product with the transposed cast."""
    operand, weight = quantize_rows(x), quantize_blocks(w, transpose=not transpose_w)
    numbers = numbers_of(weight)
    exact = [numbers_of(Quantized(operand.data[s.rows], operand.scales[s.rows])) for s in segments]
    exact = [mine @ numbers[e].T for e, mine in enumerate(exact)]
    runs: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: m_grouped_gemm_fp8(operand, weight, rows),
        IN_BF16: lambda: m_grouped_gemm(x, w, rows, transpose_w=transpose_w),
    }
    check("m_grouped_fp8", [runs[OURS]()], [torch.cat(exact)], PRODUCT_LIMIT)
    del numbers, exact
    (left, left_scale), (right, right_scale) = _with_one_scale(x), _with_one_scale(w[0] if transpose_w else w[0].T)

    def dense(fast: bool) -> Callable[[], Tensor]:
        return lambda: torch._scaled_mm(
            left, right.T, left_scale, right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    exact_dense = x.float() @ (w[0].T if transpose_w else w[0]).float()
    for name, fast in ((DENSE, False), (DENSE_FAST, True)):
        runs[name] = dense(fast)
        check(name, [runs[name]()], [exact_dense], DENSE_LIMIT)
    del exact_dense
    return event_ms_of(runs, rounds)


def _with_one_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with one scale for all, as cuBLAS has it fastest."""
    scale = x.abs().max().float() / torch.finfo(E4M3).max
    return (x.float() / scale).to(E4M3).contiguous(), scale


def _k_grouped(dy: Tensor, x: Tensor, rows: RowRanges, segments: list[Segment], rounds: int) -> Times:
    left, right = quantize_columns(dy, rows), quantize_columns(x, rows)
    a, b = numbers_of(left), numbers_of(right)
    exact = torch.stack([a[:, s.columns] @ b[:, s.columns].T for s in segments])
    check("k_grouped_fp8", [k_grouped_gemm_fp8(left, right, rows)], [exact], PRODUCT_LIMIT)
    del a, b, exact
    runs = {
        OURS: lambda: k_grouped_gemm_fp8(left, right, rows),
        IN_BF16: lambda: k_grouped_gemm(dy, x, rows),
    }
    return event_ms_of(runs, rounds)


def _records(op: str, variant: str | None, sizes: Shape, times: Times, flops: float) -> Iterator[Record]:
    for name in [name for name in times if name != OURS]:
        pairs = rounds_beside(times, name)
        yield record(op, sizes, COUNTS, DTYPE, path(), name, pairs, flops=flops, variant=variant)


def casts(shape: Shape, rounds: int) -> list[Record]:
    """Of x (T, H) in bf16: bytes read and written, against a copy.

    Read: 2 T H. Written by rows: T H and 4 T ceil(H / 128); by blocks: T H and a scale for 128 x 128 of them; by
    columns: every expert's rows rounded up to 128, R H in all, and 4 H R / 128.
    """
    rows, segments = uneven_rows(shape)
    num_rows, hidden = shape["M"], shape["H"]
    x = normal(num_rows, hidden)
    padded = sum(-(-(s.rows.stop - s.rows.start) // BLOCK) for s in segments) * BLOCK
    blocks = -(-hidden // BLOCK)
    read, by_rows = 2 * num_rows * hidden, num_rows * hidden + 4 * num_rows * blocks
    by_blocks, by_columns = num_rows * hidden + 4 * -(-num_rows // BLOCK) * blocks, padded * (hidden + hidden // 32)
    _check_casts(x, rows, segments)
    kinds: dict[str, tuple[Callable[[], object], int]] = {
        "rows": (lambda: quantize_rows(x), by_rows),
        "blocks": (lambda: quantize_blocks(x[None]), by_blocks),
        "blocks, transposed": (lambda: quantize_blocks(x[None], transpose=True), by_blocks),
        "columns": (lambda: quantize_columns(x, rows), by_columns),
        "rows and columns": (lambda: quantize_rows_and_columns(x, rows), by_rows + by_columns),
    }
    family = choose_family(x.device, (x.dtype, E4M3))
    return [
        beside_copy("quantize", variant, shape, COUNTS, run, read + written, rounds, DTYPE, family)
        for variant, (run, written) in kinds.items()
    ]


def _check_casts(x: Tensor, rows: RowRanges, segments: list[Segment]) -> None:
    exact = x.float()
    check("quantize_blocks", [numbers_of(quantize_blocks(x[None]))[0]], [exact], CAST_LIMIT)
    check(
        "quantize_blocks, transposed", [numbers_of(quantize_blocks(x[None], transpose=True))[0].T], [exact], CAST_LIMIT
    )
    of_rows, of_columns = quantize_rows_and_columns(x, rows)
    check("quantize_rows", [numbers_of(each) for each in (quantize_rows(x), of_rows)], [exact, exact], CAST_LIMIT)
    for columns in (quantize_columns(x, rows), of_columns):
        numbers = numbers_of(columns).T
        check("quantize_columns", [torch.cat([numbers[s.columns] for s in segments])], [exact], CAST_LIMIT)
