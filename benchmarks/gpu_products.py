"""The grouped products against F.grouped_mm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_inputs import COUNTS, DTYPE, Shape, check, normal, path, uneven_ends
from benchmarks.records import Record, record
from benchmarks.timing import event_ms
from grouped_experts import RowRanges
from grouped_experts.ops import (
    fc1_activation,
    fc2_dgrad_activation,
    k_grouped_gemm,
    k_grouped_gemm_accumulate,
    m_grouped_gemm,
    scaled_activation,
    scaled_activation_backward,
)


def products(shape: Shape, rounds: int) -> list[Record]:
    """Forward, dgrad and wgrad of fc1 (N = 2I, K = H) and fc2 (N = H, K = I)."""
    records = []
    ends = uneven_ends(shape["M"], shape["E"])
    rows = RowRanges.contiguous(ends.diff(prepend=ends.new_zeros(1)), num_rows=shape["M"])
    for layer, n, k in (("fc1", 2 * shape["I"], shape["H"]), ("fc2", shape["H"], shape["I"])):
        sizes = {"E": shape["E"], "M": shape["M"], "N": n, "K": k}
        flops = 2.0 * shape["M"] * n * k
        x, w, dy = normal(shape["M"], k), normal(shape["E"], n, k), normal(shape["M"], n)
        for op, (ours, theirs) in _runs(x, w, dy, rows, ends).items():
            check(op, [ours()], [theirs()], limit=5e-3)
            times = event_ms(ours, theirs, rounds)
            made = record(op, sizes, COUNTS, DTYPE, path(), "F.grouped_mm", times, flops=flops)
            print(f"{layer} {op:13} {made.tflops:6.0f} TFLOP/s  {made.ratio:5.2f}x F.grouped_mm", flush=True)
            records.append(made)
        records += _beside_one_expert(x, w, dy, rows, sizes, rounds)
        records.append(_accumulating(x, w, dy, rows, ends, sizes, rounds))
    return records + _fused(shape, rows, ends, rounds)


def _fused(shape: Shape, rows: RowRanges, ends: Tensor, rounds: int) -> list[Record]:
    """fc1 with the activation and fc2's dgrad with its backward, against F.grouped_mm and the activation's kernel."""
    experts, num_rows, hidden, inner = (shape[name] for name in ("E", "M", "H", "I"))
    x, dy, h = normal(num_rows, hidden), normal(num_rows, hidden), normal(num_rows, 2 * inner)
    w1, w2 = normal(experts, 2 * inner, hidden) * hidden**-0.5, normal(experts, hidden, inner) * hidden**-0.5
    probs = torch.rand(num_rows, device=x.device)

    def theirs_forward() -> tuple[Tensor, Tensor]:
        product = F.grouped_mm(x, w1.transpose(1, 2), offs=ends)
        return product, scaled_activation(product, probs, rows)

    runs: tuple[tuple[str, int, int, Callable[[], tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]], ...] = (
        ("fc1_activation", 2 * inner, hidden, lambda: fc1_activation(x, w1, rows, probs), theirs_forward),
        (
            "fc2_dgrad_activation",
            hidden,
            inner,
            lambda: fc2_dgrad_activation(dy, w2, h, rows, probs),
            lambda: scaled_activation_backward(F.grouped_mm(dy, w2, offs=ends), h, probs, rows),
        ),
    )
    records = []
    for op, n, k, ours, theirs in runs:
        check(op, ours(), theirs(), limit=1e-2)  # theirs rounds da
        times = event_ms(ours, theirs, rounds)
        sizes = {"E": experts, "M": num_rows, "N": n, "K": k}
        peer = "F.grouped_mm, then the activation's kernel"
        made = record(op, sizes, COUNTS, DTYPE, path(), peer, times, flops=2.0 * num_rows * n * k)
        print(f"{op:20} {made.tflops:6.0f} TFLOP/s  {made.ratio:5.2f}x {peer}", flush=True)
        records.append(made)
    return records


def _beside_one_expert(
    x: Tensor, w: Tensor, dy: Tensor, rows: RowRanges, sizes: Shape, rounds: int
) -> Iterator[Record]:
    """Forward and dgrad against the dense product of as many rows: what the processors reach in the same run."""
    flops = 2.0 * sizes["M"] * sizes["N"] * sizes["K"]
    one = w[0]
    for op, ours, dense in (
        ("m_grouped_nt", lambda: m_grouped_gemm(x, w, rows), lambda: x @ one.T),
        ("m_grouped_nn", lambda: m_grouped_gemm(dy, w, rows, transpose_w=False), lambda: dy @ one),
    ):
        times = event_ms(ours, dense, rounds)
        yield record(op, sizes, COUNTS, DTYPE, path(), "dense product, M rows", times, flops=flops, variant="dense")


def _accumulating(x: Tensor, w: Tensor, dy: Tensor, rows: RowRanges, ends: Tensor, sizes: Shape, rounds: int) -> Record:
    """wgrad added to an fp32 buffer, against F.grouped_mm, which writes half as much and reads none of it."""
    c = torch.zeros(w.shape, device=w.device)

    def fresh() -> Tensor:
        return F.grouped_mm(dy.t(), x, offs=ends)

    k_grouped_gemm_accumulate(c, dy, x, rows)
    check("k_grouped accumulate", [c], [fresh()], limit=5e-3)
    times = event_ms(lambda: k_grouped_gemm_accumulate(c, dy, x, rows), fresh, rounds)
    flops = 2.0 * sizes["M"] * sizes["N"] * sizes["K"]
    made = record("k_grouped", sizes, COUNTS, DTYPE, path(), "F.grouped_mm", times, flops=flops, variant="accumulate")
    print(f"    k_grouped, added to fp32 {made.tflops:6.0f} TFLOP/s", flush=True)
    return made


def _runs(
    x: Tensor, w: Tensor, dy: Tensor, rows: RowRanges, ends: Tensor
) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Ours and F.grouped_mm's, by op."""
    return {
        "m_grouped_nt": (lambda: m_grouped_gemm(x, w, rows), lambda: F.grouped_mm(x, w.transpose(1, 2), offs=ends)),
        "m_grouped_nn": (
            lambda: m_grouped_gemm(dy, w, rows, transpose_w=False),
            lambda: F.grouped_mm(dy, w, offs=ends),
        ),
        "k_grouped": (lambda: k_grouped_gemm(dy, x, rows), lambda: F.grouped_mm(dy.t(), x, offs=ends)),
    }
