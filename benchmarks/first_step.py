"""Seconds of the first step of a fresh process, compilation of its kernels included; docs/benchmarks.md has one.

TRITON_CACHE_DIR=$(mktemp -d) python -m benchmarks.first_step
"""

from __future__ import annotations

import time

import torch

from benchmarks.gpu import SHAPES
from benchmarks.gpu_inputs import DEVICE, Shape, normal
from grouped_experts import GroupedMLP


def seconds(shape: Shape) -> float:
    """Forward + backward of GroupedMLP, every expert with as many rows."""
    experts, rows, hidden = shape["E"], shape["M"], shape["H"]
    mlp = GroupedMLP(hidden, shape["I"], experts, device=DEVICE, dtype=torch.bfloat16)
    x = normal(rows, hidden).requires_grad_()
    counts = torch.full((experts,), rows // experts, device=DEVICE)
    probs = torch.rand(rows, device=DEVICE)
    torch.cuda.synchronize()
    start = time.perf_counter()
    mlp(x, counts, probs).sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(f"first step: {seconds(SHAPES['B']):.1f} s")
