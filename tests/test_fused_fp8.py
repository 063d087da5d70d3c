"""FP8 products fused with the activation and the casts: bit for bit what the ops give one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import Place
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import ACTIVATIONS, LAYOUTS, STRIDES, Layout, contiguous, layouts, masked, padded, randn, seeds, unchanged
from places import no_interpreter, places
from torch import Tensor

from grouped_experts import RowRanges
from grouped_experts.activations import get_activation
from grouped_experts.ops import (
    Quantized,
    fc1_activation_fp8,
    fc2_dgrad_activation_fp8,
    k_grouped_gemm_fp8,
    m_grouped_gemm_fp8,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    scaled_activation,
)
from grouped_experts.ops.activation import scaled_activation_backward_op
from grouped_experts.ops.families import use_family
from grouped_experts.ops.reference.fused_fp8 import dtype_of_da
from grouped_experts.ops.reference.quantize import dequantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
HIDDEN = 72

# The dtype of a place is that of h.
in_every_place = pytest.mark.parametrize("place", places([BF16, FP16, FP32], interpreted=[FP16]), indirect=True)
in_both_dtypes = pytest.mark.parametrize("place", places([BF16, FP16, FP32]), indirect=True)
SEVERAL_BLOCKS = contiguous([130, 0, 1, 128], spare=3)
SHAPES = [
    ("swiglu", 40),  # a block of dh has columns of both parts
    ("swiglu", 256),
    ("geglu", 200),
    ("squared_relu", 200),  # no gate: one part
    ("squared_relu", 40),
    ("clamped_swiglu", 128),
]
by_shape = pytest.mark.parametrize(("activation", "inner"), SHAPES, ids=str)


def rows_of(layout: Layout, columns: int, device: str) -> Tensor:
    """Rows of very different sizes, every seventh of zeros; NaN in those of no expert."""
    x = randn(layout.num_rows, columns, dtype=FP32, device=device)
    x *= torch.exp2(0.7 * randn(layout.num_rows, 1, dtype=FP32, device=device))
    x[::7] = 0
    x[layout.unowned()] = torch.nan
    return x


def weight_of(layout: Layout, *shape: int, device: str) -> Tensor:
    return randn(layout.num_experts, *shape, dtype=FP32, device=device) / shape[1] ** 0.5


def probs_of(layout: Layout, device: str) -> Tensor:
    probs = torch.rand(layout.num_rows, device=device)
    probs[layout.unowned()] = torch.nan
    return probs


def owned(t: Tensor, layout: Layout) -> Tensor:
    return t[[row for start, end in layout.bounds for row in range(start, end)]]


def bits(t: Tensor) -> Tensor:
    """Every NaN as one, and zeros of either sign."""
    return torch.where(t.float().isnan(), 0x7F, torch.where(t.float() == 0, 0, t.view(torch.uint8).int()))


def assert_same_rows(actual: Quantized, expected: Quantized, layout: Layout) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    assert torch.equal(bits(owned(actual.data, layout)), bits(owned(expected.data, layout)))
    assert torch.equal(owned(actual.scales, layout), owned(expected.scales, layout))


def assert_same_columns(actual: Quantized, expected: Quantized, layout: Layout) -> None:
    """Up to the last expert's padded rows, their zeros included."""
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    blocks = sum(-(-(end - start) // 128) for start, end in layout.bounds)
    assert torch.equal(bits(actual.data[:, : 128 * blocks]), bits(expected.data[:, : 128 * blocks]))
    assert torch.equal(actual.scales[:, :blocks], expected.scales[:, :blocks])


def check_forward(
    layout: Layout,
    activation: str,
    inner: int,
    probs: Tensor | None,
    place: Place,
    power_of_two: bool = False,
    hidden: int = HIDDEN,
) -> tuple[Tensor, Quantized]:
    rows = layout.rows(place.device)
    x = quantize_rows(rows_of(layout, hidden, place.device), power_of_two=power_of_two)
    width = get_activation(activation).width(inner)
    w = quantize_blocks(weight_of(layout, width, hidden, device=place.device), power_of_two=power_of_two)
    options = {"activation": activation, "h_dtype": place.dtype, "power_of_two": power_of_two}
    with unchanged(x.scales, w.scales, probs, rows.starts, rows.ends):
        h, a = fc1_activation_fp8(x, w, rows, probs, **options)  # type: ignore[arg-type]
    expected = m_grouped_gemm_fp8(x, w, rows, out_dtype=place.dtype)
    assert (h.shape, h.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(owned(h, layout), owned(expected, layout))
    expected_a = quantize_rows(
        scaled_activation(expected, probs, rows, activation=activation), power_of_two=power_of_two
    )
    assert_same_rows(a, expected_a, layout)
    return h, a


def check_backward(
    layout: Layout,
    activation: str,
    inner: int,
    probs: Tensor | None,
    place: Place,
    dtype: torch.dtype = E4M3,
    power_of_two: bool = False,
    hidden: int = HIDDEN,
    as_given: Callable[[Tensor], Tensor] = lambda t: t,
) -> tuple[Quantized, Quantized, Quantized, Tensor]:
    rows, width = layout.rows(place.device), get_activation(activation).width(inner)
    dy = quantize_rows(rows_of(layout, hidden, place.device), dtype=dtype, power_of_two=power_of_two)
    w = weight_of(layout, hidden, inner, device=place.device)
    w = quantize_blocks(w, power_of_two=power_of_two, transpose=True)
    h = as_given(rows_of(layout, width, place.device).to(place.dtype))
    options = {"activation": activation, "dtype": dtype, "power_of_two": power_of_two}
    with unchanged(dy.scales, w.scales, h, probs, rows.starts, rows.ends):
        by_rows, by_columns, a, dprobs = fc2_dgrad_activation_fp8(dy, w, h, rows, probs, **options)  # type: ignore[arg-type]
        alone = fc2_dgrad_activation_fp8(dy, w, h, rows, probs, need_columns=False, **options)  # type: ignore[arg-type]
    da = m_grouped_gemm_fp8(dy, w, rows, out_dtype=dtype_of_da(h)).float()
    dh, a_again, dp = scaled_activation_backward_op(da, h, probs, rows.starts, rows.ends, activation)
    assert by_columns is not None
    assert a is not None
    casts = {"dtype": dtype, "power_of_two": power_of_two}
    assert_same_rows(by_rows, quantize_rows(dh, **casts), layout)  # type: ignore[arg-type]
    assert_same_columns(by_columns, quantize_columns(dh, rows, **casts), layout)  # type: ignore[arg-type]
    assert_same_columns(a, quantize_columns(a_again.to(h.dtype), rows, power_of_two=power_of_two), layout)
    assert dprobs.dtype == FP32
    assert not dprobs[layout.unowned()].any()
    sums = {"rtol": 1e-5, "atol": 1e-5 * float(dp.abs().max()) if dp.numel() else 0}
    torch.testing.assert_close(dprobs, dp, **sums)
    assert_same_rows(alone[0], by_rows, layout)
    assert alone[1] is None
    assert alone[2] is None
    exact = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(alone[3], dprobs, **(sums if place.device == "cuda" else exact))
    return by_rows, by_columns, a, dprobs


@in_both_dtypes
@by_shape
def test_forward(activation: str, inner: int, place: Place) -> None:
    for probs in place.variants(None, probs_of(SEVERAL_BLOCKS, place.device)):
        check_forward(SEVERAL_BLOCKS, activation, inner, probs, place)


@in_both_dtypes
@by_shape
def test_backward(activation: str, inner: int, place: Place) -> None:
    for probs in place.variants(None, probs_of(SEVERAL_BLOCKS, place.device)):
        check_backward(SEVERAL_BLOCKS, activation, inner, probs, place)


@in_every_place
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout: Layout, place: Place) -> None:
    check_forward(layout, "swiglu", 20, probs_of(layout, place.device), place, hidden=24)
    check_backward(layout, "squared_relu", 20, probs_of(layout, place.device), place, hidden=24)
    if not place.interpreted:
        check_backward(layout, "swiglu", 128, None, place, hidden=24)


@in_every_place
@pytest.mark.parametrize("inner", [40, 128])
def test_recipes(inner: int, place: Place) -> None:
    layout = padded([30, 0, 129], 8, spare=2)
    for dtype, power_of_two in place.variants((E4M3, True), (E5M2, False), (E5M2, True)):
        check_forward(layout, "swiglu", inner, None, place, power_of_two)
        check_backward(layout, "swiglu", inner, None, place, dtype, power_of_two)


@in_every_place
@pytest.mark.parametrize("how", STRIDES)
def test_strides_of_h(how: str, place: Place) -> None:
    layout = contiguous([30, 0, 3], spare=2)
    for inner in place.variants(40, 128):
        check_backward(layout, "swiglu", inner, None, place, as_given=STRIDES[how])


@in_every_place
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_zeros_stay_exactly_zero(activation: str, place: Place) -> None:
    """Experts whose weights are zero: blocks of zeros in all that is cast."""
    layout, device = masked([5, 140], 150), place.device
    rows, width = layout.rows(device), get_activation(activation).width(128)
    x, dy = (quantize_rows(rows_of(layout, HIDDEN, device)) for _ in range(2))
    w1, w2 = weight_of(layout, width, HIDDEN, device=device), weight_of(layout, 128, HIDDEN, device=device)
    w1[0] = w2[0] = 0
    h, a = fc1_activation_fp8(x, quantize_blocks(w1), rows, activation=activation, h_dtype=place.dtype)
    by_rows, by_columns, a_columns, dprobs = fc2_dgrad_activation_fp8(
        dy, quantize_blocks(w2), h, rows, activation=activation
    )
    assert by_columns is not None
    assert a_columns is not None
    for zero in (h[:5], a.data[:5], by_rows.data[:5], by_columns.data[:, :128], a_columns.data[:, :128], dprobs[:5]):
        assert (zero.float() == 0).all()
    for quantized in (a, by_rows):
        numbers = dequantize_rows(*quantized)[150:290]
        assert numbers.isfinite().all()
        assert numbers.any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, in the interpreter
@in_every_place
def test_nan_reaches_its_row_alone(place: Place) -> None:
    layout, device = contiguous([3, 2]), place.device
    rows, x = layout.rows(device), rows_of(contiguous([3, 2]), HIDDEN, device)
    x[1, 0] = torch.nan
    w1, w2 = weight_of(layout, 256, HIDDEN, device=device), weight_of(layout, 128, HIDDEN, device=device)
    h, a = fc1_activation_fp8(quantize_rows(x), quantize_blocks(w1), rows, h_dtype=place.dtype)
    numbers = dequantize_rows(*a)
    assert numbers[1].isnan().all()
    assert numbers[[0, 2, 3, 4]].isfinite().all()
    h[1] = 1
    by_rows, by_columns, _, dprobs = fc2_dgrad_activation_fp8(quantize_rows(x), quantize_blocks(w2), h, rows)
    numbers = dequantize_rows(*by_rows)
    assert numbers[1].isnan().all()
    assert numbers[[0, 2, 3, 4]].isfinite().all()
    assert dprobs.isnan().tolist() == [False, True, False, False, False]
    assert by_columns is not None
    numbers = dequantize_rows(*by_columns)
    assert numbers[:, :128].isnan().all()  # its columns' blocks are those of the expert's other rows
    assert numbers[:, 128:256].isfinite().all()


@in_every_place
def test_a_contraction_takes_what_comes(place: Place) -> None:
    layout = contiguous([130, 0, 3], spare=2)
    _, by_columns, a, _ = check_backward(layout, "swiglu", 128, None, place)
    c = k_grouped_gemm_fp8(by_columns, a, layout.rows(place.device))
    assert c.shape == (3, 256, 128)
    assert not c[1].any()
    assert c.isfinite().all()


@pytest.mark.skipif(no_interpreter, reason="needs Triton's interpreter")
@settings(max_examples=8)
@given(
    layouts(max_experts=3, max_count=40),
    st.sampled_from(["swiglu", "squared_relu"]),
    st.sampled_from([1, 33, 128, 130]),
    st.sampled_from([FP16, FP32]),
    st.booleans(),
    seeds,
)
def test_any_input(
    layout: Layout, activation: str, inner: int, h_dtype: torch.dtype, power_of_two: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    place, probs = Place("cpu", h_dtype, True), probs_of(layout, "cpu")
    with use_family("portable"):
        check_forward(layout, activation, inner, probs, place, power_of_two, hidden=16)
        check_backward(layout, activation, inner, probs, place, E5M2, power_of_two, hidden=16)


# ---- the ops


def good() -> dict[str, object]:
    return {
        "x": quantize_rows(torch.ones(4, 130)),
        "fc1_weight": quantize_blocks(torch.ones(2, 6, 130)),
        "rows": RowRanges.contiguous([1, 3]),
    }


def good_backward() -> dict[str, object]:
    return {
        "dy": quantize_rows(torch.ones(4, 130)),
        "fc2_weight": quantize_blocks(torch.ones(2, 3, 130)),
        "h": torch.ones(4, 6),
        "rows": RowRanges.contiguous([1, 3]),
    }


BAD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "x-tensor": ({"x": torch.ones(4, 130)}, TypeError, "x: wanted a Quantized, got Tensor"),
    "weight-depth": ({"fc1_weight": quantize_blocks(torch.ones(2, 6, 5))}, ValueError, "x.data: wanted shape"),
    "weight-odd": (
        {"fc1_weight": quantize_blocks(torch.ones(2, 5, 130))},
        ValueError,
        r"fc1_weight: wanted an even number of rows, \[gate | up\], got 5",
    ),
    "rows": ({"rows": RowRanges.contiguous([4])}, ValueError, "rows.starts: wanted shape"),
    "probs": ({"probs": torch.ones(3)}, ValueError, r"probs: wanted shape \(T,\) = \(4,\), got \(3,\)"),
    "probs-grad": ({"probs": torch.ones(4, requires_grad=True)}, ValueError, "wanted tensors without requires_grad"),
    "h-dtype": ({"h_dtype": torch.float64}, TypeError, "h_dtype: wanted one of"),
    "activation": ({"activation": "tanh"}, ValueError, "activation: wanted one of"),
}
BAD_BACKWARD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "dy-tensor": ({"dy": torch.ones(4, 130)}, TypeError, "dy: wanted a Quantized, got Tensor"),
    "weight-not-transposed": (
        {"fc2_weight": quantize_blocks(torch.ones(2, 130, 3))},
        ValueError,
        r"dy.data: wanted shape \(T, K\) = \(any, 3\), got \(4, 130\)",
    ),
    "h-shape": ({"h": torch.ones(4, 8)}, ValueError, r"h: wanted shape \(T, 2I\) = \(4, 6\), got \(4, 8\)"),
    "h-fp64": ({"h": torch.ones(4, 6).double()}, TypeError, "h: wanted one of"),
    "h-grad": ({"h": torch.ones(4, 6, requires_grad=True)}, ValueError, "wanted tensors without requires_grad"),
    "dtype": ({"dtype": BF16}, TypeError, "dtype: wanted float8_e4m3fn or float8_e5m2, got"),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(change: dict[str, object], error: type[Exception], message: str) -> None:
    fc1_activation_fp8(**good())  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        fc1_activation_fp8(**good() | change)  # type: ignore[arg-type]


@pytest.mark.parametrize(("change", "error", "message"), BAD_BACKWARD.values(), ids=BAD_BACKWARD.keys())
def test_bad_arguments_of_the_backward(change: dict[str, object], error: type[Exception], message: str) -> None:
    fc2_dgrad_activation_fp8(**good_backward())  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        fc2_dgrad_activation_fp8(**good_backward() | change)  # type: ignore[arg-type]


@pytest.mark.filterwarnings(r"ignore:::torch\.")
@pytest.mark.parametrize(("activation", "inner"), [("swiglu", 128), ("swiglu", 40), ("squared_relu", 40)])
def test_opcheck(activation: str, inner: int, device: str) -> None:
    layout = contiguous([3, 0, 40], spare=1)
    rows, width = layout.rows(device), get_activation(activation).width(inner)
    x, h = quantize_rows(rows_of(layout, 150, device)), rows_of(layout, width, device).bfloat16()
    w1, w2 = (quantize_blocks(weight_of(layout, n, 150, device=device)) for n in (width, inner))
    ops = torch.ops.grouped_experts
    utils = ("test_faketensor", "test_autograd_registration")  # the check of schemas multiplies FP8, which torch cannot
    ranges = rows.starts, rows.ends, probs_of(layout, device)
    torch.library.opcheck(
        ops.fc1_activation_fp8.default, (*x, *w1, *ranges, activation, BF16, True), test_utils=utils
    )  # fmt: skip
    for needed in ((True,) * 4, (False,) * 4, (True, False, False, True), (False, True, True, False)):
        arguments = *x, *w2, h, *ranges, activation, E5M2, False, *needed
        torch.library.opcheck(ops.fc2_dgrad_activation_fp8.default, arguments, test_utils=utils)


@in_every_place
@pytest.mark.parametrize("inner", [40, 128])
def test_only_what_is_needed(inner: int, place: Place) -> None:
    """The rest comes back empty, and what comes does not depend on what else does, but for the order of sums."""
    layout = contiguous([3, 0, 40], spare=1)
    rows, device = layout.rows(place.device), place.device
    dy, h = quantize_rows(rows_of(layout, HIDDEN, device)), rows_of(layout, 2 * inner, device).to(place.dtype)
    w = quantize_blocks(weight_of(layout, inner, HIDDEN, device=device))
    op = torch.ops.grouped_experts.fc2_dgrad_activation_fp8.default
    arguments = *dy, *w, h, rows.starts, rows.ends, None, "swiglu", E4M3, False
    everything = op(*arguments, True, True, True, True)
    for wanted in range(4):
        made = op(*arguments, *(i == wanted for i in range(4)))
        assert [t.numel() > 0 for t in made] == [i // 2 == wanted for i in range(7)]
        part, whole = made[2 * wanted :][:2], everything[2 * wanted :][:2]
        if wanted == 0:
            assert_same_rows(Quantized(*part), Quantized(*whole), layout)
        elif wanted < 3:
            assert_same_columns(Quantized(*part), Quantized(*whole), layout)
        else:
            error = 1e-5 if place.device == "cuda" else 0
            torch.testing.assert_close(*part, *whole, rtol=error, atol=error * float(whole[0].abs().max()))
