"""The Gluon kernels of FP8 operands: edges of tiles, layouts, and which calls take them."""

from __future__ import annotations

import pytest
import torch
from conftest import on_hopper
from inputs import Layout, contiguous, masked, padded
from test_products_fp8 import assert_close, block_weight, dequantized_columns, source
from torch import Tensor

from grouped_experts import FP8Recipe, GroupedMLP, RowRanges
from grouped_experts.ops import (
    Quantized,
    fc1_activation_fp8,
    fc2_dgrad_activation_fp8,
    k_grouped_gemm_fp8,
    k_grouped_gemm_fp8_accumulate,
    m_grouped_gemm_fp8,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    quantize_rows_and_columns,
    route,
    scaled_activation,
)
from grouped_experts.ops.families import use_family
from grouped_experts.ops.reference.quantize import dequantize_blocks, dequantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU"),
]

DEVICE = "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# 118 rows on average: tiles of 128. One row, half a tile, a row more, a whole one, several; spare rows behind.
LAYOUT = contiguous([130, 0, 1, 64, 65, 128, 300, 256], spare=5)
LAYOUTS = {
    "contiguous": LAYOUT,
    "padded": padded([200, 0, 129, 7], 128, spare=130),
    "masked": masked([250, 0, 1, 128], 250),
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def of_products(paths: list[str]) -> list[str]:
    """Without those of the casts that make operands."""
    return [path for path in paths if not path.startswith("quantize")]


def rows_of(layout: Layout, columns: int) -> Tensor:
    """For a cast by rows."""
    return source(layout, columns, DEVICE, each_row=True)


def columns_of(layout: Layout, columns: int) -> Tensor:
    """For a cast by columns."""
    return source(layout, columns, DEVICE)


def weight_of(experts: int, columns: int, depth: int) -> Tensor:
    return block_weight(experts, columns, depth, DEVICE)


def product(x: Tensor, w: Tensor, layout: Layout) -> Tensor:
    """x[r] @ w[e].T in fp64, zero in rows of no expert."""
    y = x.new_zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for e, (start, end) in enumerate(layout.bounds):
        y[start:end] = x[start:end].double() @ w[e].double().T
    return y


def weight_product(a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    return torch.stack([a[start:end].double().T @ b[start:end].double() for start, end in layout.bounds])


def check_m_grouped(x: Quantized, w: Quantized, layout: Layout, out_dtype: torch.dtype) -> None:
    y = m_grouped_gemm_fp8(x, w, layout.rows(DEVICE), out_dtype=out_dtype)
    assert y.dtype == out_dtype
    assert not y[layout.unowned()].any()
    numbers, weight = dequantize_rows(*x), dequantize_blocks(*w)
    assert_close(y, product(numbers, weight, layout), product(numbers.abs(), weight.abs(), layout))


def check_k_grouped(c: Tensor, a: Quantized, b: Quantized, layout: Layout, before: Tensor | None = None) -> None:
    left, right = dequantized_columns(a, layout), dequantized_columns(b, layout)
    exact, magnitude = weight_product(left, right, layout), weight_product(left.abs(), right.abs(), layout)
    if before is not None:
        exact, magnitude = exact + before.double(), magnitude + before.abs()
    assert_close(c, exact, magnitude)


@pytest.mark.parametrize("columns", [8, 128, 136, 256, 264, 520])
@pytest.mark.parametrize("depth", [16, 128, 144, 1040])
def test_edges_of_tiles(depth: int, columns: int, paths: list[str]) -> None:
    experts = LAYOUT.num_experts
    x, w = quantize_rows(rows_of(LAYOUT, depth)), quantize_blocks(weight_of(experts, columns, depth))
    check_m_grouped(x, w, LAYOUT, BF16)
    assert of_products(paths) == ["m_grouped_gemm_fp8: Gluon"]


@by_layout
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_layouts_and_dtypes(
    layout: Layout, dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype, paths: list[str]
) -> None:
    x = quantize_rows(rows_of(layout, 272), dtype=dtypes[0])
    w = quantize_blocks(weight_of(layout.num_experts, 392, 272), dtype=dtypes[1])
    check_m_grouped(x, w, layout, out_dtype)
    assert of_products(paths) == ["m_grouped_gemm_fp8: Gluon"]


def test_many_steps_and_tiles(paths: list[str]) -> None:
    """More tiles than programs, and a contraction many times as deep as the ring."""
    layout = contiguous([700, 0, 1500, 3, 900])
    x, w = quantize_rows(rows_of(layout, 3200)), quantize_blocks(weight_of(5, 3000, 3200))
    check_m_grouped(x, w, layout, BF16)
    assert of_products(paths) == ["m_grouped_gemm_fp8: Gluon"]


def test_scales_of_any_strides(paths: list[str]) -> None:
    x, w = quantize_rows(rows_of(LAYOUT, 400)), quantize_blocks(weight_of(LAYOUT.num_experts, 264, 400))
    y = m_grouped_gemm_fp8(x, w, LAYOUT.rows(DEVICE))
    sent = Quantized(x.data, x.scales.contiguous())
    turned = Quantized(w.data, w.scales.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    assert torch.equal(m_grouped_gemm_fp8(sent, turned, LAYOUT.rows(DEVICE)), y)
    assert of_products(paths) == ["m_grouped_gemm_fp8: Gluon"] * 2


def test_scales_whose_product_is_beyond_fp32() -> None:
    """Infinity, where they are of a sum of zero."""
    layout = contiguous([200])
    x, w = quantize_rows(rows_of(layout, 128)), quantize_blocks(weight_of(1, 136, 128))
    x.scales.fill_(2.0**70)
    w.scales.fill_(2.0**70)
    x.data.copy_(torch.zeros_like(x.data, dtype=FP32))
    assert not m_grouped_gemm_fp8(x, w, layout.rows(DEVICE), out_dtype=FP32).any()


def test_what_is_not_finite_reaches_its_row_alone() -> None:
    x, w = rows_of(LAYOUT, 400), weight_of(LAYOUT.num_experts, 136, 400)
    x[:, :] = 1
    x[129, 300], x[131, 0] = torch.nan, torch.inf
    y = m_grouped_gemm_fp8(quantize_rows(x), quantize_blocks(w), LAYOUT.rows(DEVICE))
    assert y[[129, 131]].isnan().all()
    y[[129, 131]] = 0
    assert y.isfinite().all()


@by_layout
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "clamped_swiglu"])
@pytest.mark.parametrize("h_dtype", [BF16, FP16], ids=str)
def test_fc1_casts_as_a_chain_does(
    layout: Layout, activation: str, h_dtype: torch.dtype, paths: list[str]
) -> None:  # fmt: skip
    """h and the cast of a, bit for bit; with probs and scales of powers of two, and without."""
    ranges = layout.rows(DEVICE)
    x, w = quantize_rows(rows_of(layout, 400) / 64), quantize_blocks(weight_of(layout.num_experts, 512, 400) / 8)
    owned = [row for start, end in layout.bounds for row in range(start, end)]
    for probs, power_of_two in ((torch.rand(layout.num_rows, device=DEVICE), True), (None, False)):
        h, a = fc1_activation_fp8(
            x, w, ranges, probs, activation=activation, h_dtype=h_dtype, power_of_two=power_of_two
        )
        chained = m_grouped_gemm_fp8(x, w, ranges, out_dtype=h_dtype)
        cast = quantize_rows(
            scaled_activation(chained, probs, ranges, activation=activation), power_of_two=power_of_two
        )
        for actual, expected in zip((h, *a), (chained, *cast), strict=True):
            assert torch.equal(actual[owned].float(), expected[owned].float())
    assert of_products(paths) == ["fc1_activation_fp8: Gluon", "m_grouped_gemm_fp8: Gluon"] * 2


def test_what_fc1_leaves_to_a_chain(paths: list[str]) -> None:
    """Columns of which some blocks would hold gate and up, no gate, and h in fp32."""
    ranges = LAYOUT.rows(DEVICE)
    x = quantize_rows(rows_of(LAYOUT, 400) / 64)
    for columns, activation, h_dtype in ((272, "swiglu", BF16), (256, "squared_relu", BF16), (256, "swiglu", FP32)):
        w = quantize_blocks(weight_of(LAYOUT.num_experts, columns, 400) / 8)
        h, a = fc1_activation_fp8(x, w, ranges, activation=activation, h_dtype=h_dtype)
        cast = quantize_rows(scaled_activation(h, None, ranges, activation=activation))
        assert torch.equal(h[:300], m_grouped_gemm_fp8(x, w, ranges, out_dtype=h_dtype)[:300])
        assert torch.equal(a.data[:300].float(), cast.data[:300].float())
    assert [path for path in paths if "Gluon" in path] == ["m_grouped_gemm_fp8: Gluon"] * 6


@by_layout
@pytest.mark.parametrize("columns", [8, 128, 136, 264])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("x_dtype", [BF16, FP16], ids=str)
def test_casts_by_columns(
    layout: Layout, columns: int, dtype: torch.dtype, x_dtype: torch.dtype, paths: list[str]
) -> None:
    """Bit for bit the reference's, up to the last expert's padded rows; NaN in rows of no expert reaches nothing."""
    ranges, x = layout.rows(DEVICE), rows_of(layout, columns).to(x_dtype)
    x[layout.bounds[0][0], 0] = torch.nan
    check_casts(x, layout, ranges, dtype, power_of_two=dtype == E5M2)
    assert paths == ["quantize_columns: Gluon", "quantize_rows_and_columns: Gluon"]


def check_casts(x: Tensor, layout: Layout, ranges: RowRanges, dtype: torch.dtype, power_of_two: bool) -> None:
    casts = {"dtype": dtype, "power_of_two": power_of_two}
    columns = quantize_columns(x, ranges, **casts)  # type: ignore[arg-type]
    by_rows, by_columns = quantize_rows_and_columns(x, ranges, **casts)  # type: ignore[arg-type]
    with use_family("reference"):
        expected_rows, expected = quantize_rows_and_columns(x, ranges, **casts)  # type: ignore[arg-type]
    blocks = sum(-(-(end - start) // 128) for start, end in layout.bounds)
    owned = [row for start, end in layout.bounds for row in range(start, end)]
    for made in (columns, by_columns):
        assert torch.equal(made.scales[:, :blocks], expected.scales[:, :blocks])
        assert_equal_numbers(made.data[:, : 128 * blocks], expected.data[:, : 128 * blocks])
    assert torch.equal(by_rows.scales[owned], expected_rows.scales[owned])
    assert_equal_numbers(by_rows.data[owned], expected_rows.data[owned])


def assert_equal_numbers(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def test_more_blocks_than_programs(paths: list[str]) -> None:
    """Of a cast, and of what becomes of da, beside the portable kernels."""
    layout = contiguous([700, 0, 1500, 3, 900], spare=7)
    ranges = layout.rows(DEVICE)
    check_casts(rows_of(layout, 1544).bfloat16(), layout, ranges, E4M3, power_of_two=False)
    dy, w = quantize_rows(rows_of(layout, 256)), quantize_blocks(weight_of(5, 1536, 256))
    h, probs = torch.randn(layout.num_rows, 3072, device=DEVICE, dtype=BF16), torch.rand(layout.num_rows, device=DEVICE)
    made = fc2_dgrad_activation_fp8(dy, w, h, ranges, probs)
    assert paths[-1] == "quantized_gradients: Gluon"
    with use_family("portable"):
        expected = fc2_dgrad_activation_fp8(dy, w, h, ranges, probs)
    blocks = sum(-(-(end - start) // 128) for start, end in layout.bounds)
    owned = [row for start, end in layout.bounds for row in range(start, end)]
    for (data, scales), (same, same_scales), used in zip(made[:3], expected[:3], (owned, blocks, blocks), strict=True):
        if used is owned:
            parts = data[owned], same[owned], scales[owned], same_scales[owned]
        else:
            parts = data[:, : 128 * blocks], same[:, : 128 * blocks], scales[:, :blocks], same_scales[:, :blocks]
        close = [(a.float() - b.float()).norm() <= 2e-2 * b.float().norm() for a, b in (parts[:2], parts[2:])]
        assert all(close)  # the product's kernels differ, and some numbers are rounded the other way
    torch.testing.assert_close(made[3], expected[3], rtol=1e-2, atol=1e-2 * float(expected[3].abs().max()))


def test_casts_of_no_experts() -> None:
    ranges, x = RowRanges.contiguous([], num_rows=5, device=DEVICE), torch.ones(5, 256, device=DEVICE, dtype=BF16)
    assert quantize_columns(x, ranges).data.shape == (256, 0)
    assert quantize_rows_and_columns(x, ranges)[1].data.shape == (256, 0)


@pytest.mark.parametrize("columns", [8, 128, 136, 256, 264, 520])
@pytest.mark.parametrize("rows", [8, 64, 200, 264])
def test_edges_of_weight_tiles(rows: int, columns: int, paths: list[str]) -> None:
    ranges = LAYOUT.rows(DEVICE)
    a, b = (quantize_columns(columns_of(LAYOUT, n), ranges) for n in (rows, columns))
    c = k_grouped_gemm_fp8(a, b, ranges)
    assert of_products(paths) == ["k_grouped_gemm_fp8: Gluon"]
    check_k_grouped(c, a, b, LAYOUT)
    assert not c[1].any()


@by_layout
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, FP16], ids=str)
def test_weights_of_layouts_and_dtypes(
    layout: Layout, dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype, paths: list[str]
) -> None:
    """Behind the last expert's blocks is anything, NaN for one."""
    ranges = layout.rows(DEVICE)
    a, b = (
        quantize_columns(columns_of(layout, n), ranges, dtype=each) for n, each in zip((328, 392), dtypes, strict=True)
    )
    used = sum(-(-(end - start) // 128) for start, end in layout.bounds)
    for each in (a, b):
        each.data.view(torch.uint8)[:, 128 * used :] = 0x7F
        each.scales[:, used:] = torch.nan
    c = k_grouped_gemm_fp8(a, b, ranges, out_dtype=out_dtype)
    assert of_products(paths) == ["k_grouped_gemm_fp8: Gluon"]
    check_k_grouped(c, a, b, layout)


@by_layout
@pytest.mark.parametrize("columns", [64, 136, 264])
def test_accumulation(layout: Layout, columns: int, paths: list[str]) -> None:
    """Into a part of a buffer: what lies beside is not touched, nor are the sums of experts without rows."""
    ranges = layout.rows(DEVICE)
    a, b = (quantize_columns(columns_of(layout, n), ranges) for n in (200, columns))
    buffer = torch.randn(layout.num_experts, 210, columns + 16, device=DEVICE)
    before, c = buffer.clone(), buffer[:, 4:204, 8 : columns + 8]
    k_grouped_gemm_fp8_accumulate(c, a, b, ranges)
    assert of_products(paths) == ["k_grouped_gemm_fp8_accumulate: Gluon"]
    check_k_grouped(c, a, b, layout, before[:, 4:204, 8 : columns + 8])
    for expert in layout.empty_experts():
        assert torch.equal(buffer[expert], before[expert])
    buffer[:, 4:204, 8 : columns + 8] = before[:, 4:204, 8 : columns + 8]
    assert torch.equal(buffer, before)


def test_more_weight_tiles_than_programs(paths: list[str]) -> None:
    """Shared out where experts have as many rows, claimed one by one where one has most of them."""
    for counts in ([300] * 6, [3000, 1, 0, 130, 257, 40]):
        layout = contiguous(counts)
        ranges = layout.rows(DEVICE)
        a, b = (quantize_columns(columns_of(layout, n), ranges) for n in (1000, 1544))
        check_k_grouped(k_grouped_gemm_fp8(a, b, ranges), a, b, layout)
    assert of_products(paths) == ["k_grouped_gemm_fp8: Gluon"] * 2


@pytest.mark.parametrize("layer", ["plain", "deferred", "routed", "e5m2", "cast before", "expected rows"])
def test_the_layer(layer: str, paths: list[str]) -> None:
    """y and all gradients beside those that the reference emulates; by Gluon's kernels, in all products."""
    recipe = FP8Recipe(gradient_dtype=E5M2 if layer == "e5m2" else E4M3)
    mlp = GroupedMLP(272, 256, 5, precision=recipe, defer_wgrad=layer == "deferred", device=DEVICE, dtype=BF16)
    counts = torch.tensor([130, 0, 1, 300, 99], device=DEVICE)
    tokens = 265 if layer == "routed" else 533
    x = torch.randn(tokens, 272, device=DEVICE, dtype=BF16, requires_grad=True)
    choices = (tokens, 2) if layer == "routed" else (tokens,)
    probs = torch.rand(choices, device=DEVICE, requires_grad=True)
    rows = route(torch.randint(5, choices, device=DEVICE), 5) if layer == "routed" else counts
    dy = torch.randn(tokens, 272, device=DEVICE, dtype=BF16)
    options: dict[str, object] = {"weights": mlp.quantize_weights()} if layer == "cast before" else {}
    options |= {"expected_rows": 100} if layer == "expected rows" else {}
    results = []
    for family in ("hopper", "reference"):
        mlp.zero_grad()
        x.grad = probs.grad = None
        with use_family(family):
            for _ in range(2 if layer == "deferred" else 1):
                y = mlp(x, rows, probs, **options)
                y.backward(dy)
            mlp.backward_dw()
        results.append([y.detach(), x.grad, probs.grad, *(p.grad for p in mlp.parameters())])
    assert paths
    assert all(path.endswith("Gluon") for path in paths)
    for actual, expected in zip(*results, strict=True):
        assert (actual.double() - expected.double()).norm() <= 2e-2 * expected.double().norm()


def test_the_same_bits_every_time() -> None:
    ranges = LAYOUT.rows(DEVICE)
    x, w = quantize_rows(rows_of(LAYOUT, 528)), quantize_blocks(weight_of(LAYOUT.num_experts, 520, 528))
    a, b = (quantize_columns(columns_of(LAYOUT, n), ranges) for n in (264, 520))
    first = m_grouped_gemm_fp8(x, w, ranges), k_grouped_gemm_fp8(a, b, ranges)
    for _ in range(20):
        assert torch.equal(m_grouped_gemm_fp8(x, w, ranges), first[0])
        assert torch.equal(k_grouped_gemm_fp8(a, b, ranges), first[1])
