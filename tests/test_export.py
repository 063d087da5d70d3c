"""torch.export of the plain layer: what comes out computes the same, on every path of the reference."""

from __future__ import annotations

import pytest
import torch

from grouped_experts import GroupedMLP, ops


@pytest.mark.parametrize("counts", [[2, 4, 3], [3, 3, 3], [0, 9, 0]], ids=str)
@pytest.mark.parametrize(("hidden", "intermediate", "bias"), [(8, 8, False), (7, 5, False), (8, 8, True)])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_computes_the_same(
    counts: list[int], hidden: int, intermediate: int, bias: bool, strict: bool
) -> None:
    mlp = GroupedMLP(hidden, intermediate, 3, bias=bias)
    inputs = torch.randn(9, hidden), torch.tensor(counts), torch.rand(9)
    exported = torch.export.export(mlp, inputs, strict=strict).module()
    assert torch.equal(exported(*inputs), mlp(*inputs))


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_takes_other_numbers_of_rows(strict: bool, precision: str | None) -> None:
    mlp = GroupedMLP(16, 8, 3, precision=precision)
    inputs = torch.randn(9, 16), torch.tensor([2, 4, 3]), torch.rand(9)
    rows = {0: torch.export.Dim("T", min=2, max=1000)}
    exported = torch.export.export(mlp, inputs, dynamic_shapes=(rows, {}, rows), strict=strict).module()
    for counts in ([2, 4, 3], [0, 11, 9], [200, 1, 0]):
        given = torch.randn(sum(counts), 16), torch.tensor(counts), torch.rand(sum(counts))
        assert torch.equal(exported(*given), mlp(*given))


def test_double_backward_through_an_op_raises() -> None:
    h = torch.randn(4, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(ops.scaled_activation(h).square().sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match=r"scaled_activation_backward\S*: not differentiable"):
        gradient.square().sum().backward()


def test_create_graph_alone_is_harmless() -> None:
    h = torch.randn(4, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(ops.scaled_activation(h).square().sum(), h, create_graph=True)
    (plain,) = torch.autograd.grad(ops.scaled_activation(h).square().sum(), h)
    assert torch.equal(gradient, plain)


def test_inference_of_a_deferred_layer_is_one_graph() -> None:
    mlp = GroupedMLP(8, 8, 3, defer_wgrad=True)
    x, counts = torch.randn(9, 8), torch.tensor([2, 4, 3])
    with torch.no_grad():
        compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, counts), mlp(x, counts))
