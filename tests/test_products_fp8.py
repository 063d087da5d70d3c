"""Grouped products of FP8 operands: as those of the numbers that they stand for, in every layout and family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import Place
from exact import exact_k_grouped, exact_m_grouped
from inputs import LAYOUTS, Layout, contiguous, randn, unchanged
from places import places
from torch import Tensor

from grouped_experts import RowRanges
from grouped_experts.ops import (
    Quantized,
    k_grouped_gemm_fp8,
    k_grouped_gemm_fp8_accumulate,
    m_grouped_gemm_fp8,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
)
from grouped_experts.ops.reference.quantize import dequantize_blocks, dequantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, BF16 = torch.float32, torch.bfloat16

# The dtype of a place is that of the output; FP8 is what is multiplied.
in_every_place = pytest.mark.parametrize(
    "place", places([BF16, torch.float16, FP32], interpreted=[FP32]), indirect=True
)
by_dtype = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
LARGE = contiguous([130, 0, 1, 128, 300], spare=3)
by_layout = pytest.mark.parametrize("layout", [*LAYOUTS.values(), LARGE], ids=[*LAYOUTS, "large"])


def numbers(*shape: int, device: str) -> Tensor:
    """Any on a CPU, where sums are of fp32. On a GPU -1, -1/2, 0, 1/2 and 1: cast with one scale, their products and
    sums are exact in the 14 bits of tensor cores.
    """
    return (
        randn(*shape, dtype=FP32, device=device) if device == "cpu" else torch.randint(-2, 3, shape, device=device) / 2
    )


def source(layout: Layout, columns: int, device: str, each_row: bool = False) -> Tensor:
    """A size for every block, of a cast by columns or, each_row, by rows. NaN in rows of no expert."""
    x = numbers(layout.num_rows, columns, device=device)
    if each_row:
        for k in range(0, columns, 128):
            x[:, k : k + 128] *= torch.exp2(1.5 * randn(layout.num_rows, 1, dtype=FP32, device=device))
    else:
        for start, end in layout.bounds:
            for row in range(start, end, 128):
                x[row : min(row + 128, end)] *= torch.exp2(1.5 * randn(columns, dtype=FP32, device=device))
    x[layout.unowned()] = torch.nan
    return x


def block_weight(experts: int, columns: int, depth: int, device: str) -> Tensor:
    """A size for every block of a cast by blocks."""
    w = numbers(experts, columns, depth, device=device)
    sizes = torch.exp2(randn(experts, -(-columns // 128), -(-depth // 128), dtype=FP32, device=device))
    return w * sizes.repeat_interleave(128, 1)[:, :columns].repeat_interleave(128, 2)[..., :depth]


def assert_close(actual: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """One rounding to the dtype, and sums of fp32, of what is exact within a block."""
    bound = torch.finfo(actual.dtype).eps * exact.abs() + 2**-20 * magnitude
    assert ((actual.double() - exact).abs() <= bound + torch.finfo(actual.dtype).smallest_normal).all()


def dequantized_columns(quantized: Quantized, layout: Layout) -> Tensor:
    """(T, K), as the cast's argument was."""
    numbers = dequantize_rows(*quantized)
    x = numbers.new_zeros(layout.num_rows, numbers.shape[0])
    row = 0
    for start, end in layout.bounds:
        x[start:end] = numbers[:, row : row + end - start].t()
        row += -(-(end - start) // 128) * 128
    return x


@in_every_place
@by_dtype
@by_layout
def test_m_grouped(layout: Layout, dtype: torch.dtype, place: Place) -> None:
    columns, depth = (150, 300) if layout is LARGE else (9, 20)
    x = quantize_rows(source(layout, depth, place.device, each_row=True), dtype=dtype)
    w = quantize_blocks(block_weight(layout.num_experts, columns, depth, place.device))
    rows = layout.rows(place.device)
    with unchanged(rows.starts, rows.ends, x.scales, w.scales):
        y = m_grouped_gemm_fp8(x, w, rows, out_dtype=place.dtype)
    assert y.dtype == place.dtype
    assert not y[layout.unowned()].any()
    x_numbers, weight = dequantize_rows(*x), dequantize_blocks(*w)
    x_numbers[layout.unowned()] = 0
    exact = exact_m_grouped(x_numbers, weight, layout.bounds)
    assert_close(y, exact, exact_m_grouped(x_numbers.abs(), weight.abs(), layout.bounds))


@in_every_place
@pytest.mark.parametrize("sizes", [(1, 1), (128, 128), (129, 127), (64, 384)], ids=str)
def test_sizes(sizes: tuple[int, int], place: Place) -> None:
    columns, depth = sizes
    layout = contiguous([5, 0, 40])
    x = quantize_rows(source(layout, depth, place.device, each_row=True), power_of_two=True)
    w = block_weight(3, depth, columns, place.device)
    transposed = quantize_blocks(w, transpose=True, power_of_two=True)  # as dgrad has it
    y = m_grouped_gemm_fp8(x, transposed, layout.rows(place.device), out_dtype=place.dtype)
    x_numbers, weight = dequantize_rows(*x), dequantize_blocks(*transposed)
    exact = exact_m_grouped(x_numbers, weight, layout.bounds)
    assert_close(y, exact, exact_m_grouped(x_numbers.abs(), weight.abs(), layout.bounds))


@in_every_place
@by_dtype
@by_layout
def test_k_grouped(layout: Layout, dtype: torch.dtype, place: Place) -> None:
    rows = layout.rows(place.device)
    sizes = (150, 200) if layout is LARGE else (9, 20)
    a, b = (
        quantize_columns(source(layout, n, place.device), rows, dtype=each)
        for n, each in zip(sizes, (dtype, E4M3), strict=True)
    )
    with unchanged(rows.starts, rows.ends, a.data.view(torch.uint8)):
        c = k_grouped_gemm_fp8(a, b, rows, out_dtype=place.dtype)
    left, right = dequantized_columns(a, layout), dequantized_columns(b, layout)
    exact, magnitude = (exact_k_grouped(*each, layout.bounds) for each in ((left, right), (left.abs(), right.abs())))
    assert c.dtype == place.dtype
    assert_close(c, exact, magnitude)
    for expert in layout.empty_experts():
        assert not c[expert].any()


@in_every_place
def test_k_grouped_adds(place: Place) -> None:
    """To c of any strides; an expert without rows leaves its part as it is."""
    layout = contiguous([3, 0, 140], spare=2)
    rows = layout.rows(place.device)
    a, b = (quantize_columns(source(layout, n, place.device), rows) for n in (33, 70))
    before = randn(3, 70, 33, dtype=FP32, device=place.device).mT
    c = before.clone()
    k_grouped_gemm_fp8_accumulate(c, a, b, rows)
    fresh = k_grouped_gemm_fp8(a, b, rows, out_dtype=FP32)
    torch.testing.assert_close(c, before + fresh, rtol=1e-5, atol=1e-5)
    assert torch.equal(c[1], before[1])


@in_every_place
def test_scales_whose_product_is_too_small_for_fp32(place: Place) -> None:
    x, w = torch.full((2, 128), 2.0**-70, device=place.device), torch.full((1, 3, 128), 2.0**-70, device=place.device)
    rows = RowRanges.contiguous([2], device=place.device)
    y = m_grouped_gemm_fp8(quantize_rows(x), quantize_blocks(w), rows, out_dtype=FP32)
    assert y.tolist() == [[2.0**-133] * 3] * 2
    a, b = quantize_columns(x, rows), quantize_columns(x, rows)
    assert (k_grouped_gemm_fp8(a, b, rows, out_dtype=FP32) == 2.0**-139).all()


@in_every_place
def test_zeros_stay_exactly_zero(place: Place) -> None:
    """A token of zeros, and an expert whose weight is zero."""
    layout = contiguous([3, 2])
    x, w = source(layout, 140, place.device, each_row=True), randn(2, 5, 140, dtype=FP32, device=place.device)
    x[1], w[1] = 0, 0
    y = m_grouped_gemm_fp8(quantize_rows(x), quantize_blocks(w), layout.rows(place.device), out_dtype=place.dtype)
    assert not y[1].any()
    assert not y[3:].any()
    assert y[0].any()


@in_every_place
def test_nan_reaches_its_row_alone(place: Place) -> None:
    layout = contiguous([3, 2])
    x, w = source(layout, 140, place.device, each_row=True), randn(2, 5, 140, dtype=FP32, device=place.device)
    x[1, 0] = torch.nan
    y = m_grouped_gemm_fp8(quantize_rows(x), quantize_blocks(w), layout.rows(place.device), out_dtype=place.dtype)
    assert y[1].isnan().all()
    assert y[[0, 2, 3, 4]].isfinite().all()


@in_every_place
def test_what_a_dispatcher_sends(place: Place) -> None:
    """Scales that lie row by row, data in wider rows."""
    layout = contiguous([30, 3])
    x = quantize_rows(source(layout, 200, place.device, each_row=True))
    wide = torch.zeros(33, 256, dtype=torch.uint8, device=place.device).view(E4M3)[:, :200]
    wide.copy_(x.data)
    sent = Quantized(wide, x.scales.contiguous())
    w = quantize_blocks(randn(2, 40, 200, dtype=FP32, device=place.device))
    rows = layout.rows(place.device)
    assert sent.scales.stride() != x.scales.stride()
    assert torch.equal(m_grouped_gemm_fp8(sent, w, rows), m_grouped_gemm_fp8(x, w, rows))


# ---- the ops


def good() -> dict[str, object]:
    x, w = quantize_rows(torch.ones(4, 130)), quantize_blocks(torch.ones(2, 3, 130))
    return {"x": x, "w": w, "rows": RowRanges.contiguous([1, 3])}


def changed(**parts: Callable[[Quantized], object]) -> dict[str, object]:
    arguments = good()
    return {**arguments, **{name: change(arguments[name]) for name, change in parts.items()}}  # type: ignore[arg-type]


BAD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "x-tensor": (changed(x=lambda x: x.data), TypeError, "x: wanted a Quantized, got Tensor"),
    "x-bf16": (changed(x=lambda x: x._replace(data=x.data.bfloat16())), TypeError, "x.data: wanted dtype float8"),
    "x-scales-dtype": (
        changed(x=lambda x: x._replace(scales=x.scales.double())),
        TypeError,
        "x.scales: wanted dtype float32",
    ),
    "x-scales-shape": (
        changed(x=lambda x: x._replace(scales=x.scales[:, :1])),
        ValueError,
        r"x.scales: wanted shape \(T, ceil\(K / 128\)\) = \(4, 2\), got \(4, 1\)",
    ),
    "w-depth": (changed(w=lambda w: quantize_blocks(torch.ones(2, 3, 5))), ValueError, r"x.data: wanted shape"),
    "w-scales": (changed(w=lambda w: w._replace(scales=w.scales[:1])), ValueError, "w.scales: wanted shape"),
    "rows": (changed(rows=lambda rows: RowRanges.contiguous([4])), ValueError, "rows.starts: wanted shape"),
    "out-dtype": ({**good(), "out_dtype": torch.float64}, TypeError, "out_dtype: wanted one of"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        m_grouped_gemm_fp8(**arguments)


def test_bad_arguments_of_a_contraction() -> None:
    rows = RowRanges.contiguous([1, 3])
    a, b = quantize_columns(torch.ones(4, 5), rows), quantize_columns(torch.ones(4, 7), rows)
    c = torch.zeros(2, 5, 7)
    for arguments, error, message in (
        ((c.half(), a, b), TypeError, "c: wanted dtype float32, got torch.float16"),
        ((c[:1], a, b), ValueError, r"c: wanted shape \(E, M, N\) = \(2, 5, 7\)"),
        ((c, a, quantize_rows(torch.ones(4, 7))), ValueError, "b.data: wanted shape"),
        ((c, quantize_rows(torch.ones(4, 130)), b), ValueError, r"a.scales: wanted shape \(M, P / 128\)"),
    ):
        with pytest.raises(error, match=message):
            k_grouped_gemm_fp8_accumulate(*arguments, rows)
    for several, message in (
        ([100, 300], "rows: wanted at most 2 blocks of 128 rows, got 4"),
        (None, "rows: wanted a"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            k_grouped_gemm_fp8(a, b, several and RowRanges.contiguous(several))
    with pytest.raises(TypeError, match="c: wanted a tensor, got NoneType"):
        k_grouped_gemm_fp8_accumulate(None, a, b, rows)
    with pytest.raises(ValueError, match="wanted c without requires_grad"):
        k_grouped_gemm_fp8_accumulate(c.clone().requires_grad_(), a, b, rows)
    assert not c.any()


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_opcheck(device: str) -> None:
    layout = contiguous([3, 0, 40], spare=1)
    rows = layout.rows(device)
    x = randn(44, 150, dtype=FP32, device=device)
    x_rows, x_columns = quantize_rows(x), quantize_columns(x, rows)
    w = quantize_blocks(randn(3, 20, 150, dtype=FP32, device=device))
    ops = torch.ops.grouped_experts
    utils = ("test_faketensor", "test_autograd_registration")  # the check of schemas multiplies FP8, which torch cannot
    operands = *x_columns, *x_columns, rows.starts, rows.ends
    for op, arguments in (
        (ops.m_grouped_gemm_fp8, (*x_rows, *w, rows.starts, rows.ends, BF16)),
        (ops.k_grouped_gemm_fp8, (*operands, BF16)),
        (ops.k_grouped_gemm_fp8_accumulate, (torch.zeros(3, 150, 150, device=device), *operands)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=utils)
