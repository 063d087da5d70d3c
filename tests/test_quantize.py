"""Blockwise casts to FP8: values, scales, borders of experts and of blocks, in every family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import Place
from hypothesis import given
from hypothesis import strategies as st
from inputs import LAYOUTS, Layout, contiguous, randn, random_rows, unchanged
from places import places
from torch import Tensor

from grouped_experts import RowRanges
from grouped_experts.ops import (
    Quantized,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    quantize_rows_and_columns,
    reference,
)
from grouped_experts.ops.families import choose_family
from grouped_experts.ops.reference.quantize import dequantize_blocks, dequantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32 = torch.float32
# (largest number, bits of the mantissa, smallest normal exponent)
FORMATS = {E4M3: (448.0, 3, -6), E5M2: (57344.0, 2, -14)}

in_every_place = pytest.mark.parametrize("place", places(interpreted=[torch.float16]), indirect=True)
by_dtype = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
by_scale = pytest.mark.parametrize("power_of_two", [False, True], ids=["any-scale", "power-of-two"])


def spread(*shape: int, place: Place) -> Tensor:
    """Numbers of many magnitudes, zeros, and rows of zeros."""
    x = randn(*shape, dtype=FP32, device=place.device) * torch.exp2(randn(*shape, dtype=FP32, device=place.device) * 4)
    x[torch.rand(shape, device=place.device) < 0.1] = 0
    x[..., ::7, :] = 0
    return x.clamp(-60000, 60000).to(place.dtype)


def bits(data: Tensor) -> Tensor:
    """Every NaN as one, and zeros of either sign."""
    return torch.where(data.float().isnan(), 0x7F, data.view(torch.uint8).int())


def assert_same(actual: Quantized, expected: Quantized) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
    assert torch.equal(actual.scales, expected.scales)
    assert torch.equal(bits(actual.data), bits(expected.data))


def assert_rounded(x: Tensor, quantized: Tensor, data: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    """Each number within half of what the last bit of its FP8 neighbour is worth, and two roundings of fp32."""
    _, mantissa, smallest = FORMATS[dtype]
    x, quantized, scales = x.double(), quantized.double(), scales.double()
    exponent = torch.floor(torch.log2((x / scales).abs().clamp(min=2.0**smallest)))
    half = torch.exp2(exponent - mantissa - 1) * scales
    assert ((x - quantized).abs() <= half * (1 + 2**-20) + x.abs() * 2**-22).all()
    assert (quantized[x == 0] == 0).all()
    assert (data.float().abs() <= FORMATS[dtype][0]).all()


def each_scale(scales: Tensor, columns: int) -> Tensor:
    return scales.repeat_interleave(128, -1)[..., :columns]


# ---- values


@in_every_place
@pytest.mark.parametrize("size", [1, 4, 30, 33])
def test_columns_of_scales_start_at_multiples_of_16_bytes(size: int, place: Place) -> None:
    x = spread(size, 300, place=place)
    rows, columns = quantize_rows_and_columns(x, RowRanges.contiguous([size], device=place.device))
    tall = quantize_columns(x.mT, RowRanges.contiguous([300], device=place.device))
    for scales in (quantize_rows(x).scales, rows.scales, columns.scales, tall.scales):
        assert scales.stride() == (1, -(-scales.shape[0] // 4) * 4)
        assert scales.data_ptr() % 16 == 0


@in_every_place
@by_dtype
@by_scale
@pytest.mark.parametrize("shape", [(40, 200), (1, 1), (33, 128), (5, 129), (128, 640), (0, 5), (5, 0)], ids=str)
def test_rows(shape: tuple[int, int], power_of_two: bool, dtype: torch.dtype, place: Place) -> None:
    x = spread(*shape, place=place)
    with unchanged(x):
        actual = quantize_rows(x, dtype=dtype, power_of_two=power_of_two)
    assert_same(actual, Quantized(*reference.quantize_rows(x, dtype, power_of_two)))
    assert_rounded(x, dequantize_rows(*actual), actual.data, each_scale(actual.scales, shape[1]), dtype)
    if x.any():
        assert actual.data.float().abs().max() == FORMATS[dtype][0] or power_of_two  # all of the range is used


@in_every_place
@pytest.mark.parametrize("layout", [LAYOUTS["uneven"], contiguous([70, 0, 1], spare=9)], ids=["uneven", "more"])
def test_rows_of_experts_alone(layout: Layout, place: Place) -> None:
    """Bit for bit those of a cast of all rows; NaN in the others."""
    x = random_rows(layout, 140, dtype=place.dtype, device=place.device)
    owned = [row for start, end in layout.bounds for row in range(start, end)]
    actual, whole = quantize_rows(x, rows=layout.rows(place.device)), quantize_rows(x.nan_to_num(0))
    assert torch.equal(actual.scales[owned], whole.scales[owned])
    assert torch.equal(bits(actual.data)[owned], bits(whole.data)[owned])


@in_every_place
@by_dtype
@by_scale
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("shape", [(2, 200, 150), (1, 1, 1), (3, 128, 256), (0, 3, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_blocks(
    shape: tuple[int, int, int], transpose: bool, power_of_two: bool, dtype: torch.dtype, place: Place
) -> None:
    w = spread(*shape, place=place)
    with unchanged(w):
        actual = quantize_blocks(w, dtype=dtype, power_of_two=power_of_two, transpose=transpose)
    assert_same(actual, Quantized(*reference.quantize_blocks(w, dtype, power_of_two, transpose)))
    w = w.mT if transpose else w
    each = actual.scales.repeat_interleave(128, 1)[:, : w.shape[1]]
    assert_rounded(w, dequantize_blocks(*actual), actual.data, each_scale(each, w.shape[2]), dtype)


def test_a_transposed_block_is_the_block() -> None:
    w = randn(2, 300, 200, dtype=FP32, device="cpu")
    plain, transposed = quantize_blocks(w), quantize_blocks(w, transpose=True)
    assert torch.equal(plain.data.float().mT, transposed.data.float())
    assert torch.equal(plain.scales.mT, transposed.scales)


def segments(layout: Layout) -> list[tuple[int, int, int]]:
    """First row, row behind the last and first padded row of every expert."""
    made, row = [], 0
    for start, end in layout.bounds:
        made.append((start, end, row))
        row += -(-(end - start) // 128) * 128
    return made


LARGE = contiguous([130, 0, 1, 128, 300], spare=3)


@in_every_place
@by_dtype
@by_scale
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), LARGE], ids=[*LAYOUTS, "large"])
def test_columns(layout: Layout, power_of_two: bool, dtype: torch.dtype, place: Place) -> None:
    """Every expert as if alone, whatever the rows of no expert hold, and zeros behind its last."""
    columns = 140 if layout is LARGE else 9
    x = spread(layout.num_rows, columns, place=place)
    x[layout.unowned()] = torch.nan
    rows = layout.rows(place.device)
    with unchanged(x, rows.starts, rows.ends):
        actual = quantize_columns(x, rows, dtype=dtype, power_of_two=power_of_two)
        of_rows, of_columns = quantize_rows_and_columns(x, rows, dtype=dtype, power_of_two=power_of_two)
    padded = 128 * (layout.num_rows // 128 + layout.num_experts)
    assert actual.data.shape == (columns, padded)
    assert actual.scales.shape == (columns, padded // 128)
    for start, end, row in segments(layout):
        alone = Quantized(*reference.quantize_rows(x[start:end].t(), dtype, power_of_two))
        blocks = slice(row // 128, row // 128 + alone.scales.shape[1])
        for made in (actual, of_columns):
            assert torch.equal(made.data.float()[:, row : row + end - start], alone.data.float())
            assert not made.data.float()[:, row + end - start : blocks.stop * 128].any()
            assert torch.equal(made.scales[:, blocks], alone.scales)
    owned = [row for start, end in layout.bounds for row in range(start, end)]
    expected = reference.quantize_rows(x[owned], dtype, power_of_two)
    assert torch.equal(of_rows.scales[owned], expected[1])
    assert torch.equal(bits(of_rows.data[owned]), bits(expected[0]))


@in_every_place
@by_dtype
def test_columns_of_rows_that_are_cast(dtype: torch.dtype, place: Place) -> None:
    """As of the numbers that they stand for; scales of any strides."""
    x, rows = spread(LARGE.num_rows, 140, place=place), LARGE.rows(place.device)
    x[LARGE.unowned()] = torch.nan
    sent = quantize_rows(x, dtype=dtype)
    expected = quantize_columns(dequantize_rows(*sent), rows)
    blocks = sum(-(-(end - start) // 128) for start, end in LARGE.bounds)
    for scales in (sent.scales, sent.scales.contiguous()):
        actual = quantize_columns(Quantized(sent.data, scales), rows)
        assert torch.equal(bits(actual.data[:, : 128 * blocks]), bits(expected.data[:, : 128 * blocks]))
        assert torch.equal(actual.scales[:, :blocks], expected.scales[:, :blocks])


def test_no_scale_crosses_experts() -> None:
    """Rows of an expert a million times as large leave those of its neighbour as they would be alone."""
    counts = [44, 3, 0, 81]
    x = randn(128, 20, dtype=FP32, device="cpu")
    x[:44] *= 1000
    x[44:47] *= 0.001
    made = quantize_columns(x, RowRanges.contiguous(counts))
    alone = quantize_columns(x[44:47], RowRanges.contiguous([3]))
    assert torch.equal(made.data[:, 128:131].float(), alone.data[:, :3].float())
    assert torch.equal(made.scales[:, 1], alone.scales[:, 0])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, in the interpreter
@in_every_place
@by_dtype
def test_what_is_not_finite_spoils_its_block_alone(dtype: torch.dtype, place: Place) -> None:
    x = spread(5, 300, place=place)
    x[1, 3], x[2, 130], x[3, 299] = torch.nan, torch.inf, -torch.inf
    y = dequantize_rows(*quantize_rows(x, dtype=dtype))
    nan = y.isnan()
    assert nan[1, :128].all()
    assert nan[2, 128:256].all()
    assert nan[3, 256:].all()
    assert nan.sum() == 128 + 128 + 44


@in_every_place
def test_the_smallest_numbers_and_the_largest(place: Place) -> None:
    finfo = torch.finfo(place.dtype)
    x = torch.zeros(4, 128, dtype=place.dtype, device=place.device)
    x[0, 0], x[1, 0], x[1, 1], x[2, 0] = finfo.max, finfo.tiny, finfo.tiny / 2, -finfo.max
    if place.dtype == torch.float64:
        x = x.clamp(-torch.finfo(FP32).max, torch.finfo(FP32).max)
        x[1] = 0
    y = dequantize_rows(*quantize_rows(x))
    assert y.isfinite().all()
    assert (y - x.float()).abs().max() <= 2.0**-20 * x.float().abs().max()
    assert not y[3].any()


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "every-second": lambda t: torch.stack([t, t], -1)[..., 0],
    "wide-rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded": lambda t: t[..., :1].expand(t.shape),
}


@in_every_place
@pytest.mark.parametrize("how", STRIDES)
def test_any_strides(how: str, place: Place) -> None:
    layout = contiguous([20, 0, 12])
    x, w = STRIDES[how](spread(32, 150, place=place)), STRIDES[how](spread(2, 40, 150, place=place))
    rows = layout.rows(place.device)
    for run in (
        quantize_rows,
        lambda x: quantize_columns(x, rows).data[:, :128],
        lambda x: quantize_rows_and_columns(x, rows)[0],
    ):
        actual, expected = run(x), run(x.contiguous())
        assert torch.equal(bits(actual[0]), bits(expected[0]))
    assert_same(quantize_blocks(w), quantize_blocks(w.contiguous()))


# ---- properties


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """Up to three blocks of numbers with any exponents."""
    size = draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    exponents = torch.randint(draw(st.integers(-120, 0)), draw(st.integers(1, 60)), (1, size), generator=generator)
    return torch.randn(1, size, generator=generator) * torch.exp2(exponents.float())


@given(blocks(), st.sampled_from([E4M3, E5M2]), st.booleans())
def test_round_trips(x: Tensor, dtype: torch.dtype, power_of_two: bool) -> None:
    quantized = quantize_rows(x, dtype=dtype, power_of_two=power_of_two)
    y = dequantize_rows(*quantized)
    assert_rounded(x, y, quantized.data, each_scale(quantized.scales, x.shape[1]), dtype)
    if power_of_two:  # exact scales: what was quantised once stays as it is, with the scale that it has
        mantissa, _ = torch.frexp(quantized.scales)
        assert (mantissa == 0.5).all()
        assert torch.equal(dequantize_rows(*quantize_rows(y, dtype=dtype, power_of_two=True)), y)
    doubled = quantize_rows(2 * x, dtype=dtype, power_of_two=power_of_two)
    normal = quantized.scales > 2.0**-125
    assert torch.equal(doubled.scales[normal], 2 * quantized.scales[normal])
    if normal.all():
        assert torch.equal(doubled.data.float(), quantized.data.float())


@given(blocks(), st.sampled_from([E4M3, E5M2]))
def test_power_of_two_scales_are_the_next_ones(x: Tensor, dtype: torch.dtype) -> None:
    exact = quantize_rows(x, dtype=dtype).scales
    rounded = quantize_rows(x, dtype=dtype, power_of_two=True).scales
    assert (rounded >= exact).all()
    assert (rounded < 2 * exact.clamp(min=2.0**-126) * (1 + 2**-23)).all()


# ---- the ops


BAD: dict[str, tuple[Callable[[Tensor], object], type[Exception], str]] = {
    "x-int": (lambda x: quantize_rows(x.int()), TypeError, "x: wanted a dtype of .*, got int32"),
    "x-3d": (lambda x: quantize_rows(x[None]), ValueError, r"x: wanted shape \(T, K\)"),
    "w-2d": (quantize_blocks, ValueError, r"w: wanted shape \(E, N, K\)"),
    "dtype": (
        lambda x: quantize_rows(x, dtype=torch.int8),
        TypeError,
        "dtype: wanted float8_e4m3fn or float8_e5m2, got",
    ),
    "scales": (
        lambda x: quantize_columns(quantize_rows(x)._replace(scales=x), RowRanges.contiguous([4])),
        ValueError,
        r"x.scales: wanted shape \(T, ceil\(K / 128\)\) = \(4, 1\), got \(4, 3\)",
    ),
    "rows": (lambda x: quantize_columns(x, [2, 2]), TypeError, "rows: wanted a RowRanges, got list"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(call: Callable[[Tensor], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(4, 3))


def test_no_gradient_goes_through_a_cast(device: str) -> None:
    x = torch.ones(2, 3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="not differentiable"):
        quantize_rows(x).scales.sum().backward()


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_opcheck(device: str) -> None:
    x, w = randn(40, 150, dtype=FP32, device=device), randn(2, 150, 140, dtype=FP32, device=device)
    rows = RowRanges.contiguous([30, 8], num_rows=40, device=device)
    ops = torch.ops.grouped_experts
    for power_of_two in (False, True):
        torch.library.opcheck(ops.quantize_rows.default, (x, E4M3, power_of_two))
        for transpose in (False, True):
            torch.library.opcheck(ops.quantize_blocks.default, (w, E5M2, power_of_two, transpose))
    # Of what is undefined behind the last expert's no two runs need agree.
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    for op in (ops.quantize_columns.default, ops.quantize_rows_and_columns.default):
        torch.library.opcheck(op, (x, rows.starts, rows.ends, E4M3, False), test_utils=utils)


def test_a_gpu_that_does_not_know_fp8_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    from grouped_experts.ops import families

    monkeypatch.setattr(families, "has_triton", lambda: True)
    for capability, expected in (
        ((8, 0), "reference"),
        ((8, 6), "reference"),
        ((8, 9), "portable"),
        ((12, 0), "portable"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        families._choice.cache_clear()
        assert choose_family(torch.device("cuda"), [torch.float16, E4M3]) == expected
        assert choose_family(torch.device("cuda"), [torch.float16]) == "portable"
    families._choice.cache_clear()
