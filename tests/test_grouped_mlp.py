"""GroupedMLP's values: closed forms, rows of no expert, strides, counts, dtypes."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import assert_as_accurate_as_eager, eps, plain_activation
from inputs import ACTIVATIONS, DTYPES, LAYOUTS, Layout, poison_unowned
from layer import (
    SILU,
    WEIGHTS,
    assert_right,
    assert_same,
    by_layer,
    by_loop,
    check,
    eager,
    gradients,
    loop,
    rand,
    running,
    unit_mlp,
    unit_results,
)
from torch import Tensor

from grouped_experts import GroupedMLP, RowRanges

BF16, FP32 = torch.bfloat16, torch.float32


def check_unit(
    counts: list[int],
    hidden: int,
    inner: int,
    p: float,
    dtype: torch.dtype,
    device: str,
    *,
    spare: int = 0,
    dy: Tensor | None = None,
    by_expert: bool = False,
    **options: Any,
) -> dict[str, Tensor | None]:
    """Ones through the unit weights give the closed form; eager's distance from it sets the tolerance."""
    mlp = unit_mlp(len(counts), hidden, inner, dtype=dtype, device=device, **options)
    scale = [e + 1.0 if by_expert else 1.0 for e in range(len(counts))]
    with torch.no_grad():
        mlp.fc2_weight.mul_(torch.tensor(scale, device=device)[:, None, None])
    num_rows, bounds = sum(counts) + spare, running(counts)
    x = torch.ones(num_rows, hidden, dtype=dtype, device=device, requires_grad=True)
    probs = torch.full((num_rows,), p, device=device, requires_grad=True)
    dy = torch.ones_like(x) if dy is None else dy
    actual = by_layer(mlp, x, counts, probs, dy)
    exact = unit_results(mlp, bounds, num_rows, p, scale)
    assert_right(actual, [eager(mlp, x, bounds, probs, dy, exact)], exact, dtype)
    return actual


# ---- closed forms


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_weights_give_the_closed_form(dtype: torch.dtype, defer: bool, device: str) -> None:
    check_unit([3, 2, 7], 16, 32, 0.5, dtype, device, defer_wgrad=defer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_factor_on_one_expert_reaches_that_expert_only(dtype: torch.dtype, device: str) -> None:
    check_unit([17, 1, 33, 0, 2], 32, 16, 1.0, dtype, device, by_expert=True)


def test_idle_experts_get_gradients_of_exact_zeros(device: str) -> None:
    actual = check_unit([3, 0, 5, 2, 0, 1], 64, 64, 1.0, BF16, device)
    for name in ("fc1_weight", "fc2_weight"):
        assert actual[name][[1, 4]].eq(0).all()
        assert actual[name][[0, 2, 3, 5]].ne(0).all()


def test_idle_experts_after_a_call_in_which_all_were_busy(device: str) -> None:
    """The freed gradients' memory comes back: idle experts must not keep what lies there."""
    mlp = unit_mlp(256, 16, 8, dtype=FP32, device=device)
    x = torch.ones(512, 16, device=device)
    by_layer(mlp, x, [2] * 256, None, x)
    mlp.zero_grad()
    poison = [torch.full_like(w, torch.nan) for w in mlp.parameters()]
    del poison
    for counts in ([1] * 8 + [0] * 248, [0] * 256):
        actual = by_layer(mlp, x[:8], counts, None, x[:8])
        busy = sum(counts)
        for name in ("fc1_weight", "fc2_weight"):
            assert actual[name][:busy].gt(0).all()
            assert actual[name][busy:].eq(0).all()
        assert actual["y"][busy:].eq(0).all()


def test_an_idle_expert_between_two_busy_ones_returns_promptly(device: str) -> None:
    thread = threading.Thread(target=check_unit, args=([8, 0, 8], 16, 16, 1.0, BF16, device), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "the backward hangs"


def test_expanded_gradient_of_the_output(device: str) -> None:
    dy = torch.ones((), device=device).expand(5, 16)
    check_unit([3, 2], 16, 32, 0.5, FP32, device, dy=dy)
    actual = check_unit([3, 2], 16, 32, 0.5, FP32, device)
    mlp = unit_mlp(2, 16, 32, dtype=FP32, device=device)
    x = torch.ones(5, 16, device=device, requires_grad=True)
    probs = torch.full((5,), 0.5, device=device, requires_grad=True)
    mlp(x, [3, 2], probs).sum().backward()
    assert_same({"x": x.grad, "probs": probs.grad, **gradients(mlp)}, {k: v for k, v in actual.items() if k != "y"})


def test_mean_as_loss(device: str) -> None:
    """1 / 64, a power of two: each gradient is that of the sum times it, to the bit."""
    mlp = unit_mlp(2, 16, 32, dtype=FP32, device=device)
    x, probs = torch.ones(4, 16, device=device), torch.full((4,), 0.5, device=device)
    mlp(x, [3, 1], probs).mean().backward()
    by_mean = gradients(mlp)
    mlp.zero_grad()
    mlp(x, [3, 1], probs).sum().backward()
    assert_same(by_mean, {name: g / 64 for name, g in gradients(mlp).items()})


@pytest.mark.parametrize(
    "options",
    [{}, {"defer_wgrad": True}],
    ids=["plain", "deferred"],
)
@pytest.mark.parametrize("frozen", [None, "fc1_weight", "fc2_weight"])
def test_no_mode_drops_a_gradient(frozen: str | None, options: dict[str, Any], device: str) -> None:
    mlp = unit_mlp(3, 16, 32, dtype=FP32, device=device, **options)
    if frozen:
        getattr(mlp, frozen).requires_grad_(False)
    x = torch.ones(6, 16, device=device, requires_grad=True)
    probs = torch.full((6,), 0.5, device=device, requires_grad=True)
    actual = by_layer(mlp, x, [1, 3, 2], probs, torch.ones_like(x))
    exact = unit_results(mlp, running([1, 3, 2]), 6, 0.5, [1.0] * 3)
    if frozen:
        assert actual[frozen] is None
        exact[frozen] = None
    assert_right(actual, [eager(mlp, x, running([1, 3, 2]), probs, torch.ones_like(x), exact)], exact, FP32)


# ---- the gate comes first


def test_first_rows_of_fc1_are_the_gate(device: str) -> None:
    """2I equals H here: nothing in the shape tells gate from up."""
    mlp = GroupedMLP(4, 2, 1, dtype=torch.float64, device=device)
    with torch.no_grad():
        mlp.fc1_weight[0, :2], mlp.fc1_weight[0, 2:] = -0.25, 0.5
        mlp.fc2_weight.fill_(0.5)
        y = mlp(torch.ones(1, 4, dtype=torch.float64, device=device), [1])  # gate -1, up 2
    assert y.flatten().tolist() == pytest.approx([-2 / (1 + math.e)] * 4, rel=1e-14)  # silu(-1) * 2


@pytest.mark.parametrize("half", ["gate", "up"])
def test_each_half_contributes_to_dx(half: str, device: str) -> None:
    """With one half of fc1 zero, the other half's share of dx remains."""
    mlp = GroupedMLP(6, 4, 2, device=device, bias=True)
    with torch.no_grad():
        rows = slice(0, 4) if half == "gate" else slice(4, 8)
        mlp.fc1_weight[:, rows] = 0
    x = rand(7, 6, dtype=FP32, device=device)
    dx = check(mlp, x, running([3, 4]), [3, 4], None, rand(7, 6, dtype=FP32, device=device, requires_grad=False))["x"]
    assert dx.ne(0).any()


def test_weights_are_stacked_in_the_order_of_experts(device: str) -> None:
    """A state dict from one weight per expert: each expert answers as its own two linear maps do."""
    generator = torch.Generator().manual_seed(1)
    experts = [(torch.randn(8, 6, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(3)]
    mlp = GroupedMLP(6, 4, 3)
    fc1, fc2 = (torch.stack(weights) for weights in zip(*experts, strict=True))
    mlp.load_state_dict({"fc1_weight": fc1, "fc2_weight": fc2})
    mlp.to(device)
    x = rand(6, 6, dtype=FP32, device=device, requires_grad=False)
    y = mlp(x, [1, 2, 3])
    for expert, (start, end) in enumerate(running([1, 2, 3])):
        w1, w2 = (w.to(device) for w in experts[expert])
        in_fp64, in_fp32 = (
            plain_activation(x[start:end].to(dtype) @ w1.to(dtype).t(), "swiglu") @ w2.to(dtype).t()
            for dtype in (torch.float64, FP32)
        )
        assert_as_accurate_as_eager(y[start:end].detach(), in_fp32, in_fp64)


# ---- rows of no expert


def random_layer(
    layout: Layout, device: str, dtype: torch.dtype = FP32, hidden: int = 12, inner: int = 20, **options: Any
) -> tuple[GroupedMLP, Tensor, Tensor, Tensor]:
    """mlp, x, probs, dy: random, and NaN and inf in the rows of no expert."""
    mlp = GroupedMLP(hidden, inner, layout.num_experts, dtype=dtype, device=device, **options)
    x, dy = (rand(layout.num_rows, hidden, dtype=dtype, device=device, requires_grad=False) for _ in range(2))
    probs = rand(layout.num_rows, dtype=FP32, device=device, low=0, requires_grad=False)
    for t in (x, dy, probs):
        poison_unowned(t, layout)
    return mlp, x.requires_grad_(), probs.requires_grad_(), dy


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_with_nan_in_rows_of_no_expert(layout: Layout, dtype: torch.dtype, defer: bool, device: str) -> None:
    mlp, x, probs, dy = random_layer(layout, device, dtype, bias=True, defer_wgrad=defer)
    check(mlp, x, layout.bounds, layout.rows(device), probs, dy)


def test_tail_rows_are_zero_at_every_step(device: str) -> None:
    for _ in range(2):
        actual = check_unit([6, 4], 64, 16, 1.0, BF16, device, spare=6)
        for name in ("y", "x", "probs"):
            assert actual[name][10:].eq(0).all()
        poison = [torch.full_like(t, torch.nan) for t in actual.values()]
        del actual, poison


def test_tail_rows_with_nan_leave_the_gradients_of_the_routed_rows_alone(device: str) -> None:
    mlp = GroupedMLP(8, 6, 2, device=device)
    x, dy = (rand(8, 8, dtype=FP32, device=device) for _ in range(2))
    probs = rand(8, dtype=FP32, device=device, low=0)
    alone = by_layer(mlp, x.detach()[:4].requires_grad_(), [4, 0], probs.detach()[:4].requires_grad_(), dy[:4])
    with torch.no_grad():
        x[4:], dy[4:], probs[4:] = torch.nan, torch.inf, 0
    actual = by_layer(mlp, x, [4, 0], probs, dy)
    for name in ("y", "x", "probs"):
        assert actual[name][4:].eq(0).all()
        assert torch.equal(actual[name][:4], alone[name])
    assert_same(
        {n: actual[n] for n in ("fc1_weight", "fc2_weight")}, {n: alone[n] for n in ("fc1_weight", "fc2_weight")}
    )


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_nan_of_one_expert_stays_there(expert: int, device: str) -> None:
    """A tile that reaches into a neighbour's rows must not let them in."""
    counts = [17, 33, 5]
    mlp = GroupedMLP(16, 8, 3, bias=True, device=device)
    x, dy = (rand(55, 16, dtype=FP32, device=device, requires_grad=False) for _ in range(2))
    clean = by_layer(mlp, x.requires_grad_(), counts, None, dy)
    start, end = running(counts)[expert]
    with torch.no_grad():
        x[start:end] = torch.nan
    actual = by_layer(mlp, x, counts, None, dy)
    others = [e for e in range(3) if e != expert]
    assert actual["y"][start:end].isnan().all()
    for name in WEIGHTS:
        assert torch.equal(actual[name][others], clean[name][others]), name
    for name in ("y", "x"):
        assert torch.equal(actual[name][:start], clean[name][:start]), name
        assert torch.equal(actual[name][end:], clean[name][end:]), name


def test_tail_of_an_inference_call_is_zero(device: str) -> None:
    mlp = GroupedMLP(64, 16, 2, dtype=BF16, device=device)
    with torch.inference_mode():
        y = mlp(torch.zeros(32, 64, dtype=BF16, device=device), [5, 6])
    assert y.eq(0).all()


def test_masked_layout(device: str) -> None:
    """x (E, C, H): the rows behind an expert's count hold NaN, in x, probs and the gradient of the output."""
    mlp = GroupedMLP(64, 12, 2, device=device)
    x, dy = (rand(2, 8, 64, dtype=FP32, device=device) for _ in range(2))
    probs = rand(2, 8, dtype=FP32, device=device, low=0)
    with torch.no_grad():
        x[0, 3:], probs[0, 3:], dy[0, 3:] = torch.nan, torch.nan, torch.nan
    actual = check(mlp, x, [(0, 3), (8, 16)], [3, 8], probs, dy.detach())
    assert actual["y"].shape == actual["x"].shape == (2, 8, 64)
    assert actual["probs"].shape == (2, 8)
    ranges = RowRanges.masked([3, 8], 8, device=device)
    assert_same(by_layer(mlp, x, ranges, probs, dy), actual)


@pytest.mark.parametrize("counts", [[5, 8], [0, 8], [8, 8], [0, 0]], ids=str)
def test_masked_layout_with_any_counts(counts: list[int], device: str) -> None:
    mlp = GroupedMLP(10, 7, 2, device=device)
    x, dy = (rand(2, 8, 10, dtype=FP32, device=device) for _ in range(2))
    check(mlp, x, [(0, counts[0]), (8, 8 + counts[1])], counts, None, dy.detach())


def test_masked_layout_without_capacity(device: str) -> None:
    mlp = GroupedMLP(10, 7, 2, device=device)
    x = torch.empty(2, 0, 10, device=device, requires_grad=True)
    actual = by_layer(mlp, x, [0, 0], None, torch.empty_like(x))
    assert actual["y"].shape == actual["x"].shape == (2, 0, 10)
    assert actual["fc1_weight"].eq(0).all()


def test_counts_that_fit_no_tile(device: str) -> None:
    mlp = GroupedMLP(16, 8, 3, device=device)
    x, dy = (rand(128, 16, dtype=FP32, device=device) for _ in range(2))
    check(mlp, x, running([5, 3, 120]), [5, 3, 120], None, dy.detach())


def test_every_expert_smaller_than_a_tile(device: str) -> None:
    counts = [1 + 7 * e % 15 for e in range(64)]
    mlp = GroupedMLP(24, 16, 64, dtype=BF16, device=device)
    x, dy = (rand(sum(counts), 24, dtype=BF16, device=device) for _ in range(2))
    check(mlp, x, running(counts), counts, None, dy.detach())


# ---- no rows


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("num_experts", [1, 2, 8])
def test_without_rows_the_output_stays_in_the_graph(
    num_experts: int, dtype: torch.dtype, defer: bool, device: str
) -> None:
    """Every parameter gets zeros, not None, and its hooks fire: other ranks wait for them."""
    mlp = GroupedMLP(16, 8, num_experts, dtype=dtype, device=device, bias=True, defer_wgrad=defer)
    fired = []
    for name, p in mlp.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    x = torch.empty(0, 16, dtype=dtype, device=device, requires_grad=True)
    probs = torch.empty(0, device=device, requires_grad=True)
    y = mlp(x, [0] * num_experts, probs)
    assert y.shape == (0, 16)
    assert y.requires_grad
    y.sum().backward()
    mlp.backward_dw()
    assert x.grad.shape == (0, 16)
    assert probs.grad.shape == (0,)
    assert sorted(fired) == sorted(WEIGHTS)
    for name, p in mlp.named_parameters():
        assert p.grad.dtype == dtype, name
        assert p.grad.eq(0).all(), name


# ---- strides and sizes


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_gradient_of_the_output_of_any_strides(defer: bool, device: str) -> None:
    mlp = GroupedMLP(6, 5, 2, dtype=BF16, device=device, defer_wgrad=defer)
    x, dy = (rand(7, 6, dtype=BF16, device=device) for _ in range(2))
    dy = dy.detach()
    expected = by_layer(mlp, x, [3, 4], None, dy)
    assert_same(by_layer(mlp, x, [3, 4], None, dy.t().contiguous().t()), expected)
    sliced = torch.full((7, 13), torch.nan, dtype=BF16, device=device)[:, 1::2].copy_(dy)
    assert_same(by_layer(mlp, x, [3, 4], None, sliced), expected)


def test_gradient_of_a_sliced_output(device: str) -> None:
    mlp = GroupedMLP(6, 5, 2, device=device)
    x = rand(7, 6, dtype=FP32, device=device)
    mlp(x, [3, 4])[:, ::2].sum().backward()
    actual = {"x": x.grad, **gradients(mlp)}
    x.grad = None
    mlp.zero_grad()
    dy = torch.tensor([1.0, 0, 1, 0, 1, 0], device=device).repeat(7, 1)
    mlp(x, [3, 4]).backward(dy)
    assert_same(actual, {"x": x.grad, **gradients(mlp)})


def test_masked_gradient_transposed_in_its_leading_dimensions(device: str) -> None:
    mlp = GroupedMLP(6, 5, 2, device=device)
    x, dy = (rand(2, 4, 6, dtype=FP32, device=device) for _ in range(2))
    dy = dy.detach()
    transposed = dy.transpose(0, 1).contiguous().transpose(0, 1)
    assert not transposed.is_contiguous()
    assert_same(by_layer(mlp, x, [3, 4], None, transposed), by_layer(mlp, x, [3, 4], None, dy))


def strided(name: str, rows: int, device: str) -> Tensor:
    """(rows, 60) in bf16: row stride or base address that no 16-byte access fits."""
    if name == "row-stride-130-bytes":
        return torch.full((rows, 65), torch.nan, dtype=BF16, device=device)[:, :60]
    if name == "base-off-by-2-bytes":
        return torch.full((1 + rows * 60,), torch.nan, dtype=BF16, device=device)[1:].view(rows, 60)
    assert name == "transposed"
    return torch.full((60, rows), torch.nan, dtype=BF16, device=device).t()


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("name", ["row-stride-130-bytes", "base-off-by-2-bytes", "transposed"])
def test_x_of_any_strides(name: str, defer: bool, device: str) -> None:
    mlp = GroupedMLP(60, 60, 3, dtype=BF16, device=device, defer_wgrad=defer)
    values = rand(11, 60, dtype=BF16, device=device, requires_grad=False)
    x = strided(name, 11, device).copy_(values).requires_grad_()
    dy = rand(11, 60, dtype=BF16, device=device, requires_grad=False)
    check(mlp, x, running([4, 0, 7]), [4, 0, 7], None, dy)


@pytest.mark.parametrize("hidden", [1, 8])
@pytest.mark.parametrize("inner", [1, 4])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_small_sizes(hidden: int, inner: int, activation: str, device: str) -> None:
    mlp = GroupedMLP(hidden, inner, 2, activation=activation, bias=True, device=device)
    x, dy = (rand(3, hidden, dtype=FP32, device=device) for _ in range(2))
    check(mlp, x, running([1, 2]), [1, 2], rand(3, dtype=FP32, device=device, low=0), dy.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("hidden", "inner", "counts"),
    [(96, 40, [1, 1, 1, 5]), (48, 80, [4, 0, 7]), (5, 3, [0, 7]), (63, 100, [33, 1, 17])],
    ids=["multiples-of-8", "all-different", "odd", "around-100"],
)
def test_odd_sizes(hidden: int, inner: int, counts: list[int], dtype: torch.dtype, device: str) -> None:
    mlp = GroupedMLP(hidden, inner, len(counts), dtype=dtype, bias=True, device=device)
    x, dy = (rand(sum(counts), hidden, dtype=dtype, device=device) for _ in range(2))
    probs = rand(sum(counts), dtype=dtype, device=device, low=0)
    actual = check(mlp, x, running(counts), counts, probs, dy.detach())
    for name, p in mlp.named_parameters():
        assert actual[name].shape == p.shape


# ---- counts


COUNTS_FORMS: dict[str, Callable[[list[int], str], Any]] = {
    "tuple": lambda counts, device: tuple(counts),
    "int32-cpu": lambda counts, device: torch.tensor(counts, dtype=torch.int32),
    "int64-cpu": lambda counts, device: torch.tensor(counts),
    "int32-device": lambda counts, device: torch.tensor(counts, dtype=torch.int32, device=device),
    "int64-device": lambda counts, device: torch.tensor(counts, device=device),
    "every-second": lambda counts, device: torch.tensor(counts, device=device).repeat_interleave(2)[::2],
    "ranges": lambda counts, device: RowRanges.contiguous(counts, device=device),
    "padded-by-1": lambda counts, device: RowRanges.padded(counts, 1, device=device),
    "m-indices": lambda counts, device: RowRanges.from_m_indices(
        torch.tensor([e for e, count in enumerate(counts) for _ in range(count)], device=device), len(counts)
    ),
}


@pytest.mark.parametrize("form", COUNTS_FORMS)
def test_forms_of_the_counts(form: str, device: str) -> None:
    mlp = GroupedMLP(6, 4, 3, device=device)
    x, dy = (rand(8, 6, dtype=FP32, device=device) for _ in range(2))
    counts = [3, 0, 5]
    expected = by_layer(mlp, x, counts, None, dy)
    assert_same(by_layer(mlp, x, COUNTS_FORMS[form](counts, device), None, dy), expected)


def test_rows_marked_minus_one(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device)
    x, dy = (rand(5, 6, dtype=FP32, device=device) for _ in range(2))
    with torch.no_grad():
        x[2:4] = torch.nan
    rows = RowRanges.from_m_indices(torch.tensor([0, 0, -1, -1, 1], device=device), 2)
    actual = check(mlp, x, [(0, 2), (4, 5)], rows, None, dy.detach())
    assert actual["x"][2:4].eq(0).all()


def test_padded_segments(device: str) -> None:
    """Ranges that start at multiples of 8 are not a running sum of the counts."""
    mlp = GroupedMLP(6, 4, 3, device=device)
    x, dy = (rand(40, 6, dtype=FP32, device=device) for _ in range(2))
    rows = RowRanges.padded([3, 9, 8], 8, num_rows=40, device=device)
    check(mlp, x, [(0, 3), (8, 17), (24, 32)], rows, None, dy.detach())


# ---- dtypes


@pytest.mark.parametrize("probs_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_follow_x_and_probs(dtype: torch.dtype, probs_dtype: torch.dtype, device: str) -> None:
    mlp = GroupedMLP(8, 6, 2, dtype=dtype, device=device, bias=True)
    x, dy = (rand(7, 8, dtype=dtype, device=device) for _ in range(2))
    probs = rand(7, dtype=probs_dtype, device=device, low=0)
    actual = check(mlp, x, running([3, 4]), [3, 4], probs, dy.detach())
    assert actual["y"].dtype == actual["x"].dtype == dtype
    assert actual["probs"].dtype == probs_dtype


def test_fp32_probs_are_multiplied_before_rounding(device: str) -> None:
    mlp = unit_mlp(1, 16, 32, dtype=BF16, device=device)
    x = rand(64, 16, dtype=BF16, device=device, requires_grad=False)
    probs = torch.rand(64, dtype=torch.float64).mul(0.05).to(device, FP32)
    with torch.no_grad():
        mlp.fc1_weight.copy_(torch.randn(1, 64, 16, dtype=torch.float64))
        mlp.fc2_weight.copy_(torch.randn(1, 16, 32, dtype=torch.float64))
        y, rounded = mlp(x, [64], probs), mlp(x, [64], probs.bfloat16())
    assert not torch.equal(y, rounded)
    weights = {name: p.detach() for name, p in mlp.named_parameters()}
    in_fp64, in_bf16 = (loop(x, [(0, 64)], probs, weights, "swiglu", dtype) for dtype in (torch.float64, BF16))
    assert_as_accurate_as_eager(y, in_bf16, in_fp64)


def test_a_prob_that_rounds_away_in_bf16(device: str) -> None:
    """h = 1, s = silu(1), p = 1 + 2^-9: y is p s rounded once, which p rounded to bf16 cannot give."""
    mlp = unit_mlp(1, 16, 16, dtype=BF16, device=device)
    x = torch.ones(512, 16, dtype=BF16, device=device)
    p = 1 + torch.arange(512, device=device) / 2**17
    with torch.no_grad():
        y = mlp(x, [512], p)
    expected = (p.double() * SILU).to(BF16)
    assert torch.equal(y, expected[:, None].expand(512, 16))
    assert not torch.equal(expected, (p.bfloat16().double() * SILU).to(BF16))


def test_gradient_of_fp32_probs_of_a_bf16_layer(device: str) -> None:
    """No row out of line: each errs by what roundings to bf16 of its h and da can do, and all else is fp32.

    A rounding moves h by up to 2^-9 of it, so s = silu(g) u by up to about 2^-8 for g near 0, and da by up to 2^-9.
    """
    mlp = GroupedMLP(2048, 16, 4, dtype=BF16, device=device)
    x, dy = (rand(8192, 2048, dtype=BF16, device=device, requires_grad=False) for _ in range(2))
    counts = [3000, 0, 5000, 192]
    probs = rand(8192, dtype=FP32, device=device, low=0)
    mlp(x, counts, probs).backward(dy)
    magnitude, exact = torch.empty(8192, dtype=torch.float64), torch.empty(8192, dtype=torch.float64)
    for expert, (start, end) in enumerate(running(counts)):
        s = plain_activation(x[start:end].double() @ mlp.fc1_weight[expert].double().t(), "swiglu")
        terms = (dy[start:end].double() @ mlp.fc2_weight[expert].double() * s).detach().cpu()
        exact[start:end], magnitude[start:end] = terms.sum(1), terms.abs().sum(1)
    error = (probs.grad.cpu().double() - exact).abs()
    assert (error <= eps(BF16) * magnitude).all()
    assert error.norm() <= 1e-2 * exact.norm()


def test_fp32_is_true_fp32(device: str) -> None:
    if device == "cuda":
        assert not torch.backends.cuda.matmul.allow_tf32
    mlp = GroupedMLP(256, 256, 2, device=device)
    x, dy = (rand(64, 256, dtype=FP32, device=device) for _ in range(2))
    actual = check(mlp, x, running([30, 34]), [30, 34], None, dy.detach())
    exact = by_loop(mlp, x, running([30, 34]), None, dy.detach(), torch.float64)
    for name, value in exact.items():
        if value is not None:
            assert (actual[name] - value).norm() < 1e-5 * value.norm(), name


def test_fp32_parameters_with_bf16_x(device: str) -> None:
    """The gradient comes in the parameter's dtype, and a second step's small share survives the addition."""
    mlp = GroupedMLP(8, 6, 2, device=device, bias=True)
    x, dy = (rand(7, 8, dtype=BF16, device=device) for _ in range(2))
    dy = dy.detach()
    check(mlp, x, running([3, 4]), [3, 4], None, dy)
    mlp.zero_grad()
    steps = []
    for factor in (1.0, 2.0**-10):
        mlp(x, [3, 4]).backward(dy * factor)
        steps.append({name: p.grad.clone() for name, p in mlp.named_parameters()})
    for name, p in mlp.named_parameters():
        assert p.grad.dtype == FP32
        assert torch.equal(steps[1][name], steps[0][name] * (1 + 2.0**-10)), name
        assert not torch.equal(p.grad, p.grad.bfloat16().float()), f"the gradient of {name} was rounded to bf16"


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("weight_dtype", [BF16, FP32, torch.float16], ids=str)
@pytest.mark.parametrize("x_dtype", [BF16, FP32], ids=str)
def test_autocast(x_dtype: torch.dtype, weight_dtype: torch.dtype, defer: bool, device: str) -> None:
    """Computes in autocast's dtype, as from copies in it; gradients come in the dtype of what they belong to."""
    mlp = GroupedMLP(8, 6, 2, dtype=weight_dtype, device=device, bias=True, defer_wgrad=defer)
    x, dy = (rand(7, 8, dtype=dtype, device=device) for dtype in (x_dtype, BF16))
    probs = rand(7, dtype=FP32, device=device, low=0)
    dy = dy.detach()
    with torch.autocast(device, BF16):
        y = mlp(x, [3, 4], probs)
    y.backward(dy)
    mlp.backward_dw()
    actual = {"y": y.detach(), "x": x.grad, "probs": probs.grad, **gradients(mlp)}
    assert y.dtype == BF16
    twin = copy.deepcopy(mlp).to(BF16).float()
    expected = by_layer(twin, x.detach().to(BF16).requires_grad_(), [3, 4], probs, dy)
    for name, value in expected.items():
        dtype = {"y": BF16, "x": x_dtype, "probs": FP32}.get(name, weight_dtype)
        assert actual[name].dtype == dtype, name
        assert torch.equal(actual[name], value.to(dtype)), name


def test_backward_within_autocast(device: str) -> None:
    mlp = GroupedMLP(8, 6, 2, device=device)
    x = rand(7, 8, dtype=FP32, device=device)
    results = []
    for inside in (False, True):
        with torch.autocast(device, BF16):
            y = mlp(x, [3, 4])
        with torch.autocast(device, BF16, enabled=inside):
            results.append(torch.autograd.grad(y.float().square().sum(), [x, *mlp.parameters()]))
    for outside, within in zip(*results, strict=True):
        assert torch.equal(outside, within)
