"""FP4 weights: the cast, what it stands for, and its products with FP8 rows, in every layout and family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import Place
from exact import assert_rounded_once, exact_m_grouped
from hypothesis import given
from hypothesis import strategies as st
from inputs import DTYPES, LAYOUTS, Layout, contiguous, randn, unchanged
from places import places
from torch import Tensor

from grouped_experts import RowRanges
from grouped_experts.ops import Quantized, QuantizedFP4, dequantize_fp4, m_grouped_gemm_fp8_fp4, quantize_fp4
from grouped_experts.ops.quantize import quantize_rows
from grouped_experts.ops.reference.quantize import dequantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # those of e2m1 without a sign, by their bits

# The dtype of a place is that of the output.
in_every_place = pytest.mark.parametrize("place", places([BF16, FP16, FP32], interpreted=[FP32]), indirect=True)
by_dtype = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
LARGE = contiguous([130, 0, 1, 128, 300], spare=3)
by_layout = pytest.mark.parametrize("layout", [*LAYOUTS.values(), LARGE], ids=[*LAYOUTS, "large"])
# NumPy's, in the interpreter
ignore_nan = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def codes_of(w: QuantizedFP4) -> Tensor:
    return torch.stack((w.data & 15, w.data >> 4), 3).flatten(2)


def each_scale(w: QuantizedFP4) -> Tensor:
    """(E, N, K) fp64."""
    return torch.exp2(w.scales.double() - 127).repeat_interleave(32, 2)


def nearest(ratio: Tensor) -> Tensor:
    """The bits of the nearest e2m1 number of |ratio| in fp64; of two as near, the even ones."""
    distance = (ratio.abs()[..., None] - torch.tensor(NUMBERS, dtype=torch.float64)).abs()
    found = (distance == distance.amin(-1, keepdim=True)).int()
    even = found * torch.tensor([2, 1] * 4)
    return even.argmax(-1)


# ---- the cast


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Of any exponents; now and then multiples of 1/4 of a power of two, where ties are, and zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 32 * draw(st.integers(1, 4))
    exponents = torch.randint(draw(st.integers(-148, -1)), draw(st.integers(1, 120)), shape, generator=generator)
    near = draw(st.booleans())  # of one size: otherwise most numbers of a block are small beside the largest
    exponents = exponents[..., :1] if near else exponents
    w = torch.randn(shape, generator=generator)
    if draw(st.booleans()):
        w = (4 * w).round() / 4
    return torch.ldexp(w.double(), exponents).float()


@given(weights())
def test_every_number_is_the_nearest_with_the_least_scale(w: Tensor) -> None:
    q = quantize_fp4(w)
    scales, codes = each_scale(q), codes_of(q)
    ratio = w.double() / scales
    assert torch.equal(codes & 7, nearest(ratio).byte())
    assert torch.equal(codes >> 3, w.signbit().byte())
    assert (ratio.abs() <= 6).all()  # nothing is clipped
    largest = ratio.abs().unflatten(2, (-1, 32)).amax(3)
    assert ((largest > 3) | (q.scales == 1)).all()
    step = torch.where(ratio.abs() < 2, 0.5, torch.where(ratio.abs() < 4, 1, 2))
    assert ((w - dequantize_fp4(q, torch.float64)).abs() <= step / 2 * scales).all()


@given(weights(), st.integers(-60, 60))
def test_a_weight_times_a_power_of_two_has_the_same_numbers(w: Tensor, power: int) -> None:
    w = w.where(w.abs() > 2.0**-60, 0.0).clamp(-(2.0**60), 2.0**60)
    q, scaled = quantize_fp4(w), quantize_fp4(torch.ldexp(w, torch.tensor(power)))
    assert torch.equal(scaled.data, q.data)
    any_number = w.unflatten(2, (-1, 32)).any(3)
    assert torch.equal(scaled.scales.int(), q.scales.int() + torch.where(any_number, power, 0))


@given(st.integers(0, 2**31))
def test_numbers_of_fp4_stay_as_they_are(seed: int) -> None:
    """With any scale; the scale need not be the one that there was."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (2, 3, 48), dtype=torch.uint8, generator=generator)
    scales = torch.randint(2, 252, (2, 3, 3), dtype=torch.uint8, generator=generator)
    w = dequantize_fp4(QuantizedFP4(data, scales))
    again = dequantize_fp4(quantize_fp4(w))
    assert torch.equal(again, w)
    assert torch.equal(again.signbit(), w.signbit())


def test_bytes(device: str) -> None:
    """As a program in another language would read them."""
    w = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)] * 2, device=device)
    q = quantize_fp4(torch.stack([w, w / 4, w * 2.0**-125, w * 0]).view(1, 4, 32))
    half = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert q.data[0].tolist() == [half * 2] * 3 + [[0, 0, 0, 0, 0x88, 0x88, 0x88, 0x88] * 2]
    assert q.scales[0].tolist() == [[127], [125], [2], [1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cast_of_any_dtype_and_strides(dtype: torch.dtype, device: str) -> None:
    w = randn(2, 5, 96, dtype=dtype, device=device)
    expected = quantize_fp4(w.float())
    for same in (w, w.mT.contiguous().mT, torch.stack([w, w], 3)[..., 0]):
        with unchanged(same):
            q = quantize_fp4(same)
        for actual, wanted in zip(q, expected, strict=True):
            assert actual.dtype == torch.uint8
            assert actual.is_contiguous()
            assert torch.equal(actual, wanted)
    assert q.data.shape == (2, 5, 48)
    assert q.scales.shape == (2, 5, 3)
    assert torch.equal(dequantize_fp4(q, dtype).double(), dequantize_fp4(q, torch.float64))


@pytest.mark.parametrize("shape", [(0, 3, 32), (2, 0, 32), (2, 3, 0)], ids=str)
def test_a_cast_of_nothing(shape: tuple[int, ...], device: str) -> None:
    assert dequantize_fp4(quantize_fp4(torch.ones(shape, device=device))).shape == shape


def test_what_is_not_finite_spoils_its_block_alone(device: str) -> None:
    w = randn(1, 4, 96, dtype=FP32, device=device)
    w[0, 0, 31], w[0, 1, 32], w[0, 2, 95] = torch.nan, torch.inf, -torch.inf
    q = quantize_fp4(w)
    nan = dequantize_fp4(q).isnan().view(4, 3, 32)
    assert (q.scales[0] == 255).nonzero().tolist() == [[0, 0], [1, 1], [2, 2]]
    assert nan[0, 0].all()
    assert nan[1, 1].all()
    assert nan[2, 2].all()
    assert nan.sum() == 96


def test_the_ends_of_fp32(device: str) -> None:
    tiny, most = torch.finfo(FP32).tiny, torch.finfo(FP32).max
    sizes = torch.tensor([tiny / 2**23, tiny / 2, tiny, 2.0**-124, 6 * tiny, 6.5 * tiny, 6 * 2.0**125, most])
    w = sizes.to(device)[None, :, None].expand(1, 8, 32)
    q = quantize_fp4(w)
    assert q.scales.flatten().tolist() == [1, 1, 1, 1, 1, 2, 252, 253]
    assert dequantize_fp4(q)[0, :, 0].tolist() == [
        0,
        tiny / 2,
        tiny,
        2.0**-124,
        6 * tiny,
        6 * tiny,
        6 * 2.0**125,
        torch.inf,
    ]
    assert dequantize_fp4(q, torch.float64)[0, -1, 0] == 2.0**128
    beyond = torch.full((1, 1, 32), 2.0**128, dtype=torch.float64, device=device)
    assert dequantize_fp4(quantize_fp4(beyond)).isnan().all()


def test_scales_at_their_ends(device: str) -> None:
    data = torch.tensor([0x21], dtype=torch.uint8, device=device).expand(1, 3, 16)
    scales = torch.tensor([0, 254, 255], dtype=torch.uint8, device=device).view(1, 3, 1)
    w = dequantize_fp4(QuantizedFP4(data, scales))[0]
    assert w[:2, :2].tolist() == [[2.0**-128, 2.0**-127], [2.0**126, 2.0**127]]
    assert w[2].isnan().all()


# ---- the product


def source(layout: Layout, depth: int, device: str, dtype: torch.dtype = E4M3) -> Quantized:
    """A size for every block; NaN in rows of no expert."""
    x = randn(layout.num_rows, depth, dtype=FP32, device=device)
    for k in range(0, depth, 128):
        x[:, k : k + 128] *= torch.exp2(randn(layout.num_rows, 1, dtype=FP32, device=device))
    x[layout.unowned()] = torch.nan
    return quantize_rows(x, dtype=dtype)


def weight(experts: int, columns: int, depth: int, device: str) -> QuantizedFP4:
    """A size for every block."""
    w = randn(experts, columns, depth // 32, 32, dtype=FP32, device=device)
    return quantize_fp4((w * torch.exp2(randn(experts, columns, depth // 32, 1, dtype=FP32, device=device))).flatten(2))


def assert_right(y: Tensor, x: Quantized, w: QuantizedFP4, layout: Layout) -> None:
    """One rounding to the dtype, of a sum in fp32."""
    numbers, weight = dequantize_rows(*x).double(), dequantize_fp4(w, torch.float64)
    numbers[layout.unowned()] = 0
    exact = exact_m_grouped(numbers, weight, layout.bounds)
    magnitude = exact_m_grouped(numbers.abs(), weight.abs(), layout.bounds)
    assert_rounded_once(y, exact, magnitude, x.data.shape[1], accumulated_in=FP32)


@in_every_place
@by_dtype
@by_layout
def test_layouts(layout: Layout, dtype: torch.dtype, place: Place) -> None:
    columns, depth = (150, 288) if layout is LARGE else (9, 96)
    x, w = source(layout, depth, place.device, dtype), weight(layout.num_experts, columns, depth, place.device)
    rows = layout.rows(place.device)
    with unchanged(rows.starts, rows.ends, x.scales, *w):
        y = m_grouped_gemm_fp8_fp4(x, w, rows, out_dtype=place.dtype)
    assert y.dtype == place.dtype
    assert not y[layout.unowned()].any()
    assert_right(y, x, w, layout)


@in_every_place
@pytest.mark.parametrize("sizes", [(1, 32), (128, 128), (129, 160), (64, 384)], ids=str)
def test_sizes(sizes: tuple[int, int], place: Place) -> None:
    layout = contiguous([5, 0, 40])
    x, w = source(layout, sizes[1], place.device), weight(3, *sizes, place.device)
    y = m_grouped_gemm_fp8_fp4(x, w, layout.rows(place.device), out_dtype=place.dtype)
    assert_right(y, x, w, layout)


@in_every_place
@pytest.mark.parametrize("shape", [(0, 3, 32), (4, 0, 32), (4, 3, 0)], ids=str)
def test_empty_sizes(shape: tuple[int, int, int], place: Place) -> None:
    rows, columns, depth = shape
    layout = contiguous([rows, 0])
    y = m_grouped_gemm_fp8_fp4(
        source(layout, depth, place.device),
        weight(2, columns, depth, place.device),
        layout.rows(place.device),
        out_dtype=place.dtype,
    )
    assert torch.equal(y, torch.zeros(rows, columns, dtype=place.dtype, device=place.device))


@in_every_place
@pytest.mark.parametrize("expected_rows", [16, 32, 64, 128])
def test_every_tile(expected_rows: int, place: Place) -> None:
    layout = contiguous([150, 0, 3], spare=2)
    x, w = source(layout, 160, place.device, E5M2), weight(3, 140, 160, place.device)
    y = m_grouped_gemm_fp8_fp4(x, w, layout.rows(place.device), out_dtype=place.dtype, expected_rows=expected_rows)
    assert not y[layout.unowned()].any()
    assert_right(y, x, w, layout)


@ignore_nan
@pytest.mark.parametrize("place", places([FP32], interpreted=[FP32]), indirect=True)
@by_dtype
@pytest.mark.parametrize(("size", "first", "last"), [(256, 0, 244), (1, 8, 252)], ids=["small-scales", "large-scales"])
def test_every_number_with_every_scale(size: int, first: int, last: int, dtype: torch.dtype, place: Place) -> None:
    """To the bit: rows of a single number, once with blocks' sums that are normal numbers, once with finite ones."""
    scales = torch.arange(first, last + 1, dtype=torch.uint8, device=place.device).view(1, -1, 1)
    data = torch.arange(0x10, 0x110, 0x22, dtype=torch.int32, device=place.device).byte()  # all of 0, 1, .. 15
    assert codes_of(QuantizedFP4(data.view(1, 1, 8), scales)).flatten().tolist() == list(range(16))
    w = QuantizedFP4(data.repeat(2).expand(1, last + 1 - first, 16), scales)
    x = Quantized(
        (size * torch.eye(32, device=place.device)).to(dtype), torch.full((32, 1), 1 / size, device=place.device)
    )
    rows = RowRanges.contiguous([32], device=place.device)
    y = m_grouped_gemm_fp8_fp4(x, w, rows, out_dtype=FP32)
    expected = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)] * 2, dtype=torch.float64)
    expected = expected[:, None] * torch.exp2(torch.arange(first, last + 1, dtype=torch.float64) - 127)
    assert torch.equal(y.cpu().double(), expected)


@ignore_nan
@in_every_place
def test_a_scale_that_is_nan_reaches_its_column_alone(place: Place) -> None:
    """NaN and not infinity, of zeros as well."""
    layout = contiguous([3, 0, 2])
    x = quantize_rows(randn(5, 160, dtype=FP32, device=place.device).abs())
    w = weight(3, 6, 160, place.device)
    w.scales[0, 1:3, 4] = 255
    w.data[0, 1, 64:], w.data[0, 2, 64:] = 0, 0x22
    w.scales[1] = 255
    y = m_grouped_gemm_fp8_fp4(x, w, layout.rows(place.device), out_dtype=place.dtype)
    assert y[:3, 1:3].isnan().all()
    assert y.isnan().sum() == 6


@ignore_nan
@in_every_place
def test_what_is_not_finite_in_a_row_stays_there(place: Place) -> None:
    layout = contiguous([3, 2])
    x = quantize_rows(randn(5, 160, dtype=FP32, device=place.device), dtype=E5M2)
    w = QuantizedFP4(
        torch.full_like(weight(2, 6, 160, "cpu").data, 0x22, device=place.device),
        weight(2, 6, 160, place.device).scales,
    )
    x.data[1, 140], x.data[2, 0], x.scales[3, 1] = torch.inf, torch.nan, torch.nan
    y = m_grouped_gemm_fp8_fp4(x, w, layout.rows(place.device), out_dtype=place.dtype)
    assert (y[1] == torch.inf).all()
    assert y[2].isnan().all()
    assert y[3].isnan().all()
    assert y[[0, 4]].isfinite().all()


@ignore_nan
@in_every_place
@pytest.mark.parametrize("depth", [96, 160])
def test_any_strides_and_nan_around(depth: int, place: Place) -> None:
    """As parts of wider tensors, column by column, and one weight for all experts."""
    layout = contiguous([20, 3])
    x, w = source(layout, depth, place.device), weight(2, 7, depth, place.device)
    rows = layout.rows(place.device)
    expected = m_grouped_gemm_fp8_fp4(x, w, rows, out_dtype=place.dtype)

    def around(t: Tensor) -> Tensor:
        """0xFF behind every row and before the first: a scale that is NaN, numbers that are -6."""
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), 255, dtype=torch.uint8, device=t.device)
        wide[..., 1 : t.shape[-1] + 1] = t
        return wide[..., 1 : t.shape[-1] + 1]

    wide_x = Quantized(around(x.data.view(torch.uint8)).view(x.data.dtype), x.scales.contiguous())
    for each in (QuantizedFP4(*map(around, w)), QuantizedFP4(*(t.mT.contiguous().mT for t in w))):
        y = m_grouped_gemm_fp8_fp4(wide_x, each, rows, out_dtype=place.dtype)
        assert torch.equal(y, expected)
    shared = m_grouped_gemm_fp8_fp4(x, QuantizedFP4(*(t[:1].expand_as(t) for t in w)), rows, out_dtype=place.dtype)
    assert torch.equal(shared[:20], expected[:20])
    assert not torch.equal(shared[20:], expected[20:])


# ---- the op


def good() -> dict[str, object]:
    x, w = quantize_rows(torch.ones(4, 160)), quantize_fp4(torch.ones(2, 3, 160))
    return {"x": x, "w": w, "rows": RowRanges.contiguous([1, 3])}


def changed(**parts: Callable[[object], object]) -> dict[str, object]:
    arguments = good()
    return {**arguments, **{name: change(arguments[name]) for name, change in parts.items()}}


BAD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "x-tensor": (changed(x=lambda x: x.data), TypeError, "x: wanted a Quantized, got Tensor"),
    "x-depth": (changed(x=lambda _: quantize_rows(torch.ones(4, 128))), ValueError, r"x.data: wanted shape \(T, K\)"),
    "w-fp8": (changed(w=lambda w: Quantized(*w)), TypeError, "w: wanted a QuantizedFP4, got Quantized"),
    "w-none": (changed(w=lambda w: w._replace(scales=None)), TypeError, "w.scales: wanted a tensor, got NoneType"),
    "w-int8": (changed(w=lambda w: w._replace(data=w.data.char())), TypeError, "w.data: wanted dtype uint8, got"),
    "w-scales-fp32": (
        changed(w=lambda w: w._replace(scales=w.scales.float())),
        TypeError,
        "w.scales: wanted dtype uint8, got torch.float32",
    ),
    "w-2d": (changed(w=lambda w: w._replace(data=w.data[0])), ValueError, r"w.data: wanted shape \(E, N, K / 2\)"),
    "w-depth": (
        changed(w=lambda w: w._replace(data=w.data[..., :72])),
        ValueError,
        r"w.data: wanted \(E, N, K / 2\) with K a multiple of 32, got \(2, 3, 72\)",
    ),
    "w-scales": (
        changed(w=lambda w: w._replace(scales=w.scales[..., :4])),
        ValueError,
        r"w.scales: wanted shape \(E, N, K / 32\) = \(2, 3, 5\), got \(2, 3, 4\)",
    ),
    "rows": (changed(rows=lambda _: RowRanges.contiguous([4])), ValueError, "rows.starts: wanted shape"),
    "out-dtype": ({**good(), "out_dtype": torch.float64}, TypeError, "out_dtype: wanted one of"),
    "expected-rows": ({**good(), "expected_rows": 0}, ValueError, "expected_rows: wanted an int >= 1, got 0"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        m_grouped_gemm_fp8_fp4(**arguments)


def test_bad_arguments_of_the_casts() -> None:
    q = quantize_fp4(torch.ones(2, 3, 32))
    for call, error, message in (
        (lambda: quantize_fp4(torch.ones(2, 3, 33)), ValueError, r"w: wanted .* K a multiple of 32, got \(2, 3, 33\)"),
        (lambda: quantize_fp4(torch.ones(3, 32)), ValueError, r"w: wanted shape \(E, N, K\)"),
        (lambda: quantize_fp4(q.data), TypeError, "w: wanted a dtype of .*, got uint8"),
        (lambda: dequantize_fp4(tuple(q)), TypeError, "w: wanted a QuantizedFP4, got tuple"),
        (lambda: dequantize_fp4(q, torch.int32), TypeError, "dtype: wanted one of .*, got torch.int32"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_no_gradient_goes_through() -> None:
    arguments = good()
    arguments["x"].scales.requires_grad_()
    with pytest.raises(RuntimeError, match="not differentiable"):
        m_grouped_gemm_fp8_fp4(**arguments).sum().backward()
    assert not quantize_fp4(torch.ones(1, 1, 32, requires_grad=True)).data.requires_grad


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_opcheck(device: str) -> None:
    layout = contiguous([3, 0, 40], spare=1)
    rows = layout.rows(device)
    x, w = source(layout, 160, device), weight(3, 20, 160, device)
    torch.library.opcheck(
        torch.ops.grouped_experts.m_grouped_gemm_fp8_fp4.default,
        (*x, *w, rows.starts, rows.ends, BF16),
        test_utils=("test_faketensor", "test_autograd_registration"),  # that of schemas multiplies FP8
    )


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_in_one_graph(device: str) -> None:
    """The casts and the product, compiled and exported, with other numbers of rows as well."""

    class Product(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
            cast = quantize_fp4(w)
            rows = RowRanges.contiguous(counts, num_rows=x.shape[0])
            return m_grouped_gemm_fp8_fp4(quantize_rows(x), cast, rows), dequantize_fp4(cast)

    x, w = randn(9, 64, dtype=FP32, device=device), randn(3, 5, 64, dtype=FP32, device=device)
    counts = torch.tensor([2, 4, 3], device=device)
    torch._dynamo.reset()
    compiled = torch.compile(Product(), fullgraph=True, backend="aot_eager")
    shapes = {"x": {0: torch.export.Dim("T", min=2, max=1000)}, "w": {}, "counts": {}}
    exported = torch.export.export(Product(), (x, w, counts), dynamic_shapes=shapes).module()
    for given_counts in ([2, 4, 3], [0, 11, 9]):
        arguments = (
            randn(sum(given_counts), 64, dtype=FP32, device=device),
            w,
            torch.tensor(given_counts, device=device),
        )
        expected = Product()(*arguments)
        for run in (compiled, exported):
            for actual, wanted in zip(run(*arguments), expected, strict=True):
                assert torch.equal(actual, wanted)
