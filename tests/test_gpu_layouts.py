"""A thousand random layouts: every result of the layer, row by row and expert by expert, against fp64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_cuda
from exact import Bounds, eps, owned_rows, plain_activation
from inputs import Layout, from_m_indices
from layer import WEIGHTS, Results, by_layer, by_loop
from torch import Tensor

from grouped_experts import GroupedMLP, RowRanges
from grouped_experts.ops.families import use_family

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEEDS_ON_A_CPU = 10


@dataclass(frozen=True)
class Config:
    """What kernels are compiled for. E experts with C rows each on average: tiles of C rows, rounded up."""

    dtype: torch.dtype
    hidden: int
    inner: int
    num_experts: int
    capacity: int
    activation: str = "swiglu"
    bias: bool = False
    seeds: int = 150  # on a GPU

    @property
    def num_rows(self) -> int:
        return self.num_experts * self.capacity


# The first four take Gluon's kernels on a Hopper GPU, more than a thousand times. 96 and 40 suit TMA and fill no tile,
# 60 and 44 do not suit it, 33 and 21 nothing at all.
CONFIGS = {
    "bf16-hopper": Config(BF16, 200, 136, 7, 150, seeds=334),
    "bf16-hopper-wide": Config(BF16, 328, 264, 5, 200, activation="squared_relu", seeds=334),
    "fp16-hopper": Config(FP16, 96, 40, 7, 150, activation="geglu", bias=True, seeds=334),
    "bf16-tiles-of-128": Config(BF16, 256, 128, 8, 150, bias=True),
    "bf16-tiles-of-16": Config(BF16, 96, 40, 7, 9),
    "bf16-tiles-of-64-without-tma": Config(BF16, 60, 44, 7, 50, activation="squared_relu", bias=True),
    "fp16-tiles-of-32": Config(FP16, 96, 40, 7, 24, activation="geglu"),
    "fp16-tiles-of-128-without-tma": Config(FP16, 33, 21, 3, 130, bias=True),
    "fp32-tiles-of-128": Config(FP32, 96, 40, 7, 150, bias=True),
    "fp32-tiles-of-16-without-tma": Config(FP32, 60, 44, 7, 9, activation="clamped_swiglu"),
}


# ---- layouts of T = E * C rows


def random_counts(r: random.Random, num_experts: int, total: int, most: int) -> list[int]:
    """At most `most` each and `total` together: all busy, some idle, or hardly one busy; even or uneven."""
    idle = r.choice([0.0, 0.3, 0.9])
    shares = [0.0 if r.random() < idle else r.choice([0.01, 1.0, r.random()]) for _ in range(num_experts)]
    scale = r.choice([total, r.randint(0, total)]) / max(sum(shares), 1e-9)
    return [min(most, int(share * scale)) for share in shares]


def on(device: str, r: random.Random, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=r.choice([torch.int32, torch.int64]), device=device)


def random_contiguous(r: random.Random, config: Config) -> Layout:
    counts = random_counts(r, config.num_experts, config.num_rows, config.num_rows)
    ends = [sum(counts[: e + 1]) for e in range(config.num_experts)]
    bounds = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return Layout(
        config.num_rows,
        bounds,
        lambda device: RowRanges.contiguous(on(device, r, counts), num_rows=config.num_rows),
    )


def random_padded(r: random.Random, config: Config) -> Layout:
    """Aligned starts, told by counts or by the ends alone."""
    alignment = r.choice([1, 2, 3, 8, 16, 17])
    blocks = random_counts(r, config.num_experts, config.num_rows // alignment, config.num_rows // alignment)
    counts = [max(0, n * alignment - r.randint(0, alignment - 1)) for n in blocks]
    starts = [sum(blocks[:e]) * alignment for e in range(config.num_experts)]
    bounds = [(start, start + count) for start, count in zip(starts, counts, strict=True)]
    by_ends = r.random() < 0.5

    def make(device: str) -> RowRanges:
        if by_ends:
            return RowRanges.from_padded_cumsum(on(device, r, [end for _, end in bounds]), alignment)
        return RowRanges.padded(on(device, r, counts), alignment, num_rows=config.num_rows)

    return Layout(config.num_rows, bounds, make)


def random_masked(r: random.Random, config: Config) -> Layout:
    E, C = config.num_experts, config.capacity
    counts = random_counts(r, E, E * C, C)
    bounds = [(e * C, e * C + count) for e, count in enumerate(counts)]
    return Layout(E * C, bounds, lambda device: RowRanges.masked(on(device, r, counts), C))


def random_runs(r: random.Random, config: Config) -> Layout:
    """Gaps of any length before, between and behind the experts' runs, told row by row."""
    lengths = random_counts(r, 2 * config.num_experts, config.num_rows, config.num_rows)
    owners = [owner for e in range(config.num_experts) for owner in [-1] * lengths[2 * e] + [e] * lengths[2 * e + 1]]
    owners += [-1] * (config.num_rows - len(owners))
    layout = from_m_indices(owners, config.num_experts)
    return Layout(
        layout.num_rows,
        layout.bounds,
        lambda device: RowRanges.from_m_indices(on(device, r, owners), config.num_experts),
    )


KINDS: list[Callable[[random.Random, Config], Layout]] = [random_contiguous, random_padded, random_masked, random_runs]


# ---- how far a result may be from fp64

# In roundings to the layer's dtype, of the norm of a row or of an expert's gradient: h, a, dh and the results
# themselves are rounded, each of which moves the norm by about a quarter of eps, and act' may double what that of h
# does. In fp32 what counts are sums of up to a few hundred terms, and exponentials.
ROUNDINGS = {BF16: 3, FP16: 3, FP32: 32}


def sizes_of(exact: Results, mlp: GroupedMLP, x: Tensor, bounds: Bounds, dy: Tensor) -> dict[str, Tensor]:
    """What errors are relative to: the norm of each row of y and dx, and of each expert's gradients.

    For dprobs, one number a row whose summands may cancel, the norm of these: da_j act(h)_j, and dy_j b2_j.
    """
    sizes = {name: value.flatten(1).norm(dim=1) for name, value in exact.items() if name != "probs"}
    sizes["probs"] = torch.zeros_like(exact["probs"])
    w1, w2, b1, b2 = (None if w is None else w.detach().double() for w in (getattr(mlp, name) for name in WEIGHTS))
    for expert, (start, end) in enumerate(bounds):
        rows = slice(start, end)
        h = F.linear(x[rows].double(), w1[expert], None if b1 is None else b1[expert])
        terms = [(dy[rows].double() @ w2[expert]) * plain_activation(h, mlp.activation)]
        terms += [] if b2 is None else [dy[rows].double() * b2[expert]]
        sizes["probs"][rows] = torch.cat(terms, 1).norm(dim=1)
    return sizes


def check(config: Config, mlp: GroupedMLP, layout: Layout, device: str, seed: int) -> dict[str, float]:
    """The largest error of each result, 1 being the bound; raises AssertionError for one beyond it."""
    generator = torch.Generator(device).manual_seed(seed)
    owned = owned_rows(layout.bounds, layout.num_rows, mlp.fc1_weight)

    def rows(columns: int) -> Tensor:
        t = torch.randn(layout.num_rows, columns, generator=generator, device=device, dtype=FP32)
        return torch.where(owned, t.to(config.dtype), torch.nan)

    x, dy = rows(config.hidden).requires_grad_(), rows(config.hidden)
    # None so small that a row of fp16 would fall below its normal numbers.
    probs = torch.rand(layout.num_rows, generator=generator, device=device) * 0.75 + 0.25
    probs = torch.where(owned[:, 0], probs, torch.inf).requires_grad_()
    actual = by_layer(mlp, x, layout.rows(device), probs, dy)
    exact = by_loop(mlp, x, layout.bounds, probs, dy, torch.float64)
    sizes = sizes_of(exact, mlp, x.detach(), layout.bounds, dy)
    ratios = {}
    for name, size in sizes.items():
        error = (actual[name].double() - exact[name]).reshape(len(size), -1).norm(dim=1)
        bound = ROUNDINGS[config.dtype] * eps(config.dtype) * size  # zero where the result is to be zero
        ratios[name] = float(torch.where(error == 0, 0, error / bound).max())
        assert ratios[name] <= 1, f"seed {seed}: {name} errs by {ratios[name]:.3g} of its bound: {layout.bounds}"
    return ratios


def make_layer(config: Config, device: str) -> GroupedMLP:
    return GroupedMLP(
        config.hidden,
        config.inner,
        config.num_experts,
        activation=config.activation,
        bias=config.bias,
        dtype=config.dtype,
        device=device,
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_random_layouts(config: Config, device: str) -> None:
    mlp = make_layer(config, device)
    for seed in range(config.seeds if device == "cuda" else SEEDS_ON_A_CPU):
        r = random.Random(seed)
        check(config, mlp, KINDS[seed % len(KINDS)](r, config), device, seed)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["bf16-tiles-of-128", "fp16-tiles-of-32", "fp32-tiles-of-16-without-tma"])
def test_random_layouts_without_the_kernels(name: str) -> None:
    """What GPUs get where Triton is missing."""
    config = CONFIGS[name]
    mlp = make_layer(config, "cuda")
    with use_family("reference"):
        for seed in range(8):
            r = random.Random(seed)
            check(config, mlp, KINDS[seed % len(KINDS)](r, config), "cuda", seed)
