"""GroupedMLP in autograd: only what is asked for is computed and kept, graphs, threads, and runs that repeat."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from inputs import unchanged
from layer import (
    Ops,
    assert_equal_sums,
    assert_same,
    by_layer,
    gradients,
    loop,
    rand,
    running,
    subsets,
)
from torch import Tensor

from grouped_experts import GroupedMLP

BF16, FP32 = torch.bfloat16, torch.float32


# ---- only what is asked for


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_subsets_of_wanted_gradients(bias: bool, defer: bool, device: str) -> None:
    """Each wanted gradient is, to the bit, that of the run in which all are wanted; the others are None."""
    mlp = GroupedMLP(5, 3, 2, device=device, bias=bias, defer_wgrad=defer)
    x, dy = (rand(7, 5, dtype=FP32, device=device) for _ in range(2))
    probs = rand(7, dtype=FP32, device=device, low=0)
    tensors = {"x": x, "probs": probs, **dict(mlp.named_parameters())}
    full = by_layer(mlp, x, [3, 4], probs, dy.detach())
    for wanted in subsets(list(tensors)):
        for name, t in tensors.items():
            t.requires_grad_(name in wanted)
        actual = by_layer(mlp, x, [3, 4], probs, dy.detach())
        assert_same(actual, {name: g if name in wanted or name == "y" else None for name, g in full.items()})


def test_products_run_only_for_wanted_gradients(device: str) -> None:
    mlp = GroupedMLP(5, 3, 2, device=device)
    x = rand(7, 5, dtype=FP32, device=device)

    def products(**wanted: bool) -> list[str]:
        for name, t in {"x": x, **dict(mlp.named_parameters())}.items():
            t.requires_grad_(wanted.get(name, False))
        y = mlp(x, [3, 4])
        with Ops() as ops:
            y.sum().backward()
        return [name for name in ops.names if "grouped" in name or "fc2_dgrad" in name]

    assert products(x=True) == ["fc2_dgrad_activation", "m_grouped_gemm"]
    assert products(fc1_weight=True) == ["fc2_dgrad_activation", "k_grouped_gemm"]
    assert products(fc2_weight=True) == ["k_grouped_gemm"]
    assert sorted(products(x=True, fc1_weight=True, fc2_weight=True)) == [
        "fc2_dgrad_activation",
        "k_grouped_gemm",
        "k_grouped_gemm",
        "m_grouped_gemm",
    ]


def saved_bytes(mlp: GroupedMLP, x: Tensor, counts: Any, probs: Tensor | None) -> tuple[int, bool]:
    """Bytes that a forward keeps, parameters aside, and whether x is among them."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.data_ptr()] = max(kept.get(t.data_ptr(), 0), t.numel() * t.element_size())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = mlp(x, counts, probs)
    assert y.shape == x.shape
    for p in mlp.parameters():
        kept.pop(p.data_ptr(), None)
    return sum(kept.values()), x.data_ptr() in kept


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_kept_memory_is_one_x_and_one_h(defer: bool, device: str) -> None:
    rows, hidden, inner = 1024, 256, 128
    mlp = GroupedMLP(hidden, inner, 4, dtype=BF16, device=device, defer_wgrad=defer)
    x = rand(rows, hidden, dtype=BF16, device=device)
    probs = rand(rows, dtype=FP32, device=device, low=0)
    counts = [rows // 4] * 4
    least = rows * (hidden + 2 * inner) * x.element_size()
    kept, has_x = saved_bytes(mlp, x, counts, probs)
    assert has_x
    assert least <= kept <= 1.01 * least

    mlp.requires_grad_(False)
    kept, has_x = saved_bytes(mlp, x, counts, probs)
    assert not has_x, "x is kept although no weight wants a gradient"
    assert kept <= 1.01 * rows * 2 * inner * x.element_size() + rows * hidden * 0.01 * x.element_size()
    assert saved_bytes(mlp, x.detach(), counts, probs.detach()) == (0, False)


def test_nothing_wants_a_gradient(device: str) -> None:
    mlp = GroupedMLP(5, 3, 2, device=device)
    x = rand(7, 5, dtype=FP32, device=device, requires_grad=False)
    with torch.no_grad():
        y = mlp(x, [3, 4])
    assert not y.requires_grad
    assert mlp(x, [3, 4]).requires_grad
    assert not mlp.requires_grad_(False)(x, [3, 4]).requires_grad


def test_dropped_outputs_free_what_they_kept(device: str) -> None:
    mlp = GroupedMLP(5, 3, 2, device=device)
    kept = []
    for _ in range(20):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _remember(t, kept), lambda t: t[0]):
            mlp(rand(7, 5, dtype=FP32, device=device), [3, 4])
    assert len(kept) >= 60
    gc.collect()
    assert not any(ref() is not None for ref in kept), "a dropped graph is kept alive"


def _remember(t: Tensor, kept: list[weakref.ref[list[Tensor]]]) -> list[Tensor]:
    class Packed(list[Tensor]):
        """A list that a weak reference can watch."""

    packed = Packed([t])
    kept.append(weakref.ref(packed))
    return packed


# ---- graph


def test_retained_graph_gives_the_same_numbers_again(device: str) -> None:
    """Nothing of the caller is written: x may be saved by the op before it, the gradient may be the caller's."""
    mlp = GroupedMLP(6, 4, 2, device=device, bias=True)
    z = rand(7, 6, dtype=FP32, device=device)
    probs = rand(7, dtype=FP32, device=device, low=0)
    dy = rand(7, 6, dtype=FP32, device=device, requires_grad=False)
    x = z.exp()
    with unchanged(x, probs, dy, *mlp.parameters()):
        y = mlp(x, [3, 4], probs)
        wanted = [z, probs, *mlp.parameters()]
        first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
        second = torch.autograd.grad(y, wanted, dy)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, wanted, dy)


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("shape", [(8, 6), (2, 4, 6)], ids=["rows", "masked"])
def test_output_may_be_changed_in_place(shape: tuple[int, ...], defer: bool, device: str) -> None:
    """FSDP2 warns of a wrapped module that returns a view: rows, whose shape is that of x already, are none."""
    mlp = GroupedMLP(6, 4, 2, device=device, defer_wgrad=defer)
    x = rand(*shape, dtype=FP32, device=device)
    doubled = by_layer(mlp, x, [3, 4], None, torch.full_like(x, 2))
    x.grad = None
    mlp.zero_grad()
    y = mlp(x, [3, 4])
    assert not (y.dim() == 2 and y._is_view())
    expected = y.detach() * 2
    assert torch.equal(y.mul_(2), expected)
    y.backward(torch.ones_like(x))
    mlp.backward_dw()
    actual = {"x": x.grad, **gradients(mlp)}
    assert_same(actual, {name: doubled[name] for name in actual})


def test_same_layer_twice_in_one_graph(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device, dtype=torch.float64)
    x = rand(7, 6, dtype=torch.float64, device=device)
    mlp(mlp(x, [3, 4]), [5, 2]).sum().backward()
    actual = {"x": x.grad, **gradients(mlp)}
    leaves = {name: p.detach().clone().requires_grad_() for name, p in mlp.named_parameters()}
    leaf = x.detach().clone().requires_grad_()
    inner = loop(leaf, running([3, 4]), None, leaves, "swiglu", torch.float64)
    loop(inner, running([5, 2]), None, leaves, "swiglu", torch.float64).sum().backward()
    assert_equal_sums(actual, {name: t.grad for name, t in {"x": leaf, **leaves}.items()})


@pytest.mark.parametrize("deferred", [False, True], ids=["plain", "deferred"])
def test_double_backward_raises(deferred: bool, device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device, defer_wgrad=deferred)
    x = rand(7, 6, dtype=FP32, device=device)
    (dx,) = torch.autograd.grad(mlp(x, [3, 4]).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="GroupedMLP: double backward is not supported"):
        dx.sum().backward()


def test_gradient_penalty_raises_where_the_gradient_of_the_output_is_constant(device: str) -> None:
    """dy needs no gradient here: a graph that is cut in silence would drop the penalty."""
    mlp = GroupedMLP(6, 4, 2, device=device)
    x = rand(7, 6, dtype=FP32, device=device)
    y = mlp(x, [3, 4])
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    with pytest.raises(RuntimeError, match="GroupedMLP: double backward is not supported"):
        (y.sum() + dx.square().sum()).backward()


def test_double_backward_of_a_weight_gradient_raises(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device)
    x = rand(7, 6, dtype=FP32, device=device, requires_grad=False)
    (dw,) = torch.autograd.grad(mlp(x, [3, 4]).sum(), mlp.fc1_weight, create_graph=True)
    with pytest.raises(RuntimeError, match="GroupedMLP: double backward is not supported"):
        dw.square().sum().backward()


def test_create_graph_alone_is_harmless(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device)
    x = rand(7, 6, dtype=FP32, device=device)
    (first,) = torch.autograd.grad(mlp(x, [3, 4]).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(mlp(x, [3, 4]).sum(), x)
    assert torch.equal(first, second)


@pytest.mark.parametrize("deferred", [False, True], ids=["plain", "deferred"])
def test_weights_that_are_outputs_of_other_operations(deferred: bool, device: str) -> None:
    """LoRA: W = base + B A with B zero; dB = dW A^T."""
    mlp = GroupedMLP(6, 4, 2, device=device, dtype=torch.float64, defer_wgrad=deferred)
    a = rand(2, 3, 6, dtype=torch.float64, device=device)
    b = torch.zeros(2, 8, 3, dtype=torch.float64, device=device, requires_grad=True)
    x = rand(7, 6, dtype=torch.float64, device=device)
    dy = rand(7, 6, dtype=torch.float64, device=device, requires_grad=False)
    expected = by_layer(mlp, x, [3, 4], None, dy)["fc1_weight"]
    mlp.zero_grad()
    weight = mlp.fc1_weight.detach() + b @ a
    torch.func.functional_call(mlp, {"fc1_weight": weight}, (x, [3, 4])).backward(dy)
    mlp.backward_dw()
    assert mlp.fc1_weight.grad is None
    assert b.grad.ne(0).any()
    assert_equal_sums({"b": b.grad}, {"b": expected @ a.detach().mT})
    assert torch.equal(a.grad, torch.zeros_like(a))


def test_weight_tied_over_two_layers(device: str) -> None:
    first, second = (GroupedMLP(6, 4, 2, device=device, dtype=torch.float64) for _ in range(2))
    second.fc1_weight = first.fc1_weight
    x = rand(7, 6, dtype=torch.float64, device=device)
    second(first(x, [3, 4]), [3, 4]).sum().backward()
    tied = first.fc1_weight.grad
    apart = copy.deepcopy(second)
    first.zero_grad()
    apart(first(x, [3, 4]), [3, 4]).sum().backward()
    assert_equal_sums({"fc1_weight": tied}, {"fc1_weight": first.fc1_weight.grad + apart.fc1_weight.grad})


def test_gradient_is_not_cloned(device: str) -> None:
    """The memory that the product wrote is that of .grad."""
    mlp = GroupedMLP(6, 4, 2, device=device)
    y = mlp(rand(7, 6, dtype=FP32, device=device), [3, 4])
    with Ops() as ops:
        y.sum().backward()
    assert {p.grad.data_ptr() for p in mlp.parameters()} == ops.addresses["k_grouped_gemm"]


def test_changes_of_a_weight_behind_autograd_are_seen(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device)
    x = rand(7, 6, dtype=FP32, device=device, requires_grad=False)
    before = mlp(x, [3, 4])
    mlp.fc2_weight.data.mul_(2)
    assert torch.equal(mlp(x, [3, 4]), 2 * before)


def test_weight_changed_between_forward_and_backward_raises(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device)
    y = mlp(rand(7, 6, dtype=FP32, device=device), [3, 4])
    with torch.no_grad():
        mlp.fc2_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_repeats_are_equal_to_the_bit(defer: bool, device: str) -> None:
    counts = [100, 0, 17, 211, 1, 64, 128, 3]
    mlp = GroupedMLP(64, 32, 8, dtype=BF16, device=device, bias=True, defer_wgrad=defer)
    x, dy = (rand(sum(counts), 64, dtype=BF16, device=device) for _ in range(2))
    probs = rand(sum(counts), dtype=FP32, device=device, low=0)
    first = by_layer(mlp, x, counts, probs, dy.detach())
    for _ in range(20):
        assert_same(by_layer(mlp, x, counts, probs, dy.detach()), first)


def test_in_a_thread_without_any_operation_before(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device)
    x, dy = (rand(7, 6, dtype=FP32, device=device) for _ in range(2))
    expected = by_layer(mlp, x, [3, 4], None, dy.detach())
    x.grad = None
    mlp.zero_grad()
    y = mlp(x, [3, 4])
    thread = threading.Thread(target=torch.autograd.backward, args=(y, dy.detach()))
    thread.start()
    thread.join()
    assert_same({"y": y.detach(), "x": x.grad, **gradients(mlp)}, expected)


def test_sums_are_plain(device: str) -> None:
    """Two ranks' batches in one call: the gradient is the sum of theirs, without a scale of its own."""
    mlp = GroupedMLP(6, 4, 1, device=device, dtype=torch.float64)
    x, dy = (rand(8, 6, dtype=torch.float64, device=device, requires_grad=False) for _ in range(2))
    halves = [by_layer(mlp, x[part], [4], None, dy[part]) for part in (slice(0, 4), slice(4, 8))]
    whole = by_layer(mlp, x, [8], None, dy)
    for name in ("fc1_weight", "fc2_weight"):
        assert_equal_sums({name: whole[name]}, {name: halves[0][name] + halves[1][name]})
