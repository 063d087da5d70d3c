"""expected_rows: other tiles, the same numbers, however many rows there are in truth."""

from __future__ import annotations

import pytest
import torch
from conftest import Place, on_hopper
from inputs import contiguous, masked
from places import in_every_place, places
from torch import Tensor

from grouped_experts import GroupedMLP
from grouped_experts.ops import (
    fc1_activation,
    fc1_activation_fp8,
    fc2_dgrad_activation,
    fc2_dgrad_activation_fp8,
    m_grouped_gemm,
    m_grouped_gemm_fp8,
    quantize_blocks,
    quantize_rows,
    route,
)
from grouped_experts.ops.reference.quantize import dequantize_rows

LAYOUTS = {"masked": masked([1, 0, 40, 3], 40), "contiguous": contiguous([70, 0, 2, 130], spare=3)}
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_hint = pytest.mark.parametrize("expected_rows", [1, 20, 40, 1000])


def integers(*shape: int, place: Place) -> Tensor:
    """Whose sums are exact in every dtype's fp32, in whatever order."""
    return torch.randint(-3, 4, shape, device=place.device).to(place.dtype)


@in_every_place
@by_layout
@by_hint
def test_m_grouped(expected_rows: int, layout: str, place: Place) -> None:
    ranges = LAYOUTS[layout]
    rows, experts = ranges.rows(place.device), ranges.num_experts
    x, w = integers(ranges.num_rows, 24, place=place), integers(experts, 40, 24, place=place)
    y = m_grouped_gemm(x, w, rows, expected_rows=expected_rows)
    assert torch.equal(y, m_grouped_gemm(x, w, rows))
    assert y.any()


@in_every_place
@by_layout
@by_hint
def test_the_products_with_an_activation(expected_rows: int, layout: str, place: Place) -> None:
    ranges = LAYOUTS[layout]
    rows, experts = ranges.rows(place.device), ranges.num_experts
    x, w1 = integers(ranges.num_rows, 24, place=place), integers(experts, 32, 24, place=place)
    dy, w2 = integers(ranges.num_rows, 24, place=place), integers(experts, 24, 16, place=place)
    owned = [row for start, end in ranges.bounds for row in range(start, end)]
    h, a = fc1_activation(x, w1, rows, expected_rows=expected_rows)
    for actual, expected in zip((h, a), fc1_activation(x, w1, rows), strict=True):
        assert torch.equal(actual[owned], expected[owned])
    dh, a, dprobs = fc2_dgrad_activation(dy, w2, h, rows, expected_rows=expected_rows)
    dh_expected, a_expected, dprobs_expected = fc2_dgrad_activation(dy, w2, h, rows)
    assert torch.equal(dh[owned], dh_expected[owned])
    assert torch.equal(a[owned], a_expected[owned])
    terms = torch.zeros(
        ranges.num_rows, device=place.device
    )  # |da| |a|, summed: what one order may lose against another
    for (start, end), weight in zip(ranges.bounds, w2.float(), strict=True):
        terms[start:end] = (dy[start:end].float() @ weight * a[start:end].float()).abs().sum(1)
    assert ((dprobs - dprobs_expected).abs() <= 4 * torch.finfo(torch.float32).eps * terms).all()


def assert_near(actual: Tensor, expected: Tensor, limit: float = 1e-3) -> None:
    """Tensor cores sum FP8 in few bits, and other tiles take other instructions."""
    limit += torch.finfo(actual.dtype).eps
    assert (actual.double() - expected.double()).norm() <= limit * expected.double().norm()


@pytest.mark.parametrize(
    "place", places([torch.bfloat16, torch.float16, torch.float32], interpreted=[torch.float16]), indirect=True
)
@by_layout
@pytest.mark.parametrize("expected_rows", [20, 1000])
def test_fp8(expected_rows: int, layout: str, place: Place) -> None:
    ranges = LAYOUTS[layout]
    rows, experts = ranges.rows(place.device), ranges.num_experts
    x = quantize_rows(torch.randn(ranges.num_rows, 144, device=place.device))
    w1, w2 = (quantize_blocks(torch.randn(experts, n, 144, device=place.device)) for n in (256, 128))
    owned = [row for start, end in ranges.bounds for row in range(start, end)]
    y, y_expected = (
        m_grouped_gemm_fp8(x, w1, rows, out_dtype=place.dtype, expected_rows=n) for n in (expected_rows, None)
    )
    assert_near(y, y_expected)
    (h, a), (h_expected, a_expected) = (
        fc1_activation_fp8(x, w1, rows, h_dtype=place.dtype, expected_rows=n) for n in (expected_rows, None)
    )
    (dh, *_, dprobs), (dh_expected, *_, dprobs_expected) = (
        fc2_dgrad_activation_fp8(x, w2, y_expected, rows, need_columns=False, expected_rows=n)
        for n in (expected_rows, None)
    )
    assert_near(h[owned], h_expected[owned])
    assert_near(dprobs, dprobs_expected)
    for actual, expected in ((a, a_expected), (dh, dh_expected)):
        numbers, numbers_expected = dequantize_rows(*actual), dequantize_rows(*expected)
        assert_near(numbers[owned], numbers_expected[owned], 2e-2)  # some round the other way


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU")
def test_tiles_follow_it(paths: list[str]) -> None:
    ranges = masked([1, 200], 256)
    x, w = (torch.ones(n, 64, device="cuda", dtype=torch.bfloat16) for n in (512, 2 * 64))
    for expected_rows in (None, 3, 65):
        m_grouped_gemm(x, w.view(2, 64, 64), ranges.rows("cuda"), expected_rows=expected_rows)
    assert [path.split(": ")[1] for path in paths] == ["Gluon", "portable, since 3 rows an expert are few", "Gluon"]


@pytest.mark.parametrize(
    ("expected_rows", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_bad_values(expected_rows: object, error: type[Exception]) -> None:
    ranges = LAYOUTS["masked"]
    x, w = torch.ones(ranges.num_rows, 8), torch.ones(4, 8, 8)
    with pytest.raises(error, match=f"expected_rows: wanted an int >= 1, got {expected_rows}"):
        m_grouped_gemm(x, w, ranges.rows("cpu"), expected_rows=expected_rows)


@pytest.mark.parametrize("precision", [None, "fp8"])
@by_hint
def test_the_layer(expected_rows: int, precision: str | None, device: str) -> None:
    """Forward and backward in one and the same tiles."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    mlp = GroupedMLP(64, 32, 4, precision=precision, device=device, dtype=dtype)
    x = torch.randn(4, 40, 64, device=device, dtype=dtype, requires_grad=True)
    probs = torch.rand(4, 40, device=device, requires_grad=True)
    counts = torch.tensor([1, 0, 40, 3], device=device)
    gradients = []
    for hint in (expected_rows, None):
        y = mlp(x, counts, probs, expected_rows=hint)
        wanted = (x, probs, *mlp.parameters())
        gradients.append((y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))))
    for actual, expected in zip(*gradients, strict=True):
        assert_near(actual, expected, 2e-2 if precision else 1e-3)


def test_a_routing_has_no_other_rows() -> None:
    mlp = GroupedMLP(8, 4, 2)
    ids = torch.tensor([[0], [1], [1]])
    with pytest.raises(ValueError, match="expected_rows: wanted None with a Routing, got 5"):
        mlp(torch.ones(3, 8), route(ids, 2), torch.ones(3, 1), expected_rows=5)


def test_compiled_once_for_all_values() -> None:
    mlp, counts = GroupedMLP(8, 4, 2), torch.tensor([2, 3])
    x = torch.randn(5, 8)
    compiled = torch.compile(mlp, fullgraph=True, backend="eager")
    with torch.no_grad():
        for expected_rows in range(1, 14):  # more than would be compiled anew
            assert torch.equal(compiled(x, counts, expected_rows=expected_rows), mlp(x, counts))
