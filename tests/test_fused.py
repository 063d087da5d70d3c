"""fc1_activation and fc2_dgrad_activation: values against fp64, what stays in fp32, bits, refusals, registration."""

from __future__ import annotations

import pytest
import torch
from exact import (
    assert_as_accurate_as_eager,
    assert_rounded_once,
    eager_m_grouped,
    eager_scaled_activation_backward,
    eps,
    exact_m_grouped,
    exact_scaled_activation,
    exact_scaled_activation_backward,
    magnitude_of_activation,
    magnitude_of_derivative,
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
    masked,
    poison_unowned,
    randn,
    random_rows,
    seeds,
    sizes,
    strides,
    unchanged,
)
from torch import Tensor

from grouped_experts import RowRanges
from grouped_experts.ops import fc1_activation, fc2_dgrad_activation
from grouped_experts.ops.families import choose_family

LOW_PRECISION = [torch.bfloat16, torch.float16]


def width(activation: str, intermediate_size: int) -> int:
    return intermediate_size if activation == "squared_relu" else 2 * intermediate_size


def owned(t: Tensor, layout: Layout) -> Tensor:
    """The rows that some expert owns: h, a and dh are undefined in the others."""
    return t[[row for start, end in layout.bounds for row in range(start, end)]]


# ---- forward


def check_forward(
    x: Tensor,
    w1: Tensor,
    layout: Layout,
    probs: Tensor | None = None,
    b1: Tensor | None = None,
    activation: str = "swiglu",
) -> tuple[Tensor, Tensor]:
    rows = layout.rows(x.device.type)
    with unchanged(x, w1, probs, b1, rows.starts, rows.ends):
        h, a = fc1_activation(x, w1, rows, probs, b1, activation=activation)
    assert (h.dtype, a.dtype) == (x.dtype, x.dtype)
    assert h.is_contiguous()
    assert a.is_contiguous()
    assert h.shape == (x.shape[0], w1.shape[1])
    exact = exact_m_grouped(x, w1, layout.bounds, b1)
    eager = eager_m_grouped(x, w1, layout.bounds, b1)
    magnitudes = (None if t is None else t.double().abs() for t in (x, w1, b1))
    x_size, w_size, b_size = magnitudes
    magnitude = eager_m_grouped(x_size, w_size, layout.bounds, b_size)
    assert_rounded_once(*(owned(t, layout) for t in (h, exact, magnitude)), terms=x.shape[1] + 1)
    assert_as_accurate_as_eager(*(owned(t, layout) for t in (h, eager, exact)))

    # a is a function of the h that was rounded.
    h = poison_unowned(h.clone(), layout)
    exact = exact_scaled_activation(h, probs, layout.bounds, activation)
    magnitude = magnitude_of_activation(h, activation)
    magnitude = magnitude if probs is None else magnitude * probs.double().abs()[:, None]
    assert_rounded_once(*(owned(t, layout) for t in (a, exact, magnitude)), terms=10)
    return h, a


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_forward_in_every_layout(layout: Layout, dtype: torch.dtype, device: str) -> None:
    x = random_rows(layout, 24, dtype=dtype, device=device)
    w1 = randn(layout.num_experts, 10, 24, dtype=dtype, device=device)
    probs = random_rows(layout, dtype=torch.float32, device=device)
    check_forward(x, w1, layout, probs)
    check_forward(x, w1, layout, probs, randn(layout.num_experts, 10, dtype=dtype, device=device))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (3, 5), (96, 40), (63, 100), (8, 4)])
def test_forward_sizes(hidden: int, intermediate: int, activation: str, device: str) -> None:
    layout = LAYOUTS["uneven"]
    x = random_rows(layout, hidden, dtype=torch.float16, device=device)
    w1 = randn(layout.num_experts, width(activation, intermediate), hidden, dtype=torch.float16, device=device)
    check_forward(x, w1, layout, None, w1[:, :, 0], activation)


# ---- backward


def check_backward(
    dy: Tensor,
    w2: Tensor,
    h: Tensor,
    layout: Layout,
    probs: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "swiglu",
) -> tuple[Tensor, Tensor, Tensor]:
    rows, bounds = layout.rows(dy.device.type), layout.bounds
    with unchanged(dy, w2, h, probs, b2, rows.starts, rows.ends):
        dh, a, dprobs = fc2_dgrad_activation(dy, w2, h, rows, probs, b2, activation=activation)
    assert (dh.dtype, a.dtype) == (h.dtype, h.dtype)
    assert dprobs.dtype == (torch.float64 if h.dtype == torch.float64 else torch.float32)
    assert all(t.is_contiguous() for t in (dh, a, dprobs))
    assert not dprobs[layout.unowned()].any()

    da = exact_m_grouped(dy, w2, bounds, transpose_w=False)
    eager_da = eager_m_grouped(dy, w2, bounds, transpose_w=False)
    exact = list(exact_scaled_activation_backward(da, h, probs, bounds, activation))
    eager = list(eager_scaled_activation_backward(eager_da, h, probs, bounds, activation))
    if b2 is not None:
        exact[2] = exact[2] + exact_m_grouped(dy, b2[:, None], bounds)[:, 0]
        eager[2] = eager[2] + eager_m_grouped(dy, b2[:, None], bounds)[:, 0]
    if h.dtype != torch.float64:  # eager torch in fp64 is what `exact` is
        for actual, eager_value, exact_value in zip((dh, a, dprobs), eager, exact, strict=True):
            assert_as_accurate_as_eager(*(owned(t, layout) for t in (actual, eager_value, exact_value)))

    da_size = eager_m_grouped(dy.double().abs(), w2.double().abs(), bounds, transpose_w=False)
    p = torch.ones_like(da_size[:, :1]) if probs is None else probs.double().abs()[:, None]
    s_size = magnitude_of_activation(h, activation)
    assert_rounded_once(*(owned(t, layout) for t in (a, exact[1], p * s_size)), terms=10)
    return dh, a, dprobs


def random_backward(
    layout: Layout, hidden: int, intermediate: int, activation: str, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, w2, h"""
    return (
        random_rows(layout, hidden, dtype=dtype, device=device),
        randn(layout.num_experts, hidden, intermediate, dtype=dtype, device=device),
        random_rows(layout, width(activation, intermediate), dtype=dtype, device=device),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_backward_in_every_layout(layout: Layout, dtype: torch.dtype, device: str) -> None:
    dy, w2, h = random_backward(layout, 24, 5, "swiglu", dtype, device)
    probs = random_rows(layout, dtype=torch.float32, device=device)
    check_backward(dy, w2, h, layout, probs)
    check_backward(dy, w2, h, layout, probs, randn(layout.num_experts, 24, dtype=dtype, device=device))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (3, 5), (96, 40), (63, 100), (8, 4)])
def test_backward_sizes(hidden: int, intermediate: int, activation: str, device: str) -> None:
    layout = LAYOUTS["uneven"]
    dy, w2, h = random_backward(layout, hidden, intermediate, activation, torch.float16, device)
    check_backward(dy, w2, h, layout, None, w2[:, :, 0], activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dh_and_dprobs_are_rounded_once(dtype: torch.dtype, activation: str, device: str) -> None:
    """da is a product in fp32 that is not rounded before it meets h: dh is rounded once, dprobs not at all."""
    if dtype in LOW_PRECISION and choose_family(torch.device(device), {dtype}) == "reference":
        pytest.skip("PyTorch's CPU products of bf16 and fp16 come rounded")
    layout = contiguous([17, 0, 30], spare=2)
    dy, w2, h = random_backward(layout, 64, 48, activation, dtype, device)
    probs = random_rows(layout, dtype=torch.float32, device=device)
    b2 = randn(3, 64, dtype=dtype, device=device)
    dh, _, dprobs = fc2_dgrad_activation(dy, w2, h, layout.rows(device), probs, b2, activation=activation)
    da = exact_m_grouped(dy, w2, layout.bounds, transpose_w=False)
    exact = exact_scaled_activation_backward(da, h, probs, layout.bounds, activation)
    da_size = eager_m_grouped(dy.double().abs(), w2.double().abs(), layout.bounds, transpose_w=False)
    d_size = da_size if activation == "squared_relu" else da_size.repeat(1, 2)
    size = probs.double().abs()[:, None] * d_size * magnitude_of_derivative(h, activation)
    assert_rounded_once(*(owned(t, layout) for t in (dh, exact[0], size)), terms=64 + 16)
    exact_dprobs = exact[2] + exact_m_grouped(dy, b2[:, None], layout.bounds)[:, 0]
    size = (da_size * magnitude_of_activation(h, activation)).sum(1)
    size = size + eager_m_grouped(dy.double().abs(), b2.double().abs()[:, None], layout.bounds)[:, 0]
    assert_rounded_once(*(owned(t, layout) for t in (dprobs, exact_dprobs, size)), terms=64 + 48 + 10)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_da_is_not_rounded_before_dprobs(dtype: torch.dtype, device: str) -> None:
    """da = (1 + eps / 8, 1) and s = (s, -s): dprobs is eps / 8 * s, but would be 0 with da rounded to (1, 1)."""
    if dtype in LOW_PRECISION and choose_family(torch.device(device), {dtype}) == "reference":
        pytest.skip("PyTorch's CPU products of bf16 and fp16 come rounded")
    small = eps(dtype) / 8
    rows = RowRanges.contiguous([1], device=device)
    dy = torch.tensor([[1.0, small]], dtype=dtype, device=device)
    w2 = torch.tensor([[[1.0, 1.0], [1.0, 0.0]]], dtype=dtype, device=device)
    h = torch.tensor([[2.0, 2.0, 1.0, -1.0]], dtype=dtype, device=device)
    _, _, dprobs = fc2_dgrad_activation(dy, w2, h, rows)
    s = 2 / (1 + torch.exp(torch.tensor(-2.0, dtype=torch.float64))).item()
    assert dprobs.item() == pytest.approx(small * s, rel=4 * eps(torch.float32) / small)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_da_is_not_rounded_before_dh(dtype: torch.dtype, device: str) -> None:
    """da = 1 + eps / 2 is 1 once rounded, but 3 (1 + eps / 2) rounds to 3 + 2 eps, the number behind 3."""
    if dtype in LOW_PRECISION and choose_family(torch.device(device), {dtype}) == "reference":
        pytest.skip("PyTorch's CPU products of bf16 and fp16 come rounded")
    rows = RowRanges.contiguous([1], device=device)
    dy = torch.tensor([[1.0, eps(dtype) / 2]], dtype=dtype, device=device)
    w2 = torch.ones(1, 2, 1, dtype=dtype, device=device)
    h = torch.full((1, 1), 1.5, dtype=dtype, device=device)
    dh, _, _ = fc2_dgrad_activation(dy, w2, h, rows, activation="squared_relu")
    assert dh.item() == 3 + 2 * eps(dtype)


def test_dprobs_of_many_wide_rows(device: str) -> None:
    """As wide as a layer is: no outlier rows."""
    layout = contiguous([300, 0, 212])
    dy, w2, h = random_backward(layout, 256, 128, "swiglu", torch.bfloat16, device)
    dy = dy / 16
    probs = torch.rand(512, device=device)
    _, _, dprobs = fc2_dgrad_activation(dy, w2, h, layout.rows(device), probs)
    da = exact_m_grouped(dy, w2, layout.bounds, transpose_w=False)
    *_, exact = exact_scaled_activation_backward(da, h, probs, layout.bounds, "swiglu")
    eager_da = eager_m_grouped(dy, w2, layout.bounds, transpose_w=False)
    *_, eager = eager_scaled_activation_backward(eager_da, h, probs, layout.bounds, "swiglu")
    assert_as_accurate_as_eager(dprobs, eager, exact)
    # A row's error, relative to what a row's dprobs usually is.
    assert ((dprobs.double() - exact).abs() <= 1e-2 * exact.square().mean().sqrt()).all()


# ---- both


@pytest.mark.parametrize("probs_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_is_recomputed_bit_for_bit(
    activation: str, dtype: torch.dtype, probs_dtype: torch.dtype | None, device: str
) -> None:
    for layout in (LAYOUTS["uneven"], LAYOUTS["padded-8"], LAYOUTS["m-indices-with-idle"], masked([4, 4, 4], 6)):
        for intermediate in (1, 7, 33):
            x = random_rows(layout, 12, dtype=dtype, device=device)
            w1 = randn(layout.num_experts, width(activation, intermediate), 12, dtype=dtype, device=device)
            dy, w2, _ = random_backward(layout, 12, intermediate, activation, dtype, device)
            probs = None if probs_dtype is None else random_rows(layout, dtype=probs_dtype, device=device)
            rows = layout.rows(device)
            h, a = fc1_activation(x, w1, rows, probs, activation=activation)
            dh, a_again, dprobs = fc2_dgrad_activation(dy, w2, h, rows, probs, activation=activation)
            assert torch.equal(owned(a_again, layout), owned(a, layout))
            assert all(owned(t, layout).isfinite().all() for t in (dh, a, dprobs))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("how", STRIDES)
def test_a_is_the_same_from_h_in_other_strides(how: str, activation: str, device: str) -> None:
    layout = contiguous([17, 0, 30])
    x = random_rows(layout, 12, dtype=torch.float32, device=device)
    w1 = randn(3, width(activation, 33), 12, dtype=torch.float32, device=device)
    dy, w2, _ = random_backward(layout, 12, 33, activation, torch.float32, device)
    rows = layout.rows(device)
    h, a = fc1_activation(x, w1, rows, activation=activation)
    _, a_again, _ = fc2_dgrad_activation(dy, w2, STRIDES[how](h), rows, activation=activation)
    assert torch.equal(a_again, a)


@pytest.mark.parametrize("how", STRIDES | EXPANDED)
def test_strides(how: str, device: str) -> None:
    as_given = (STRIDES | EXPANDED)[how]
    for layout in (contiguous([3, 0, 17]), masked([4, 4], 4)):
        x = as_given(random_rows(layout, 60, dtype=torch.bfloat16, device=device))
        w1 = as_given(randn(layout.num_experts, 18, 60, dtype=torch.bfloat16, device=device))
        b1 = as_given(randn(layout.num_experts, 18, dtype=torch.bfloat16, device=device))
        probs = torch.rand(2 * layout.num_rows, device=device)[::2]
        check_forward(x, w1, layout, probs, b1)
        dy, w2, h = (as_given(t) for t in random_backward(layout, 60, 9, "swiglu", torch.bfloat16, device))
        b2 = as_given(randn(layout.num_experts, 60, dtype=torch.bfloat16, device=device))
        check_backward(dy, w2, h, layout, probs, b2)
        check_backward(dy, w2, h, layout, probs[:1].expand(layout.num_rows))


def test_gate_comes_first(device: str) -> None:
    """g = -1, u = 2: silu(-1) * 2; the halves swapped would give silu(2) * -1 = -1.7615942."""
    rows = RowRanges.contiguous([1], device=device)
    x = torch.ones(1, 1, device=device)
    w1 = torch.tensor([[[-1.0], [2.0]]], device=device)
    h, a = fc1_activation(x, w1, rows)
    assert h.tolist() == [[-1.0, 2.0]]
    torch.testing.assert_close(a, torch.full_like(a, -0.5378828))


def test_every_part_of_dh_on_its_own(device: str) -> None:
    """g = 1, u = 0: only the gradient of up is there; g = 0: only that of the gate."""
    rows = RowRanges.contiguous([1], device=device)
    dy, w2 = torch.ones(1, 1, device=device), torch.ones(1, 1, 1, device=device)
    dh, *_ = fc2_dgrad_activation(dy, w2, torch.tensor([[1.0, 0.0]], device=device), rows)
    torch.testing.assert_close(dh, torch.tensor([[0.0, 0.7310586]], device=device))
    dh, *_ = fc2_dgrad_activation(dy, w2, torch.tensor([[0.0, 3.0]], device=device), rows)
    torch.testing.assert_close(dh, torch.tensor([[1.5, 0.0]], device=device))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, in the interpreter
@pytest.mark.parametrize("intermediate", [24, 128])
def test_inf_in_dy_reaches_dprobs(intermediate: int, device: str) -> None:
    """As Inf, also where the tiles are wider than the intermediate size: there lies 0 * Inf."""
    rows = RowRanges.contiguous([2, 1], num_rows=3, device=device)
    dy = torch.ones(3, 16, device=device)
    dy[1, 5] = float("inf")
    fc2_weight = torch.ones(2, 16, intermediate, device=device)
    h = torch.ones(3, 2 * intermediate, device=device)
    dprobs = fc2_dgrad_activation(dy, fc2_weight, h, rows)[2]
    assert dprobs.isinf().tolist() == [False, True, False]
    assert not dprobs.isnan().any()


def test_unit_layer(device: str) -> None:
    """x = 1, W1 = 1 / H, so h = 1; dy = 1, W2 = (e + 1) / I, so da = (e + 1) H / I."""
    counts, hidden, intermediate, prob = [3, 0, 5, 2, 0, 1], 64, 32, 0.5
    layout = contiguous(counts, spare=4)
    rows = layout.rows(device)
    x = torch.ones(15, hidden, device=device)
    probs = torch.full((15,), prob, device=device)
    h, a = fc1_activation(x, torch.full((6, 2 * intermediate, hidden), 1 / hidden, device=device), rows, probs)
    torch.testing.assert_close(owned(a, layout), torch.full((11, intermediate), prob * 0.7310586, device=device))
    scale = torch.arange(1.0, 7.0, device=device)
    w2 = (scale / intermediate)[:, None, None].expand(6, hidden, intermediate)
    dh, _, dprobs = fc2_dgrad_activation(x, w2, h, rows, probs)
    expert = scale.repeat_interleave(torch.tensor(counts, device=device))
    torch.testing.assert_close(dprobs[:11], expert * hidden * 0.7310586)
    torch.testing.assert_close(dh[:11, 0], expert * hidden / intermediate * prob * 0.9276705)
    torch.testing.assert_close(dh[:11, -1], expert * hidden / intermediate * prob * 0.7310586)


def test_empty_sizes(device: str) -> None:
    for layout in (contiguous([]), contiguous([], spare=3), contiguous([0, 0]), contiguous([0], spare=2)):
        x = random_rows(layout, 4, dtype=torch.float16, device=device)
        check_forward(x, randn(layout.num_experts, 6, 4, dtype=torch.float16, device=device), layout)
        check_backward(*random_backward(layout, 4, 3, "swiglu", torch.float16, device), layout)


@pytest.mark.parametrize("need_a", [True, False])
@pytest.mark.parametrize("need_dprobs", [True, False])
def test_what_is_not_needed_comes_back_empty(need_a: bool, need_dprobs: bool, device: str) -> None:
    layout = LAYOUTS["padded-8"]
    dy, w2, h = random_backward(layout, 12, 5, "swiglu", torch.bfloat16, device)
    probs = random_rows(layout, dtype=torch.float32, device=device)
    b2 = randn(layout.num_experts, 12, dtype=torch.bfloat16, device=device)
    rows = layout.rows(device)
    whole = fc2_dgrad_activation(dy, w2, h, rows, probs, b2)
    op = torch.ops.grouped_experts.fc2_dgrad_activation
    dh, a, dprobs = op(dy, w2, h, rows.starts, rows.ends, probs, b2, "swiglu", need_a, need_dprobs)
    assert torch.equal(owned(dh, layout), owned(whole[0], layout))
    assert torch.equal(owned(a, layout), owned(whole[1], layout)) if need_a else a.shape == (0, 5)
    assert torch.equal(dprobs, whole[2]) if need_dprobs else dprobs.shape == (0,)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_identical_from_run_to_run(dtype: torch.dtype, device: str) -> None:
    layout = contiguous([200, 0, 300])
    rows = layout.rows(device)
    dy, w2, h = random_backward(layout, 40, 65, "swiglu", dtype, device)
    probs = random_rows(layout, dtype=torch.float32, device=device)
    w1 = w2.transpose(1, 2)[:, :50]

    def run() -> tuple[Tensor, ...]:
        return *fc1_activation(dy, w1, rows, probs), *fc2_dgrad_activation(dy, w2, h, rows, probs)

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_autocast_leaves_the_dtype_alone(device: str) -> None:
    layout = contiguous([5, 0, 3])
    rows = layout.rows(device)
    dy, w2, h = random_backward(layout, 12, 6, "swiglu", torch.float32, device)
    w1 = randn(3, 12, 12, dtype=torch.float32, device=device)
    plain = *fc1_activation(dy, w1, rows), *fc2_dgrad_activation(dy, w2, h, rows)
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = *fc1_activation(dy, w1, rows), *fc2_dgrad_activation(dy, w2, h, rows)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@given(st.data(), st.sampled_from(ACTIVATIONS), layouts(), sizes, sizes, dtypes, strides, strides, strides, seeds)
def test_any_input(
    data: st.DataObject,
    activation: str,
    layout: Layout,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    row_strides: str,
    weight_strides: str,
    h_strides: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    probs = b1 = b2 = None
    if data.draw(st.booleans(), label="probs"):
        probs = random_rows(layout, dtype=data.draw(dtypes, label="dtype of probs"), device="cpu")
    if data.draw(st.booleans(), label="biases"):
        b1 = randn(layout.num_experts, width(activation, intermediate), dtype=dtype, device="cpu")
        b2 = randn(layout.num_experts, hidden, dtype=dtype, device="cpu")
    x = STRIDES[row_strides](random_rows(layout, hidden, dtype=dtype, device="cpu"))
    w1 = randn(layout.num_experts, width(activation, intermediate), hidden, dtype=dtype, device="cpu")
    h, a = check_forward(x, STRIDES[weight_strides](w1), layout, probs, b1, activation)
    dy, w2, _ = random_backward(layout, hidden, intermediate, activation, dtype, "cpu")
    dy, w2, h = STRIDES[row_strides](dy), STRIDES[weight_strides](w2), STRIDES[h_strides](h)
    _, a_again, _ = check_backward(dy, w2, h, layout, probs, b2, activation)
    assert torch.equal(owned(a_again, layout), owned(a, layout))


# ---- refusals


def needing_gradient(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


BAD_FORWARD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "x-int": ({"x": torch.ones(4, 3).int()}, TypeError, "x: wanted a dtype of .*, got int32"),
    "x-1d": ({"x": torch.ones(4)}, ValueError, r"x: wanted shape \(T, H\) = \(any, any\), got \(4,\)"),
    "w1-transposed": ({"fc1_weight": torch.ones(2, 3, 10)}, ValueError, r"fc1_weight: wanted shape \(E, 2I, H\) = "),
    "w1-odd": ({"fc1_weight": torch.ones(2, 9, 3)}, ValueError, r"fc1_weight: wanted an even number of rows.*got 9"),
    "w1-dtype": ({"fc1_weight": torch.ones(2, 10, 3).half()}, TypeError, "fc1_weight: wanted the dtype of the rows"),
    "w1-device": (
        {"fc1_weight": torch.ones(2, 10, 3, device="meta")},
        ValueError,
        "fc1_weight: wanted a tensor on cpu",
    ),
    "rows-list": ({"rows": [1, 3]}, TypeError, "rows: wanted a RowRanges, got list"),
    "rows-few": ({"rows": RowRanges.contiguous([4])}, ValueError, r"rows.starts: wanted shape \(E,\) = \(2,\)"),
    "rows-beyond": ({"rows": RowRanges.contiguous([1, 4])}, ValueError, "rows: .* within 4 rows, got 1:5"),
    "probs-shape": ({"probs": torch.ones(5)}, ValueError, r"probs: wanted shape \(T,\) = \(4,\), got \(5,\)"),
    "probs-int": ({"probs": torch.ones(4).int()}, TypeError, "probs: wanted a dtype of .*, got int32"),
    "b1-shape": ({"fc1_bias": torch.ones(2, 5)}, ValueError, r"fc1_bias: wanted shape \(E, 2I\) = \(2, 10\)"),
    "b1-dtype": ({"fc1_bias": torch.ones(2, 10).half()}, TypeError, "fc1_bias: wanted the dtype of the rows"),
    "activation": ({"activation": "relu"}, ValueError, "activation: wanted one of swiglu, .*, got 'relu'"),
    "x-gradient": ({"x": needing_gradient(4, 3)}, ValueError, "fc1_activation: wanted tensors without requires_grad"),
    "w1-gradient": ({"fc1_weight": needing_gradient(2, 10, 3)}, ValueError, "fc1_activation: wanted tensors without"),
    "b1-gradient": ({"fc1_bias": needing_gradient(2, 10)}, ValueError, "fc1_activation: wanted tensors without"),
    "probs-gradient": ({"probs": needing_gradient(4)}, ValueError, "fc1_activation: wanted tensors without"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_FORWARD.values(), ids=BAD_FORWARD.keys())
def test_bad_arguments_of_the_forward(changes: dict[str, object], error: type[Exception], message: str) -> None:
    good = {
        "x": torch.ones(4, 3),
        "fc1_weight": torch.ones(2, 10, 3),
        "rows": RowRanges.contiguous([1, 3]),
        "probs": torch.ones(4),
        "fc1_bias": torch.ones(2, 10),
    }
    fc1_activation(**good)
    with pytest.raises(error, match=message):
        fc1_activation(**good | changes)


BAD_BACKWARD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "dy-int": ({"dy": torch.ones(4, 3).int()}, TypeError, "dy: wanted a dtype of .*, got int32"),
    "dy-1d": ({"dy": torch.ones(4)}, ValueError, r"dy: wanted shape \(T, H\) = \(any, any\), got \(4,\)"),
    "w2-transposed": ({"fc2_weight": torch.ones(2, 5, 3)}, ValueError, r"fc2_weight: wanted shape \(E, H, I\) = "),
    "w2-dtype": ({"fc2_weight": torch.ones(2, 3, 5).half()}, TypeError, "fc2_weight: wanted the dtype of the rows"),
    "h-shape": ({"h": torch.ones(4, 5)}, ValueError, r"h: wanted shape \(T, 2I\) = \(4, 10\), got \(4, 5\)"),
    "h-rows": ({"h": torch.ones(5, 10)}, ValueError, r"h: wanted shape \(T, 2I\) = \(4, 10\), got \(5, 10\)"),
    "h-dtype": ({"h": torch.ones(4, 10).half()}, TypeError, "h: wanted the dtype of the rows"),
    "h-without-gate": (
        {"activation": "squared_relu"},
        ValueError,
        r"h: wanted shape \(T, I\) = \(4, 5\), got \(4, 10\)",
    ),
    "rows-list": ({"rows": [1, 3]}, TypeError, "rows: wanted a RowRanges, got list"),
    "rows-few": ({"rows": RowRanges.contiguous([4])}, ValueError, r"rows.starts: wanted shape \(E,\) = \(2,\)"),
    "rows-beyond": ({"rows": RowRanges.contiguous([1, 4])}, ValueError, "rows: .* within 4 rows, got 1:5"),
    "probs-shape": ({"probs": torch.ones(5)}, ValueError, r"probs: wanted shape \(T,\) = \(4,\), got \(5,\)"),
    "b2-shape": ({"fc2_bias": torch.ones(2, 5)}, ValueError, r"fc2_bias: wanted shape \(E, H\) = \(2, 3\)"),
    "b2-dtype": ({"fc2_bias": torch.ones(2, 3).half()}, TypeError, "fc2_bias: wanted the dtype of the rows"),
    "activation": ({"activation": "relu"}, ValueError, "activation: wanted one of swiglu, .*, got 'relu'"),
    "dy-gradient": ({"dy": needing_gradient(4, 3)}, ValueError, "fc2_dgrad_activation: wanted tensors without"),
    "h-gradient": ({"h": needing_gradient(4, 10)}, ValueError, "fc2_dgrad_activation: wanted tensors without"),
    "w2-gradient": (
        {"fc2_weight": needing_gradient(2, 3, 5)},
        ValueError,
        "fc2_dgrad_activation: wanted tensors without",
    ),
    "b2-gradient": ({"fc2_bias": needing_gradient(2, 3)}, ValueError, "fc2_dgrad_activation: wanted tensors without"),
    "probs-gradient": ({"probs": needing_gradient(4)}, ValueError, "fc2_dgrad_activation: wanted tensors without"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_BACKWARD.values(), ids=BAD_BACKWARD.keys())
def test_bad_arguments_of_the_backward(changes: dict[str, object], error: type[Exception], message: str) -> None:
    good = {
        "dy": torch.ones(4, 3),
        "fc2_weight": torch.ones(2, 3, 5),
        "h": torch.ones(4, 10),
        "rows": RowRanges.contiguous([1, 3]),
        "probs": torch.ones(4),
        "fc2_bias": torch.ones(2, 3),
    }
    fc2_dgrad_activation(**good)
    with pytest.raises(error, match=message):
        fc2_dgrad_activation(**good | changes)


# ---- registration

# Without rows of no expert: a and dh are undefined there, and opcheck compares whole tensors.
OPCHECK_INPUTS: dict[str, tuple[Layout, int, int, bool, str, str]] = {
    "plain": (LAYOUTS["uneven"], 6, 4, True, "swiglu", "contiguous"),
    "no rows": (LAYOUTS["no-rows"], 6, 4, True, "geglu", "contiguous"),
    "no experts": (contiguous([]), 6, 4, False, "swiglu", "contiguous"),
    "one": (contiguous([3]), 1, 1, True, "squared_relu", "contiguous"),
    "transposed": (LAYOUTS["uneven"], 6, 4, True, "clamped_swiglu", "transposed"),
    "in wider rows": (LAYOUTS["uneven"], 6, 4, False, "swiglu", "in-wider-rows"),
}


@pytest.mark.parametrize("case", OPCHECK_INPUTS)
def test_opcheck(case: str, device: str) -> None:
    layout, hidden, intermediate, with_optional, activation, how = OPCHECK_INPUTS[case]
    rows = layout.rows(device)

    def make(*shape: int) -> Tensor:
        return STRIDES[how](torch.randn(*shape, device=device)) if len(shape) > 1 else torch.rand(*shape, device=device)

    num_rows, experts, columns = layout.num_rows, layout.num_experts, width(activation, intermediate)
    probs, b1, b2 = (make(num_rows), make(experts, columns), make(experts, hidden)) if with_optional else 3 * [None]
    ops = torch.ops.grouped_experts
    x, w1 = make(num_rows, hidden), make(experts, columns, hidden)
    torch.library.opcheck(ops.fc1_activation.default, (x, w1, rows.starts, rows.ends, b1, probs, activation))
    dy, w2, h = x, make(experts, hidden, intermediate), make(num_rows, columns)
    for needs in ((True, True), (False, False)):
        arguments = dy, w2, h, rows.starts, rows.ends, probs, b2, activation, *needs
        torch.library.opcheck(ops.fc2_dgrad_activation.default, arguments)
