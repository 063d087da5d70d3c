"""Deferred weight gradients: backward_dw delivers what a plain backward would have, when it is called."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deferral import COUNTS, batch, exact_gradients, make, plain_gradients, plain_twin, step
from inputs import LAYOUTS, Layout, poison_unowned
from layer import WEIGHTS, Ops, assert_equal_sums, assert_right, assert_same, by_layer, gradients, rand
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import grouped_experts
from grouped_experts import GroupedMLP
from grouped_experts.nn.deferred import WeightGradient

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


# ---- the same numbers


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32, FP64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_one_micro_batch_equals_the_plain_run_to_the_bit(bias: bool, dtype: torch.dtype, device: str) -> None:
    mlp = make(device, dtype, bias=bias)
    x, probs, dy = batch(device, dtype)
    expected = by_layer(plain_twin(mlp), x, COUNTS, probs, dy)
    assert_same(by_layer(mlp, x, COUNTS, probs, dy), expected)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_one_micro_batch_of_every_layout(layout: Layout, device: str) -> None:
    mlp = GroupedMLP(6, 4, layout.num_experts, bias=True, defer_wgrad=True, device=device)
    x, dy = (poison_unowned(rand(layout.num_rows, 6, dtype=FP32, device=device).detach(), layout) for _ in range(2))
    rows = layout.rows(device)
    assert_same(by_layer(mlp, x, rows, None, dy), by_layer(plain_twin(mlp), x, rows, None, dy))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_several_micro_batches_equal_the_plain_runs_within_rounding(dtype: torch.dtype, device: str) -> None:
    mlp = make(device, dtype)
    batches = [batch(device, dtype) for _ in range(4)]
    for x, probs, dy in batches:
        step(mlp, x, probs, dy)
    assert mlp.pending_wgrads == 4
    mlp.backward_dw()
    exact = exact_gradients(mlp, *batches)
    assert_right(gradients(mlp), [plain_gradients(mlp, *batches)], exact, dtype)


def test_micro_batches_of_different_sizes(device: str) -> None:
    mlp = make(device, FP64)
    x, probs, dy = batch(device, FP64)
    step(mlp, x, probs, dy)
    mlp(x[:0], [0, 0, 0], probs[:0]).sum().backward()
    mlp(x[:3], [0, 3, 0], probs[:3]).backward(dy[:3])
    mlp.backward_dw()
    twin = plain_twin(mlp)
    twin.zero_grad()
    twin(torch.cat([x[:3], x[:3], x[3:]]), [3, 3, 4], torch.cat([probs[:3], probs[:3], probs[3:]])).backward(
        torch.cat([dy[:3], dy[:3], dy[3:]])
    )
    assert_equal_sums(gradients(mlp), gradients(twin))


def test_fp32_weights_accumulate_bf16_micro_batches_in_fp32(device: str) -> None:
    """The second micro-batch is 2^-10 of the first: a sum in bf16 would lose it."""
    mlp = make(device, FP32)
    x, probs, dy = batch(device, BF16)
    step(mlp, x, probs, dy)
    step(mlp, x, probs, dy * 2.0**-10)
    mlp.backward_dw()
    first = plain_gradients(mlp, (x, probs, dy))
    assert all(g.dtype == FP32 for g in first.values())
    assert_equal_sums(gradients(mlp), {name: g * (1 + 2.0**-10) for name, g in first.items()})


def test_autocast(device: str) -> None:
    mlp = make(device, FP32)
    x, probs, dy = batch(device, FP32)
    results = []
    for layer in (mlp, plain_twin(mlp)):
        with torch.autocast(device, BF16):
            y = layer(x, COUNTS, probs)
        y.backward(dy.to(BF16))
        layer.backward_dw()
        results.append(gradients(layer))
    assert_same(*results)


# ---- when


def test_backward_leaves_the_weights_without_gradient(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    expected = by_layer(plain_twin(mlp), x, COUNTS, probs, dy)
    x.grad = probs.grad = None
    assert mlp.pending_wgrads == 0
    y = mlp(x, COUNTS, probs)
    assert mlp.pending_wgrads == 0
    with Ops() as ops:
        y.backward(dy)
    assert ops.products() == []
    assert mlp.pending_wgrads == 1
    assert all(p.grad is None for p in mlp.parameters())
    assert torch.equal(x.grad, expected["x"])
    assert torch.equal(probs.grad, expected["probs"])
    mlp.backward_dw()
    assert mlp.pending_wgrads == 0
    assert_same(gradients(mlp), {name: expected[name] for name in WEIGHTS})


def test_fc2_comes_before_fc1(device: str) -> None:
    """Over all micro-batches: what the layer behind waits for last is computed last."""
    mlp = make(device, bias=False)
    x, probs, dy = batch(device)
    for _ in range(2):
        step(mlp, x, probs, dy)
    with Ops() as ops:
        mlp.backward_dw()
    assert ops.products() == ["k_grouped_gemm", "k_grouped_gemm_accumulate"] * 2
    assert ops.shapes["k_grouped_gemm"] == [(3, 6, 4), (3, 8, 6)]


def test_nothing_pending(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    fired = []
    for p in mlp.parameters():
        p.register_post_accumulate_grad_hook(fired.append)
    mlp.backward_dw()
    grouped_experts.backward_dw(nn.Sequential(mlp))
    with torch.no_grad():
        mlp(x, COUNTS, probs)
    mlp(x, COUNTS, probs)  # no backward
    mlp.backward_dw()
    step(mlp, x, probs, dy)
    mlp.backward_dw()
    before = gradients(mlp)
    mlp.backward_dw()
    assert_same(gradients(mlp), before)
    assert len(fired) == 4


def test_a_plain_layer_has_nothing_pending(device: str) -> None:
    mlp = make(device, defer_wgrad=False)
    x, probs, dy = batch(device)
    step(mlp, x, probs, dy)
    assert mlp.pending_wgrads == 0
    before = gradients(mlp)
    mlp.backward_dw()
    assert_same(gradients(mlp), before)


def test_existing_gradient_is_added_to(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    expected = plain_gradients(mlp, (x, probs, dy))
    for p in mlp.parameters():
        p.grad = torch.ones_like(p)
    held = {name: p.grad for name, p in mlp.named_parameters()}
    step(mlp, x, probs, dy)
    mlp.backward_dw()
    for name, p in mlp.named_parameters():
        assert torch.equal(p.grad, 1 + expected[name]), name
        assert p.grad is held[name], "an optimizer's view of the gradient went stale"


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_existing_gradient_may_be_a_view(defer: bool, device: str) -> None:
    """A slice of a flat buffer, off by one element, or a transposed one: added to where it lies."""
    mlp = make(device, defer_wgrad=defer)
    x, probs, dy = batch(device)
    expected = plain_gradients(mlp, (x, probs, dy))
    flat = torch.ones(1 + mlp.fc1_weight.numel(), device=device)
    transposed = torch.ones(3, 4, 6, device=device)
    mlp.fc1_weight.grad, mlp.fc2_weight.grad = flat[1:].view(3, 8, 6), transposed.mT
    step(mlp, x, probs, dy)
    mlp.backward_dw()
    assert flat[0] == 1
    assert torch.equal(flat[1:].view(3, 8, 6), 1 + expected["fc1_weight"])
    assert torch.equal(transposed.mT, 1 + expected["fc2_weight"])


def test_steps_one_after_the_other(device: str) -> None:
    """Three steps of SGD: the weights stay those of the plain layer, to the bit."""
    mlp = make(device)
    twin = plain_twin(mlp)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (mlp, twin)]
    for _ in range(3):
        x, probs, dy = batch(device)
        for layer, optimizer in zip((mlp, twin), optimizers, strict=True):
            optimizer.zero_grad()
            step(layer, x, probs, dy)
            layer.backward_dw()
            optimizer.step()
    for p, q in zip(mlp.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("wanted", [(), ("x",), ("probs",)], ids=["neither", "x", "probs"])
@pytest.mark.parametrize("with_probs", [False, True], ids=["no-probs", "probs"])
def test_x_and_probs_without_gradient(with_probs: bool, wanted: tuple[str, ...], device: str) -> None:
    """The output stays in a graph, or the weights' gradients would be lost in silence."""
    mlp = make(device)
    x, probs, dy = batch(device)
    x.requires_grad_("x" in wanted)
    probs = probs.requires_grad_("probs" in wanted) if with_probs else None
    assert_same(by_layer(mlp, x, COUNTS, probs, dy), by_layer(plain_twin(mlp), x, COUNTS, probs, dy))


@pytest.mark.parametrize(
    "differentiate",
    [lambda y, x, dy: torch.autograd.grad(y, x, dy), lambda y, x, dy: y.backward(dy, inputs=[x])],
    ids=["autograd.grad", "backward-inputs"],
)
def test_a_backward_that_leaves_the_weights_out(differentiate: Callable[..., Any], device: str) -> None:
    """Asked for the gradient of x alone, a plain layer leaves .grad as it is; so must a deferred one."""
    mlp = make(device)
    x, probs, dy = batch(device)
    y = mlp(x, COUNTS, probs)
    differentiate(y, x, dy)
    assert mlp.pending_wgrads == 0
    mlp.backward_dw()
    assert all(p.grad is None for p in mlp.parameters())


def test_within_no_grad(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    step(mlp, x, probs, dy)
    with torch.no_grad():
        mlp.backward_dw()
    assert_same(gradients(mlp), plain_gradients(mlp, (x, probs, dy)))
    assert not any(p.grad.requires_grad for p in mlp.parameters())


def test_switching_the_mode(device: str) -> None:
    """What was deferred stays deferred; later micro-batches follow the attribute."""
    mlp = make(device, FP64)
    first, second = batch(device, FP64), batch(device, FP64)
    step(mlp, *first)
    mlp.defer_wgrad = False
    step(mlp, *second)
    assert_same(gradients(mlp), plain_gradients(mlp, second))
    mlp.backward_dw()
    expected = plain_gradients(mlp, second, first)
    assert_same(gradients(mlp), expected)


# ---- hooks


def test_hooks_fire_once_and_see_the_whole_gradient(device: str) -> None:
    mlp = make(device, FP64)
    batches = [batch(device, FP64) for _ in range(3)]
    seen: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in WEIGHTS}
    for name, p in mlp.named_parameters():
        p.register_hook(lambda g, name=name: seen[name].append(("tensor", g.clone())))
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(("post", p.grad.clone())))
    for x, probs, dy in batches:
        step(mlp, x, probs, dy)
    assert not any(seen.values()), "a hook fired before the gradient was there"
    mlp.backward_dw()
    expected = plain_gradients(mlp, *batches)
    for kind in (0, 1):
        assert [calls[kind][0] for calls in seen.values()] == [("tensor", "post")[kind]] * 4
        assert_equal_sums({name: calls[kind][1] for name, calls in seen.items()}, expected)
    assert all(len(calls) == 2 for calls in seen.values())


def test_tensor_hook_may_replace_the_gradient(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    mlp.fc1_weight.register_hook(lambda g: 2 * g)
    step(mlp, x, probs, dy)
    mlp.backward_dw()
    assert torch.equal(mlp.fc1_weight.grad, 2 * plain_gradients(mlp, (x, probs, dy))["fc1_weight"])


def test_hook_that_takes_the_gradient_away(device: str) -> None:
    """An optimizer fused into the backward does so; the next micro-batch starts from None."""
    mlp = make(device)
    x, probs, dy = batch(device)
    taken: list[Tensor] = []

    def take(p: Tensor) -> None:
        taken.append(p.grad)
        p.grad = None

    mlp.fc1_weight.register_post_accumulate_grad_hook(take)
    expected = plain_gradients(mlp, (x, probs, dy))["fc1_weight"]
    for _ in range(2):
        step(mlp, x, probs, dy)
        mlp.zero_grad(set_to_none=True)
        mlp.backward_dw()
        assert mlp.fc1_weight.grad is None
    assert len(taken) == 2
    assert all(torch.equal(g, expected) for g in taken)


def test_hook_may_use_the_layer_again(device: str) -> None:
    """The queue is empty by then: a delivery within the hook has nothing left to deliver."""
    mlp = make(device)
    x, probs, dy = batch(device)
    pending = []

    def hook(_: Tensor) -> None:
        pending.append(mlp.pending_wgrads)
        mlp.backward_dw()

    mlp.fc2_weight.register_post_accumulate_grad_hook(hook)
    step(mlp, x, probs, dy)
    mlp.backward_dw()
    assert pending == [0]
    assert_same(gradients(mlp), plain_gradients(mlp, (x, probs, dy)))


def test_delivery_from_a_hook_within_the_backward(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    z = x * 1
    z.register_hook(lambda _: mlp.backward_dw())
    mlp(z, COUNTS, probs).backward(dy)
    assert mlp.pending_wgrads == 0
    assert_same(gradients(mlp), plain_gradients(mlp, (x, probs, dy)))


# ---- memory


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_delivered_gradient_is_not_cloned(micro_batches: int, device: str) -> None:
    """The memory that the first product wrote is that of .grad."""
    mlp = make(device)
    for _ in range(micro_batches):
        step(mlp, *batch(device))
    with Ops() as ops:
        mlp.backward_dw()
    written = ops.addresses["k_grouped_gemm"] | ops.addresses["k_grouped_sum"]
    assert {p.grad.data_ptr() for p in mlp.parameters()} <= written
    assert "clone" not in ops.names
    assert ops.names.count("k_grouped_gemm") == 2, "one buffer a weight"


def test_delivered_memory_is_released(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    y = mlp(x, COUNTS, probs)
    memory = [StorageWeakRef(t.untyped_storage()) for t in (x, dy)]
    y.backward(dy)
    del x, probs, dy, y
    gc.collect()
    assert not any(storage.expired() for storage in memory)
    mlp.backward_dw()
    gc.collect()
    assert all(storage.expired() for storage in memory)


def test_undelivered_micro_batches_are_counted_and_cleared(device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    for _ in range(200):
        mlp(x, COUNTS, probs)  # dropped: nothing to wait for
    assert mlp.pending_wgrads == 0
    for _ in range(200):
        step(mlp, x, probs, dy)
    assert mlp.pending_wgrads == 200
    mlp.discard_wgrads()
    assert mlp.pending_wgrads == 0
    mlp.backward_dw()
    assert all(p.grad is None for p in mlp.parameters())


class _Upstream(torch.autograd.Function):
    """Its context holds an object that dies with the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: list[Any]) -> Tensor:
        ctx.held = box.pop()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("upstream_of", ["x", "probs"])
def test_what_waits_keeps_no_graph_alive(upstream_of: str, device: str) -> None:
    class Held:
        pass

    mlp = make(device, bias=True)
    x, probs, dy = batch(device)
    held = Held()
    alive = weakref.ref(held)
    box = [held]
    del held
    inputs = {"x": x, "probs": probs}
    inputs[upstream_of] = _Upstream.apply(inputs[upstream_of].requires_grad_(), box)
    mlp(inputs["x"], COUNTS, inputs["probs"]).backward(dy)
    del inputs
    gc.collect()
    assert mlp.pending_wgrads == 1
    assert alive() is None
    mlp.backward_dw()


def test_discarded_micro_batches_leave_no_trace(device: str) -> None:
    mlp = make(device)
    skipped, used = batch(device), batch(device)
    step(mlp, *skipped)
    mlp.discard_wgrads()
    step(mlp, *used)
    mlp.backward_dw()
    assert_same(gradients(mlp), plain_gradients(mlp, used))


# ---- copies


def through_torch_save(mlp: GroupedMLP) -> GroupedMLP:
    file = io.BytesIO()
    torch.save(mlp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda mlp: pickle.loads(pickle.dumps(mlp)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_starts_without_pending_work(duplicate: Callable[[GroupedMLP], GroupedMLP], device: str) -> None:
    mlp = make(device)
    x, probs, dy = batch(device)
    step(mlp, x, probs, dy)
    twin = duplicate(mlp)
    assert (mlp.pending_wgrads, twin.pending_wgrads) == (1, 0)
    twin.backward_dw()
    assert all(p.grad is None for p in (*mlp.parameters(), *twin.parameters()))
    step(twin, x, probs, 2 * dy)
    assert (mlp.pending_wgrads, twin.pending_wgrads) == (1, 1)
    mlp.backward_dw()
    twin.backward_dw()
    assert_same(gradients(mlp), plain_gradients(mlp, (x, probs, dy)))
    assert_same(gradients(twin), {name: 2 * g for name, g in gradients(mlp).items()})


def test_pending_work_is_not_state(device: str) -> None:
    mlp = make(device)
    names = list(mlp.state_dict())
    step(mlp, *batch(device))
    assert list(mlp.state_dict()) == names == WEIGHTS
    mlp.load_state_dict(copy.deepcopy(mlp.state_dict()))
    assert mlp.pending_wgrads == 1


def test_a_micro_batch_queued_during_delivery_waits_for_the_next(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread's backward may queue one."""
    mlp = make(device, FP64)
    batches = [batch(device, FP64) for _ in range(2)]
    step(mlp, *batches[0])
    compute = WeightGradient.compute

    def compute_and_queue_more(gradient: WeightGradient) -> Tensor:
        if not queued:
            queued.append(True)
            with torch.enable_grad():
                step(mlp, *batches[1])
        return compute(gradient)

    queued: list[bool] = []
    monkeypatch.setattr(WeightGradient, "compute", compute_and_queue_more)
    mlp.backward_dw()
    assert mlp.pending_wgrads == 1
    mlp.backward_dw()
    assert_equal_sums(gradients(mlp), plain_gradients(mlp, *batches))
