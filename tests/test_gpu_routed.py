"""The routed layer with enough rows for the kernels that gather them: values, CUDA graphs, memory, streams."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import needs_cuda, no_synchronisation
from exact import eps
from inputs import ACTIVATIONS
from layer import Results, assert_same, gradients, rand
from routed import Case, backward, by_definition, by_function, by_rows, make_case

from grouped_experts import routed_experts
from grouped_experts.ops import route

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

T, H, I, E, K = 1024, 264, 136, 8, 2  # noqa: E741  # 256 rows an expert: on Hopper the Gluon kernels


def large_case(dtype: torch.dtype, inner: int, **options: Any) -> Case:
    """Skewed, an expert without tokens, some choices that are nobody's, and NaN in tokens without any other."""
    ids = (torch.rand(T, K) ** 2 * (E + 1)).long()
    ids[ids == 3] = E
    ids[:7] = E
    case = make_case(ids.to("cuda"), E, H, inner, dtype=dtype, **options)
    with torch.no_grad():
        case.x[case.ids.eq(E).all(1)] = torch.nan
        for name in ("fc1_weight", "fc2_weight"):
            case.weights[name] /= 8
    return case


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("inner", [I, 520])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_large_routings(dtype: torch.dtype, inner: int, activation: str) -> None:
    """I on both sides of where rows are gathered before the products instead of in them."""
    case = large_case(dtype, inner, activation=activation)
    first = by_function(case)
    assert_same(first, by_rows(case))
    for _ in range(20):
        assert_same(by_function(case), first)
    roundings = 32 if dtype == FP32 else 8  # in fp32 what counts are sums, and exponentials
    for name, value in by_definition(case, FP64).items():
        assert (first[name].double() - value).norm() <= roundings * eps(dtype) * value.norm(), name


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("inner", [I, 520])
def test_each_gradient_alone_is_that_of_all(inner: int) -> None:
    """Without the weight gradient of fc2, the layer does not copy dy; with many columns fc2 dgrad does."""
    case = large_case(BF16, inner)
    full = by_function(case)
    for wanted in case.tensors:
        for name, t in case.tensors.items():
            t.requires_grad_(name == wanted)
        actual = by_function(case)
        assert_same(actual, {name: g if name in ("y", wanted) else None for name, g in full.items()})


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("inner", [I, 520])
@pytest.mark.parametrize("form", ["function", "module", "deferred"])
def test_graph_of_forward_and_backward_follows_the_ids(form: str, inner: int) -> None:
    case = large_case(BF16, inner)
    layer = case.layer(defer_wgrad=form == "deferred")
    weights = case.weights if form == "function" else dict(layer.named_parameters())
    tensors = {"x": case.x, "probs": case.probs} | weights

    def step() -> Results:
        for t in tensors.values():
            t.grad = None
        if form == "function":
            y = routed_experts(case.x, case.ids, case.probs, **weights)
        else:
            y = layer(case.x, route(case.ids, E), case.probs)
        y.backward(case.dy)
        layer.backward_dw()
        return {"y": y.detach()} | {name: t.grad for name, t in tensors.items()}

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    for ids in (torch.randint(0, E + 1, (T, K)), torch.full((T, K), E), torch.full((T, K), 5), case.ids.cpu()):
        with torch.no_grad():
            case.ids.copy_(ids)
            case.x.copy_(rand(T, H, dtype=BF16, device="cpu"))
        graph.replay()
        actual = {name: t.clone() for name, t in static.items()}
        assert_same(actual, step())
        assert_same(actual, by_rows(replace(case, weights=weights)))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("inner", [I, 520])
@pytest.mark.parametrize("form", ["function", "deferred"])
def test_no_host_synchronisation(form: str, inner: int) -> None:
    case = large_case(BF16, inner)
    layer = case.layer(defer_wgrad=True)

    def step() -> None:
        if form == "function":
            routed_experts(case.x, case.ids, case.probs, **case.weights).backward(case.dy)
        else:
            for _ in range(2):
                backward(layer, case)
            layer.backward_dw()

    step()  # compiles
    with no_synchronisation():
        step()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("hidden", "inner"), [(1536, 256), (2048, 768)])
def test_memory_that_a_forward_keeps(hidden: int, inner: int) -> None:
    """y is there as well; allocations are rounded up to 512 bytes, or 2 MiB where they are large."""
    tokens, choices, experts = 4096, 8, 32
    ids = torch.rand(tokens, experts).topk(choices).indices.to("cuda")
    weights = [
        torch.zeros(experts, *shape, dtype=BF16, device="cuda", requires_grad=True)
        for shape in ((2 * inner, hidden), (hidden, inner))
    ]
    probs = rand(tokens, choices, dtype=FP32, device="cuda")

    def kept() -> int:
        """What x of its own and the graph of the layer take, y aside."""
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = routed_experts(torch.zeros(tokens, hidden, dtype=BF16, device="cuda"), ids, probs, *weights)
        torch.cuda.synchronize()
        taken = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
        y.sum().backward()
        for t in (probs, *weights):
            t.grad = None
        return taken

    kept()  # compiles
    torch.cuda.empty_cache()  # blocks of other sizes
    least = 2 * tokens * hidden + 4 * tokens * choices * inner
    assert least <= kept() <= 1.02 * least


@pytest.mark.gpu
@needs_cuda
def test_deferred_delivery_on_another_stream() -> None:
    """The indices that pending products read outlive the delivery, as their other operands do."""
    case = large_case(BF16, I)
    layer = case.layer(defer_wgrad=True)
    expected = by_function(case)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    first.wait_stream(torch.cuda.current_stream())
    backward(layer, case)  # compiles
    layer.discard_wgrads()
    with torch.cuda.stream(first):
        backward(layer, case)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        torch.cuda._sleep(100_000_000)
        layer.backward_dw()
    with torch.cuda.stream(first):
        poison = [torch.full((T * K,), 2**30, dtype=torch.int32, device="cuda") for _ in range(16)]
        poison += [
            torch.full((T * K, n), torch.nan, dtype=BF16, device="cuda") for n in (I, 2 * I, H) for _ in range(4)
        ]
    torch.cuda.synchronize()
    del poison
    assert_same(gradients(layer), {name: expected[name] for name in case.weights})
