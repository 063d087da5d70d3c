"""torch.compile: the layer in one graph, equal to eager to the bit, and compiled no more often than shapes ask for."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layer import Ops, Results, assert_right, assert_same, by_layer, gradients, rand
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from grouped_experts import GroupedMLP, RowRanges

FP32, BF16 = torch.float32, torch.bfloat16

# While compiling, torch warns of what it does itself.
pytestmark = pytest.mark.filterwarnings(r"ignore:::torch\.")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(backend: str = "aot_eager") -> CompileCounterWithBackend:
    return CompileCounterWithBackend(backend)


def compiled_results(
    mlp: GroupedMLP, compiled: Callable[..., Tensor], x: Tensor, counts: Any, probs: Tensor | None, dy: Tensor
) -> Results:
    """As `by_layer`, the forward compiled."""
    tensors = {"x": x} | ({} if probs is None else {"probs": probs}) | dict(mlp.named_parameters())
    for t in tensors.values():
        t.grad = None
    y = compiled(x, counts, probs)
    y.backward(dy)
    mlp.backward_dw()
    return {"y": y.detach()} | {name: t.grad for name, t in tensors.items()}


def batch(num_rows: int, device: str, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    """x, probs, dy."""
    x = rand(num_rows, 6, dtype=dtype, device=device)
    probs = rand(num_rows, dtype=FP32, device=device, low=0)
    return x, probs, rand(num_rows, 6, dtype=dtype, device=device, requires_grad=False)


COUNTS_FORMS: dict[str, Callable[[list[int], str], Any]] = {
    "list": lambda counts, device: counts,
    "int32": lambda counts, device: torch.tensor(counts, dtype=torch.int32, device=device),
    "int64": lambda counts, device: torch.tensor(counts, device=device),
    "ranges": lambda counts, device: RowRanges.contiguous(counts, device=device),
}
STEPS = [[3, 0, 4], [1, 1, 1], [0, 9, 2], [0, 0, 0], [5, 5, 5], [1, 0, 0], [0, 0, 1], [40, 20, 4], [7, 8, 9], [2, 2, 3]]


@pytest.mark.parametrize("form", COUNTS_FORMS)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_equal_to_eager_while_rows_and_counts_change(bias: bool, form: str, device: str) -> None:
    """T from 0 to 64 in one graph; one row and none may cost a compilation each, as sizes 0 and 1 do in torch."""
    mlp = GroupedMLP(6, 4, 3, bias=bias, device=device)
    backend = counting()
    compiled = torch.compile(mlp, fullgraph=True, backend=backend)
    for counts in STEPS:
        x, probs, dy = batch(sum(counts), device)
        given = COUNTS_FORMS[form](counts, device)
        expected = by_layer(mlp, x, given, probs, dy)
        assert_same(compiled_results(mlp, compiled, x, given, probs, dy), expected)
    assert backend.frame_count <= 5


@pytest.mark.parametrize("form", COUNTS_FORMS)
def test_changing_counts_alone_compile_nothing_anew(form: str, device: str) -> None:
    """At most once more: a list's ints turn from constants into symbols."""
    mlp = GroupedMLP(6, 4, 3, device=device)
    backend = counting()
    compiled = torch.compile(mlp, fullgraph=True, backend=backend)
    x, probs, dy = batch(12, device)
    for first in range(2, 11):
        given = COUNTS_FORMS[form]([first, 12 - first, 0], device)
        expected = by_layer(mlp, x, given, probs, dy)
        assert_same(compiled_results(mlp, compiled, x, given, probs, dy), expected)
    assert backend.frame_count <= (2 if form == "list" else 1)


def test_many_small_counts_in_a_list(device: str) -> None:
    """256 experts with 0 to 3 rows each, other ones at each step: within torch's limit of recompilations."""
    mlp = GroupedMLP(4, 2, 256, device=device)
    backend = counting()
    compiled = torch.compile(mlp, fullgraph=True, backend=backend)
    for _ in range(12):
        counts = torch.randint(0, 4, (256,)).tolist()
        x = rand(sum(counts), 4, dtype=FP32, device=device)
        dy = torch.ones_like(x)
        assert_same(
            compiled_results(mlp, compiled, x, counts, None, dy),
            by_layer(mlp, x, counts, None, dy),
        )
    assert backend.frame_count <= torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_x_that_is_not_contiguous(dtype: torch.dtype, device: str) -> None:
    mlp = GroupedMLP(6, 4, 3, dtype=dtype, device=device)
    compiled = torch.compile(mlp, fullgraph=True, backend=counting())
    for num_rows, counts in ((8, [3, 0, 5]), (12, [4, 4, 4])):
        x = rand(6, num_rows, dtype=dtype, device=device, requires_grad=False).t().requires_grad_()
        dy = rand(num_rows, 6, dtype=dtype, device=device, requires_grad=False)
        assert not x.is_contiguous()
        expected = by_layer(mlp, x, counts, None, dy)
        assert_same(compiled_results(mlp, compiled, x, counts, None, dy), expected)


def test_masked_layout(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device)
    compiled = torch.compile(mlp, fullgraph=True, backend=counting())
    for capacity, counts in ((4, [3, 4]), (5, [0, 2])):
        x, dy = (rand(2, capacity, 6, dtype=FP32, device=device) for _ in range(2))
        given = torch.tensor(counts, device=device)
        expected = by_layer(mlp, x, given, None, dy.detach())
        assert_same(compiled_results(mlp, compiled, x, given, None, dy.detach()), expected)


class Model(nn.Module):
    """The layer between operations of its own kind of graph: what comes in is computed, what comes out is used."""

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__()
        self.mlp = GroupedMLP(6, 4, 3, device=device, **options)
        self.scale = nn.Parameter(torch.ones(6, device=device))

    def forward(self, x: Tensor, counts: Any) -> Tensor:
        z = x * self.scale
        return z + self.mlp(z.t().contiguous().t(), counts, z.sigmoid().mean(1))


def model_results(model: Model, forward: Callable[..., Tensor], x: Tensor, counts: list[int]) -> Results:
    model.zero_grad()
    x = x.detach().to(model.scale.dtype).requires_grad_()
    y = forward(x, torch.tensor(counts, device=x.device))
    y.square().sum().backward()
    model.mlp.backward_dw()
    return {"y": y.detach(), "x": x.grad, **gradients(model)}


def check_model(model: Model, backend: Any, *, fullgraph: bool, to_the_bit: bool = True) -> None:
    device = str(model.scale.device)
    compiled = torch.compile(model, fullgraph=fullgraph, backend=backend)
    in_fp64 = copy.deepcopy(model).double()
    for counts in ([3, 0, 5], [4, 6, 2]):
        x = rand(sum(counts), 6, dtype=FP32, device=device)
        eager = model_results(model, model, x, counts)
        actual = model_results(model, compiled, x, counts)
        if to_the_bit:
            assert_same(actual, eager)
        else:
            assert_right(actual, [eager], model_results(in_fp64, in_fp64, x, counts), FP32)


def test_within_a_larger_graph(device: str) -> None:
    check_model(Model(device), counting(), fullgraph=True)


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler on a CPU"
)
@pytest.mark.slow
def test_inductor(device: str) -> None:
    """Inductor fuses the operations around the layer, and may round those differently."""
    check_model(Model(device), "inductor", fullgraph=True, to_the_bit=False)


def test_deferred_mode_breaks_the_graph_and_works(device: str) -> None:
    check_model(Model(device, defer_wgrad=True), counting(), fullgraph=False)


def test_deferred_mode_in_one_graph_is_refused(device: str) -> None:
    mlp = GroupedMLP(6, 4, 3, device=device, defer_wgrad=True)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    x, probs, _ = batch(7, device)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(x, [3, 0, 4], probs)


def test_autocast(device: str) -> None:
    mlp = GroupedMLP(6, 4, 3, device=device)
    compiled = torch.compile(mlp, fullgraph=True, backend=counting())
    x, probs, dy = batch(7, device)
    results = []
    for layer in (compiled, mlp):
        x.grad = probs.grad = None
        mlp.zero_grad()
        with torch.autocast(device, BF16):
            y = layer(x, [3, 0, 4], probs)
        y.backward(dy.to(BF16))
        results.append({"y": y.detach(), "x": x.grad, "probs": probs.grad, **gradients(mlp)})
    assert_same(*results)


@pytest.mark.parametrize("message", ["counts: wanted rows within", "counts: wanted counts >= 0"])
def test_wrong_counts_are_refused_in_a_compiled_layer_too(message: str) -> None:
    mlp = GroupedMLP(6, 4, 2)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    counts = torch.tensor([5, 5] if "within" in message else [-1, 9])
    with pytest.raises(ValueError, match=message):
        compiled(torch.zeros(8, 6), counts)


# ---- selective checkpointing


def policy(kept: str, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = str(op).startswith(f"grouped_experts.{kept}")
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("kept", ["fc1_activation", "m_grouped_gemm", "none"])
@pytest.mark.parametrize("mode", ["plain", "deferred", "plain-compiled"])
def test_selective_checkpointing(mode: str, kept: str, device: str) -> None:
    mlp = GroupedMLP(6, 4, 3, bias=True, device=device, defer_wgrad=mode == "deferred")
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(policy, kept))

    def layer(x: Tensor, counts: Any, probs: Tensor) -> Tensor:
        return checkpoint(mlp, x, counts, probs, use_reentrant=False, context_fn=contexts)

    x, probs, dy = batch(7, device)
    given = torch.tensor([3, 0, 4], device=device)
    expected = by_layer(mlp, x, given, probs, dy)
    if mode == "plain-compiled":
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(compiled_results(mlp, layer, x, given, probs, dy), expected)


@pytest.mark.parametrize("kept", ["fc1_activation", "none"])
def test_selective_checkpointing_keeps_what_it_is_told_to(kept: str, device: str) -> None:
    mlp = GroupedMLP(6, 4, 3, device=device)
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(policy, kept))
    x, probs, dy = batch(7, device)
    y = checkpoint(mlp, x, [3, 0, 4], probs, use_reentrant=False, context_fn=contexts)
    with Ops() as ops:
        y.backward(dy)
    assert ops.names.count("fc1_activation") == (kept == "none")
