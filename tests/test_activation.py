"""scaled_activation and its backward: every activation's value and derivative, gradients, refusals, registration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exact import (
    Bounds,
    assert_as_accurate_as_eager,
    assert_rounded_once,
    eager_scaled_activation_backward,
    exact_scaled_activation_backward,
    magnitude_of_activation,
    magnitude_of_derivative,
    plain_activation,
)
from hypothesis import given
from hypothesis import strategies as st
from inputs import (
    ACTIVATIONS,
    DTYPES,
    EXPANDED,
    LAYOUTS,
    STRIDES,
    Layout,
    contiguous,
    dtypes,
    layouts,
    randn,
    random_rows,
    seeds,
    sizes,
    strides,
    unchanged,
)
from torch import Tensor

from grouped_experts import RowRanges
from grouped_experts.activations import ACTIVATIONS as DEFINED
from grouped_experts.ops import scaled_activation, scaled_activation_backward


def width(activation: str, intermediate_size: int) -> int:
    return intermediate_size if activation == "squared_relu" else 2 * intermediate_size


def check_values(
    dh: Tensor,
    a: Tensor | None,
    dprobs: Tensor,
    da: Tensor,
    h: Tensor,
    probs: Tensor | None,
    bounds: Bounds,
    activation: str,
) -> None:
    actual = dh, a, dprobs
    exact = exact_scaled_activation_backward(da, h, probs, bounds, activation)
    eager = eager_scaled_activation_backward(da, h, probs, bounds, activation)
    if h.dtype != torch.float64:  # eager torch in fp64 is what `exact` is
        for actual_value, eager_value, exact_value in zip(actual, eager, exact, strict=True):
            if actual_value is not None:
                assert_as_accurate_as_eager(actual_value, eager_value, exact_value)
    scale, d_scale = magnitude_of_activation(h, activation), magnitude_of_derivative(h, activation)
    p = torch.ones_like(scale[:, :1]) if probs is None else probs.double().abs()[:, None]
    incoming = da.double().abs()
    d_incoming = incoming if activation == "squared_relu" else incoming.repeat(1, 2)
    magnitudes = p * d_incoming * d_scale, p * scale, (incoming * scale).sum(1)
    terms = 16, 10, da.shape[1] + 10
    for actual_value, exact_value, magnitude, count in zip(actual, exact, magnitudes, terms, strict=True):
        if actual_value is not None:
            magnitude = torch.where(exact_value == 0, magnitude.nan_to_num(), magnitude)  # poison in nobody's rows
            assert_rounded_once(actual_value, exact_value, magnitude, count, accumulated_in=h.dtype)


def check(
    h: Tensor, da: Tensor, probs: Tensor | None, layout: Layout | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward against fp64, their contract of memory and dtype, and what they leave alone."""
    rows = None if layout is None else layout.rows(h.device.type)
    bounds = [(0, h.shape[0])] if layout is None else layout.bounds
    with unchanged(h, da, probs):
        a = scaled_activation(h, probs, rows, activation=activation)
        dh, a_again, dprobs = scaled_activation_backward(da, h, probs, rows, activation=activation)
    assert torch.equal(a_again, a)
    assert (a.dtype, dh.dtype) == (h.dtype, h.dtype)
    assert dprobs.dtype == (torch.float64 if h.dtype == torch.float64 else torch.float32)
    assert all(t.is_contiguous() for t in (a, dh, dprobs))

    check_values(dh, a, dprobs, da, h, probs, bounds, activation)
    if layout is not None:
        unowned = layout.unowned()
        assert not any(t[unowned].any() for t in (a, dh, dprobs))
    return dh, a, dprobs


def random_inputs(
    layout: Layout, columns: int, activation: str, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    h = random_rows(layout, width(activation, columns), dtype=dtype, device=device)
    return 3 * h, random_rows(layout, columns, dtype=dtype, device=device)


# ---- the activations themselves

CLOSED_FORM = {
    ("swiglu", -1.0, 2.0): -0.5378828,  # with the halves swapped, silu(2) * -1, it would be -1.7615942
    ("swiglu", 1.0, 1.0): 0.7310586,
    ("swiglu", 0.0, 5.0): 0.0,
    ("geglu", 1.0, 1.0): 0.8413447,
    ("geglu", -1.0, 2.0): -0.3173105,
    ("clamped_swiglu", 1.0, 2.0): 2.5373848,
    ("clamped_swiglu", 8.0, 9.0): 55.9996252,  # both limited to 7
    ("clamped_swiglu", -1.0, -9.0): 0.9252304,  # up limited to -7
    ("clamped_swiglu", -1.0, 9.0): -1.2336406,
}


@pytest.mark.parametrize(("activation", "gate", "up"), CLOSED_FORM, ids=str)
def test_closed_form(activation: str, gate: float, up: float, device: str) -> None:
    expected = torch.tensor([CLOSED_FORM[activation, gate, up]], device=device)
    for intermediate_size in (1, 3):
        h = torch.tensor([[gate] * intermediate_size + [up] * intermediate_size], device=device)
        torch.testing.assert_close(scaled_activation(h, activation=activation)[0, -1:], expected)
        probs = torch.tensor([0.25], device=device)
        torch.testing.assert_close(scaled_activation(h, probs, activation=activation)[0, -1:], expected / 4)


def test_squared_relu(device: str) -> None:
    h = torch.tensor([[3.0, -3.0, 0.5, 0.0]], device=device)
    assert scaled_activation(h, activation="squared_relu").tolist() == [[9.0, 0.0, 0.25, 0.0]]
    dh, *_ = scaled_activation_backward(torch.ones_like(h), h, activation="squared_relu")
    assert dh.tolist() == [[6.0, 0.0, 1.0, 0.0]]


def test_every_activation_is_tested() -> None:
    assert sorted(ACTIVATIONS) == sorted(DEFINED)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivative_is_that_of_the_value(activation: str) -> None:
    """What autograd makes of the plain value, for all pairs of parts: before, at and behind the clamps' limits too."""
    seven = torch.tensor(7.0, dtype=torch.float64)
    below, above = torch.nextafter(seven, seven * 0), torch.nextafter(seven, seven * 2)
    points = torch.tensor([0.0, -0.0, 0.1, -0.1, 1.0, -1.0, 5.0, -5.0, 30.0, -30.0], dtype=torch.float64)
    points = torch.cat([points, torch.stack([seven, -seven, below, -below, above, -above])])
    gate, up = (part.reshape(-1, 1) for part in torch.meshgrid(points, points, indexing="ij"))
    h = (points[:, None] if activation == "squared_relu" else torch.cat([gate, up], dim=1)).requires_grad_()
    value = plain_activation(h, activation)
    (expected,) = torch.autograd.grad(value.sum(), h)
    dh, a, _ = scaled_activation_backward(torch.ones_like(value), h.detach(), activation=activation)
    # a few roundings of fp64, relative to the largest factors: 30 * 30
    torch.testing.assert_close(a, value.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(dh, expected, rtol=1e-13, atol=1e-13)
    if activation == "clamped_swiglu":
        d_gate, d_up = dh[:, 0], dh[:, 1]
        gate, up = gate[:, 0], up[:, 0]
        assert not d_gate[gate > 7].any()
        assert not d_up[up.abs() > 7].any()
        assert d_gate[(gate == 7) & (up == 1)].all()
        assert d_up[(up.abs() == 7) & (gate == 1)].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_values_stay_finite(activation: str, dtype: torch.dtype, device: str) -> None:
    """A saturated gate: exp of it would overflow, its sigmoid does not."""
    values = torch.tensor([-240.0, -90.0, -20.0, 20.0, 90.0, 240.0], dtype=dtype, device=device)
    h = values[:, None] if activation == "squared_relu" else torch.cartesian_prod(values, values)
    if activation != "squared_relu":
        h = h[(h[:, 0] * h[:, 1]).abs() < 60000]
    da = torch.ones(h.shape[0], 1, dtype=dtype, device=device)
    for tensor in check(h, da, None, None, activation):
        assert tensor.isfinite().all()


# ---- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout: Layout, activation: str, dtype: torch.dtype, device: str) -> None:
    h, da = random_inputs(layout, 5, activation, dtype, device)
    check(h, da, random_rows(layout, dtype=torch.float32, device=device), layout, activation)


@pytest.mark.parametrize("columns", [1, 3, 63, 100])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sizes(activation: str, columns: int, device: str) -> None:
    layout = LAYOUTS["uneven"]
    for dtype in (torch.float16, torch.float32):
        h, da = random_inputs(layout, columns, activation, dtype, device)
        check(h, da, None, layout, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_more_rows_than_a_block_holds(activation: str, device: str) -> None:
    layout = contiguous([150, 0, 270], spare=1)
    h, da = random_inputs(layout, 1024, activation, torch.bfloat16, device)
    check(h, da, random_rows(layout, dtype=torch.float32, device=device), layout, activation)


@pytest.mark.parametrize("probs_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probs_in_every_dtype(dtype: torch.dtype, probs_dtype: torch.dtype | None, device: str) -> None:
    layout = LAYOUTS["m-indices-with-idle"]
    h, da = random_inputs(layout, 6, "swiglu", dtype, device)
    probs = None if probs_dtype is None else random_rows(layout, dtype=probs_dtype, device=device)
    check(h, da, probs, layout, "swiglu")


def test_probs_are_not_rounded_to_the_dtype_of_h(device: str) -> None:
    """1 + 2^-8 is 1 in bf16, where 9 (1 + 2^-8) = 9.035 is nearer to 9.0625 than to 9."""
    h = torch.full((1, 1), 3.0, dtype=torch.bfloat16, device=device)
    probs = torch.tensor([1 + 2.0**-8], device=device)
    assert probs.bfloat16().item() == 1
    assert scaled_activation(h, probs, activation="squared_relu").item() == 9.0625


@pytest.mark.parametrize("how", STRIDES | EXPANDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_strides(activation: str, dtype: torch.dtype, how: str, device: str) -> None:
    layout = contiguous([3, 0, 17])
    h, da = ((STRIDES | EXPANDED)[how](t) for t in random_inputs(layout, 33, activation, dtype, device))
    probs = torch.rand(40, device=device)[::2]
    check(h, da, probs, layout, activation)
    check(h, da, probs[:1].expand(20), None, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_empty_sizes(activation: str, device: str) -> None:
    for layout in (contiguous([]), contiguous([], spare=3), contiguous([0, 0]), contiguous([0], spare=2)):
        h, da = random_inputs(layout, 4, activation, torch.float16, device)
        check(h, da, random_rows(layout, dtype=torch.float32, device=device), layout, activation)
    for num_rows in (0, 3):
        layout = contiguous([num_rows])
        h, da = random_inputs(layout, 0 if num_rows else 4, activation, torch.float32, device)
        check(h, da, None, None, activation)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bit_identical_from_run_to_run(activation: str, device: str) -> None:
    layout = contiguous([200, 0, 300])
    h, da = random_inputs(layout, 129, activation, torch.bfloat16, device)
    probs = random_rows(layout, dtype=torch.float32, device=device)
    first = scaled_activation_backward(da, h, probs, layout.rows(device), activation=activation)
    for _ in range(3):
        again = scaled_activation_backward(da, h, probs, layout.rows(device), activation=activation)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@given(st.data(), st.sampled_from(ACTIVATIONS), layouts(), sizes, dtypes, strides, strides, seeds)
def test_any_input(
    data: st.DataObject,
    activation: str,
    layout: Layout,
    columns: int,
    dtype: torch.dtype,
    h_strides: str,
    da_strides: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    h, da = random_inputs(layout, columns, activation, dtype, "cpu")
    probs = None
    if data.draw(st.booleans(), label="probs"):
        probs = random_rows(layout, dtype=data.draw(dtypes, label="dtype of probs"), device="cpu")
    check(STRIDES[h_strides](h), STRIDES[da_strides](da), probs, layout, activation)


# ---- gradients


@pytest.mark.parametrize("layout", [None, "tail-rows", "m-indices-with-idle", "no-rows"])
@pytest.mark.parametrize("with_probs", [True, False], ids=["probs", "no-probs"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation: str, with_probs: bool, layout: str | None, device: str) -> None:
    num_rows = 4 if layout is None else LAYOUTS[layout].num_rows
    rows = None if layout is None else LAYOUTS[layout].rows(device)
    # Away from the kinks, which lie at 0 and at 7.
    h = (torch.rand(num_rows, width(activation, 3), dtype=torch.float64) * 5 + 0.5).to(device)
    h *= torch.where(torch.rand(h.shape).to(device) < 0.5, -1, 1)
    inputs = [h.requires_grad_()]
    if with_probs:
        inputs.append(torch.rand(num_rows, dtype=torch.float64).to(device).requires_grad_())
    assert torch.autograd.gradcheck(
        lambda h, probs=None: scaled_activation(h, probs, rows, activation=activation), inputs
    )


@pytest.mark.parametrize("probs_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("da_strides", ["contiguous", "transposed", "one-row", "one-element"])
def test_gradients(da_strides: str, dtype: torch.dtype, probs_dtype: torch.dtype, device: str) -> None:
    layout = LAYOUTS["padded-8"]
    h, da = random_inputs(layout, 6, "swiglu", dtype, device)
    if da_strides in EXPANDED:
        da = randn(layout.num_rows, 6, dtype=dtype, device=device)
    da = (STRIDES | EXPANDED)[da_strides](da)
    probs = random_rows(layout, dtype=probs_dtype, device=device).requires_grad_()
    a = scaled_activation(h.requires_grad_(), probs, layout.rows(device))
    with unchanged(h, probs, da):
        dh, dprobs = torch.autograd.grad(a, (h, probs), da)
    assert (dh.dtype, dprobs.dtype) == (dtype, probs_dtype)
    h, probs = h.detach(), probs.detach()
    check_values(dh, None, dprobs, da, h, probs, layout.bounds, "swiglu")


def test_only_wanted_gradients_come(device: str) -> None:
    h, probs = torch.ones(3, 4, device=device), torch.ones(3, device=device)
    scaled_activation(h.requires_grad_(), probs).sum().backward()
    assert h.grad is not None
    assert probs.grad is None
    h = torch.ones(3, 4, device=device)
    scaled_activation(h, probs.requires_grad_()).sum().backward()
    assert h.grad is None
    torch.testing.assert_close(probs.grad, torch.full_like(probs, 2 * 0.7310586))


def test_autocast_leaves_the_dtype_alone(device: str) -> None:
    h, da = randn(3, 4, dtype=torch.float32, device=device), randn(3, 2, dtype=torch.float32, device=device)
    plain = scaled_activation(h), *scaled_activation_backward(da, h)
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = scaled_activation(h), *scaled_activation_backward(da, h)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


# ---- refusals

BAD_ARGUMENTS: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "h-list": ({"h": [[1.0, 2.0]]}, TypeError, "h: wanted a tensor, got list"),
    "h-int": ({"h": torch.ones(4, 6).int()}, TypeError, "h: wanted a dtype of .*, got int32"),
    "h-1d": ({"h": torch.ones(4)}, ValueError, r"h: wanted shape \(T, 2I\) = \(any, any\), got \(4,\)"),
    "h-odd": ({"h": torch.ones(4, 5)}, ValueError, r"h: wanted an even number of columns, \[gate | up\], got 5"),
    "probs-shape": ({"probs": torch.ones(4, 1)}, ValueError, r"probs: wanted shape \(T,\) = \(4,\), got \(4, 1\)"),
    "probs-int": ({"probs": torch.ones(4).int()}, TypeError, "probs: wanted a dtype of .*, got int32"),
    "probs-device": ({"probs": torch.ones(4, device="meta")}, ValueError, "probs: wanted a tensor on cpu"),
    "rows-list": ({"rows": [1, 3]}, TypeError, "rows: wanted a RowRanges, got list"),
    "rows-beyond": ({"rows": RowRanges.contiguous([1, 4])}, ValueError, "rows: .* within 4 rows, got 1:5"),
    "activation": (
        {"activation": "relu"},
        ValueError,
        "activation: wanted one of swiglu, geglu, clamped_swiglu, squared_relu, got 'relu'",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_arguments(changes: dict[str, object], error: type[Exception], message: str) -> None:
    good = {"h": torch.ones(4, 6), "probs": torch.ones(4), "rows": RowRanges.contiguous([1, 3])}
    scaled_activation(**good)
    with pytest.raises(error, match=message):
        scaled_activation(**good | changes)
    with pytest.raises(error, match=message):
        scaled_activation_backward(torch.ones(4, 3), **good | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"da": torch.ones(4, 6)}, ValueError, r"da: wanted shape \(T, I\) = \(4, 3\), got \(4, 6\)"),
        (
            {"da": torch.ones(4, 3).double()},
            TypeError,
            "da: wanted the dtype of the rows, torch.float32, got torch.float64",
        ),
        ({"da": torch.ones(4, 3, device="meta")}, ValueError, "da: wanted a tensor on cpu, got one on meta"),
        (
            {"da": torch.ones(4, 3, requires_grad=True)},
            ValueError,
            "scaled_activation_backward: wanted tensors without",
        ),
        ({"h": torch.ones(4, 6, requires_grad=True)}, ValueError, "scaled_activation_backward: wanted tensors without"),
        (
            {"probs": torch.ones(4, requires_grad=True)},
            ValueError,
            "scaled_activation_backward: wanted tensors without",
        ),
    ],
    ids=["shape", "dtype", "device", "da-gradient", "h-gradient", "probs-gradient"],
)
def test_bad_arguments_of_the_backward(changes: dict[str, object], error: type[Exception], message: str) -> None:
    good = {"da": torch.ones(4, 3), "h": torch.ones(4, 6), "probs": torch.ones(4)}
    scaled_activation_backward(**good)
    with pytest.raises(error, match=message):
        scaled_activation_backward(**good | changes)


# ---- registration

OPCHECK_INPUTS: dict[str, Callable[[str], tuple[Layout | None, Tensor, Tensor, bool, str]]] = {
    "plain": lambda d: (
        LAYOUTS["tail-rows"],
        torch.randn(16, 6, device=d),
        torch.randn(16, 3, device=d),
        True,
        "swiglu",
    ),
    "all rows": lambda d: (None, torch.randn(4, 6, device=d), torch.randn(4, 3, device=d), False, "geglu"),
    "no rows": lambda d: (
        LAYOUTS["no-rows"],
        torch.randn(0, 6, device=d),
        torch.randn(0, 3, device=d),
        True,
        "clamped_swiglu",
    ),
    "no experts": lambda d: (
        contiguous([], 4),
        torch.randn(4, 6, device=d),
        torch.randn(4, 3, device=d),
        False,
        "swiglu",
    ),
    "one": lambda d: (contiguous([3]), torch.randn(3, 1, device=d), torch.randn(3, 1, device=d), True, "squared_relu"),
    "strided": lambda d: (
        LAYOUTS["uneven"],
        STRIDES["transposed"](torch.randn(53, 6, device=d)),
        STRIDES["in-wider-rows"](torch.randn(53, 3, device=d)),
        True,
        "swiglu",
    ),
}


@pytest.mark.parametrize("case", OPCHECK_INPUTS)
def test_opcheck(case: str, device: str) -> None:
    layout, h, da, with_probs, activation = OPCHECK_INPUTS[case](device)
    rows = None if layout is None else layout.rows(device)
    starts_ends = (None, None) if rows is None else (rows.starts, rows.ends)
    probs = torch.rand(h.shape[0], device=device) if with_probs else None
    ops = torch.ops.grouped_experts
    torch.library.opcheck(ops.scaled_activation_backward.default, (da, h, probs, *starts_ends, activation))
    h.requires_grad_()
    probs = None if probs is None else probs.requires_grad_()
    torch.library.opcheck(ops.scaled_activation.default, (h, probs, *starts_ends, activation))
