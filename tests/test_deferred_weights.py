"""Deferred weight gradients of shared, computed and frozen weights, and what makes a delivery raise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from deferral import COUNTS, batch, make, plain_gradients, plain_twin, step
from layer import WEIGHTS, Ops, assert_equal_sums, assert_same, by_layer, gradients, rand
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import grouped_experts
from grouped_experts import GroupedMLP, RowRanges, check_no_pending_wgrads

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


# ---- shared weights and weights that are outputs of other operations


def test_weights_tied_over_two_layers(device: str) -> None:
    """One joint delivery: one sum, one call of each hook."""
    model = nn.ModuleList(make(device, FP64) for _ in range(2))
    model[1].fc1_weight, model[1].fc2_bias = model[0].fc1_weight, model[0].fc2_bias
    twin = copy.deepcopy(model)
    assert twin[1].fc1_weight is twin[0].fc1_weight
    x, _, dy = batch(device, FP64)
    fired = []
    model[0].fc1_weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    for layers in (model, twin):
        layers[1].defer_wgrad = layers[0].defer_wgrad = layers is model
        layers[1](layers[0](x, COUNTS), [0, 5, 2]).backward(dy)
    grouped_experts.backward_dw(model)
    assert [layer.pending_wgrads for layer in model] == [0, 0]
    expected = gradients(twin)
    assert_equal_sums(gradients(model), expected)
    assert len(fired) == 1
    assert torch.equal(fired[0], model[0].fc1_weight.grad)


def test_weights_tied_over_two_layers_delivered_one_by_one(device: str) -> None:
    model = nn.ModuleList(make(device, FP64) for _ in range(2))
    model[1].fc1_weight = model[0].fc1_weight
    twin = copy.deepcopy(model)
    x, _, dy = batch(device, FP64)
    for layers in (model, twin):
        layers[1].defer_wgrad = layers[0].defer_wgrad = layers is model
        layers[1](layers[0](x, COUNTS), COUNTS).backward(dy)
    for layer in model:
        layer.backward_dw()
    expected = gradients(twin)
    assert_equal_sums(gradients(model), expected)


def test_layer_used_twice_in_one_graph(device: str) -> None:
    mlp = make(device, FP64)
    twin = plain_twin(mlp)
    x, _, dy = batch(device, FP64)
    for layer in (mlp, twin):
        layer(layer(x, COUNTS), [0, 5, 2]).backward(dy)
    assert mlp.pending_wgrads == 2
    mlp.backward_dw()
    assert_equal_sums(gradients(mlp), gradients(twin))


class Lora(nn.Module):
    """fc1 = base + B A, made anew at each forward."""

    def __init__(self, mlp: GroupedMLP) -> None:
        super().__init__()
        self.mlp = mlp.requires_grad_(False)
        like = {"dtype": mlp.fc1_weight.dtype, "device": mlp.fc1_weight.device}
        self.a = nn.Parameter(torch.randn(3, 2, 6, **like))
        self.b = nn.Parameter(torch.randn(3, 8, 2, **like))

    def forward(self, x: Tensor, counts: Any, probs: Tensor | None = None) -> Tensor:
        weight = self.mlp.fc1_weight + self.b @ self.a
        return torch.func.functional_call(self.mlp, {"fc1_weight": weight}, (x, counts, probs))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_lora_with_a_new_weight_for_each_micro_batch(micro_batches: int, device: str) -> None:
    lora = Lora(make(device, FP64))
    twin = copy.deepcopy(lora)
    twin.mlp.defer_wgrad = False
    for x, probs, dy in [batch(device, FP64) for _ in range(micro_batches)]:
        for model in (lora, twin):
            model(x, COUNTS, probs).backward(dy)
    assert lora.mlp.pending_wgrads == micro_batches
    assert lora.a.grad is None
    lora.mlp.backward_dw()
    expected = gradients(twin)
    assert_equal_sums(gradients(lora), expected)
    assert expected["a"].ne(0).any()
    assert lora.mlp.fc1_weight.grad is None


def test_one_computed_weight_for_several_micro_batches(device: str) -> None:
    """Its graph is walked once, with the sum."""
    mlp = make(device, FP64).requires_grad_(False)
    factor = rand(3, 8, 6, dtype=FP64, device=device)
    batches = [batch(device, FP64) for _ in range(2)]
    results = []
    for layer in (mlp, plain_twin(mlp)):
        weight = factor.exp()
        outputs = [torch.func.functional_call(layer, {"fc1_weight": weight}, (x, COUNTS, p)) for x, p, _ in batches]
        torch.autograd.backward(outputs, [dy for *_, dy in batches])
        layer.backward_dw()
        results.append({"factor": factor.grad})
        factor.grad = None
    assert_equal_sums(*results)


def test_computed_weight_shared_by_two_layers(device: str) -> None:
    """Both layers' roots are in one graph, which can be walked once only: one joint delivery."""
    model = nn.ModuleList(make(device, FP64).requires_grad_(False) for _ in range(2))
    factor = rand(3, 8, 6, dtype=FP64, device=device)
    x, _, dy = batch(device, FP64)
    results = []
    for defer in (True, False):
        weight = factor.exp()
        y = x.detach()
        for layer in model:
            layer.defer_wgrad = defer
            y = torch.func.functional_call(layer, {"fc1_weight": weight}, (y, COUNTS))
        y.backward(dy)
        grouped_experts.backward_dw(model)
        results.append({"factor": factor.grad})
        factor.grad = None
    assert_equal_sums(*results)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_parametrized_weight(device: str) -> None:
    mlp = make(device, FP64)
    x, probs, dy = batch(device, FP64)
    expected = plain_gradients(mlp, (x, probs, dy))["fc1_weight"]
    parametrize.register_parametrization(mlp, "fc1_weight", Doubled())
    step(mlp, x, probs, dy)
    mlp.backward_dw()
    original = mlp.parametrizations.fc1_weight.original
    assert torch.equal(original.grad, 2 * expected)


def test_delivery_does_not_compute_parametrizations_again(device: str) -> None:
    """It has the weight of the forward; spectral_norm, for one, takes a step of its power iteration each time."""
    mlp = make(device, FP64)
    doubled = Doubled()
    parametrize.register_parametrization(mlp, "fc1_weight", doubled)
    step(mlp, *batch(device, FP64))
    calls = doubled.calls
    mlp.backward_dw()
    assert doubled.calls == calls


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_gradient_checkpointing(reentrant: bool, micro_batches: int, device: str) -> None:
    mlp = make(device, FP64)
    batches = [batch(device, FP64) for _ in range(micro_batches)]
    for x, probs, dy in batches:
        checkpoint(mlp, x, COUNTS, probs, use_reentrant=reentrant).backward(dy)
    assert mlp.pending_wgrads == micro_batches
    mlp.backward_dw()
    expected = plain_gradients(mlp, *batches)
    assert_equal_sums(gradients(mlp), expected)


def test_saved_tensors_on_the_cpu(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    with torch.autograd.graph.save_on_cpu():
        y = mlp(x, COUNTS, probs)
    y.backward(dy)
    mlp.backward_dw()
    assert_same(gradients(mlp), plain_gradients(mlp, (x, probs, dy)))


def test_retained_graph_twice(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    y = mlp(x, COUNTS, probs)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    assert mlp.pending_wgrads == 2
    mlp.backward_dw()
    expected = {name: 2 * g for name, g in plain_gradients(mlp, (x, probs, dy)).items()}
    assert_equal_sums(gradients(mlp), expected)


# ---- frozen weights


@pytest.mark.parametrize("frozen", [{"fc1_weight"}, {"fc2_weight", "fc2_bias"}, set(WEIGHTS)], ids=sorted)
def test_frozen_weights_queue_nothing(frozen: set[str], device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    expected = by_layer(plain_twin(mlp), x, COUNTS, probs, dy)
    for name in frozen:
        getattr(mlp, name).requires_grad_(False)
    x.grad = probs.grad = None
    step(mlp, x, probs, dy)
    assert mlp.pending_wgrads == (frozen != set(WEIGHTS))
    with Ops() as ops:
        mlp.backward_dw()
    assert len(ops.products()) == 4 - len(frozen)
    for name, gradient in {"x": x.grad, "probs": probs.grad, **gradients(mlp)}.items():
        if name in frozen:
            assert gradient is None, name
        else:
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("frozen", [{"fc1_weight"}, set(WEIGHTS)], ids=["fc1_weight", "all"])
def test_weight_frozen_after_the_forward_is_skipped(frozen: set[str], device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    expected = plain_gradients(mlp, (x, probs, dy))
    step(mlp, x, probs, dy)
    for name in frozen:
        getattr(mlp, name).requires_grad_(False)
    with Ops() as ops:
        mlp.backward_dw()
    assert len(ops.products()) == 4 - len(frozen)
    assert_same(gradients(mlp), {name: None if name in frozen else g for name, g in expected.items()})
    assert mlp.pending_wgrads == 0


# ---- what raises


def test_weight_changed_between_forward_and_backward(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    y = mlp(x, COUNTS, probs)
    with torch.no_grad():
        mlp.fc1_weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)
    assert mlp.pending_wgrads == 0


def test_weight_changed_between_backward_and_delivery_is_no_matter(device: str) -> None:
    """The gradient is made of x, dh, dy and a only."""
    mlp = make(device)
    x, probs, dy = batch(device)
    expected = plain_gradients(mlp, (x, probs, dy))
    step(mlp, x, probs, dy)
    with torch.no_grad():
        for p in mlp.parameters():
            p.add_(1)
    mlp.backward_dw()
    assert_same(gradients(mlp), expected)


@pytest.mark.parametrize("what", ["x", "dy", "probs", "ranges"])
def test_input_changed_between_backward_and_delivery(what: str, device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    rows = RowRanges.contiguous(COUNTS, device=device)
    mlp(x, rows, probs).backward(dy)
    with torch.no_grad():
        {"x": x, "dy": dy, "probs": probs, "ranges": rows.ends}[what].add_(1)
    with pytest.raises(RuntimeError, match="backward_dw: a tensor .* was modified in place after the backward"):
        mlp.backward_dw()
    assert mlp.pending_wgrads == 1
    assert all(p.grad is None for p in mlp.parameters())
    mlp.discard_wgrads()
    mlp.backward_dw()


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_failing_product_loses_nothing(failing: int, device: str) -> None:
    mlp = make(device, bias=False)
    batches = [batch(device) for _ in range(2)]
    for x, probs, dy in batches:
        step(mlp, x, probs, dy)
    calls = []

    def fail(name: str) -> None:
        if name.startswith("k_grouped"):
            calls.append(name)
            if len(calls) == failing + 1:
                raise torch.OutOfMemoryError("no memory for this product")

    with pytest.raises(torch.OutOfMemoryError, match="no memory for this product"), Ops(fail):
        mlp.backward_dw()
    assert mlp.pending_wgrads == 2
    assert all(p.grad is None for p in mlp.parameters())
    mlp.backward_dw()
    twin = copy.deepcopy(mlp)
    twin.zero_grad()
    for x, probs, dy in batches:
        step(twin, x.detach(), probs.detach(), dy)
    twin.backward_dw()
    assert_same(gradients(mlp), gradients(twin))


def test_a_failing_layer_keeps_the_work_of_all(device: str) -> None:
    model = nn.ModuleList(make(device) for _ in range(2))
    x, probs, dy = batch(device)
    for layer in model:
        step(layer, x.detach().clone(), probs, dy)
    extra = rand(7, 6, dtype=FP32, device=device, requires_grad=False)
    step(model[1], extra, probs, dy)
    extra.add_(1)
    with pytest.raises(RuntimeError, match="modified in place after the backward"):
        grouped_experts.backward_dw(model)
    assert [layer.pending_wgrads for layer in model] == [1, 2]
    assert all(p.grad is None for p in model.parameters())


def test_check_before_an_optimizer_step(device: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6, device=device), nn.ModuleDict({"experts": make(device)}))
    mlp = model[1]["experts"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: check_no_pending_wgrads(model))
    check_no_pending_wgrads(model)
    x, probs, dy = batch(device)
    for _ in range(2):
        step(mlp, x, probs, dy)
    before = mlp.fc1_weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"call backward_dw first; .*1\.experts \(2\)"):
        optimizer.step()
    assert torch.equal(mlp.fc1_weight, before)
    mlp.backward_dw()
    optimizer.step()
    assert not torch.equal(mlp.fc1_weight, before)
    step(mlp, x, probs, dy)
    with pytest.raises(RuntimeError, match=r"the layer \(1\)"):
        check_no_pending_wgrads(mlp)


def test_joint_delivery_reaches_every_layer_of_a_model(device: str) -> None:
    """Plain layers and other modules beside them are left alone."""
    deferred, plain = make(device), make(device, defer_wgrad=False)
    model = nn.ModuleDict({"a": nn.ModuleList([deferred]), "b": plain, "c": nn.Linear(6, 6, device=device)})
    x, probs, dy = batch(device)
    for layer in (deferred, plain):
        step(layer, x, probs, dy)
    before = {name: p.grad for name, p in plain.named_parameters()}
    grouped_experts.backward_dw(model)
    assert deferred.pending_wgrads == 0
    assert_same(gradients(deferred), plain_gradients(deferred, (x, probs, dy)))
    assert all(p.grad is before[name] for name, p in plain.named_parameters())
