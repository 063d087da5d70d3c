"""All gradients of GroupedMLP: against numerical differences in fp64, and against eager torch over random inputs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from inputs import ACTIVATIONS, LAYOUTS, STRIDES, Layout, layouts, poison_unowned, seeds, sizes, strides
from layer import WEIGHTS, check, rand, running
from torch import Tensor, nn

from grouped_experts import GroupedMLP
from grouped_experts.rows import Counts, RowRanges

FP64 = torch.float64


def gradcheck(mlp: GroupedMLP, x: Tensor, counts: Counts | RowRanges, probs: Tensor | None) -> None:
    names = [name for name, _ in mlp.named_parameters()]

    def layer(x: Tensor, probs: Tensor | None, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(mlp, dict(zip(names, weights, strict=True)), (x, counts, probs))

    assert torch.autograd.gradcheck(layer, (x, probs, *mlp.parameters()))


@pytest.mark.parametrize("with_probs", [False, True], ids=["no-probs", "probs"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numerical_gradients(activation: str, bias: bool, with_probs: bool, device: str) -> None:
    mlp = GroupedMLP(3, 2, 3, activation=activation, bias=bias, dtype=FP64, device=device)
    x = rand(6, 3, dtype=FP64, device=device)
    gradcheck(mlp, x, [2, 0, 3], rand(6, dtype=FP64, device=device, low=0) if with_probs else None)


@pytest.mark.parametrize(
    "layout", [LAYOUTS[n] for n in ("tail-rows", "padded-evenly", "masked", "m-indices-with-idle")]
)
def test_numerical_gradients_by_layout(layout: Layout, device: str) -> None:
    mlp = GroupedMLP(2, 1, layout.num_experts, bias=True, dtype=FP64, device=device)
    x = rand(layout.num_rows, 2, dtype=FP64, device=device)
    gradcheck(mlp, x, layout.rows(device), rand(layout.num_rows, dtype=FP64, device=device, low=0))


def test_numerical_gradients_of_a_masked_buffer(device: str) -> None:
    mlp = GroupedMLP(3, 2, 2, bias=True, dtype=FP64, device=device)
    gradcheck(mlp, rand(2, 3, 3, dtype=FP64, device=device), [1, 3], rand(2, 3, dtype=FP64, device=device, low=0))


def test_numerical_gradients_beyond_the_clamp(device: str) -> None:
    """Gates and ups on both sides of the limits of 7, and none near one."""
    mlp = GroupedMLP(1, 4, 1, activation="clamped_swiglu", dtype=FP64, device=device)
    with torch.no_grad():
        mlp.fc1_weight.copy_(torch.tensor([-9.0, 9, 9, 2, 9, -9, 2, 9], dtype=FP64)[None, :, None])
    x = torch.tensor([[1.0], [-1.0], [0.5]], dtype=FP64, device=device, requires_grad=True)
    gradcheck(mlp, x, [3], rand(3, dtype=FP64, device=device, low=0))


# ---- random inputs

WIDER = {  # the dtypes that weights may have for x of that dtype
    torch.bfloat16: [torch.bfloat16, torch.float32],
    torch.float16: [torch.float16, torch.float32],
    torch.float32: [torch.float32, torch.float64],
    torch.float64: [torch.float64],
}


@dataclass(frozen=True)
class Case:
    layout: Layout
    hidden: int
    inner: int
    activation: str
    bias: bool
    defer: bool
    dtype: torch.dtype
    weight_dtype: torch.dtype
    probs_dtype: torch.dtype | None
    x_strides: str
    dy_strides: str
    weight_strides: str
    wanted: frozenset[str]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(sorted(WIDER, key=str)))
    return Case(
        layout=draw(layouts()),
        hidden=draw(sizes),
        inner=draw(sizes),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
        defer=draw(st.booleans()),
        dtype=dtype,
        weight_dtype=draw(st.sampled_from(WIDER[dtype])),
        probs_dtype=draw(st.sampled_from([None, *sorted(WIDER, key=str)])),
        x_strides=draw(strides),
        dy_strides=draw(strides),
        weight_strides=draw(strides),
        wanted=draw(
            st.one_of(
                st.just(frozenset(["x", "probs", *WEIGHTS])), st.frozensets(st.sampled_from(["x", "probs", *WEIGHTS]))
            )
        ),
        seed=draw(seeds),
    )


@pytest.mark.parametrize("part", range(10))  # on a GPU almost every case compiles kernels of its own
def test_random_inputs(device: str, part: int) -> None:
    @seed(part)
    @given(case=cases())
    @settings(max_examples=15)
    def all_gradients(case: Case) -> None:
        check_all_gradients(case, device)

    all_gradients()


def check_all_gradients(case: Case, device: str) -> None:
    torch.manual_seed(case.seed)
    layout = case.layout
    mlp = GroupedMLP(
        case.hidden,
        case.inner,
        layout.num_experts,
        activation=case.activation,
        bias=case.bias,
        defer_wgrad=case.defer,
        dtype=case.weight_dtype,
        device=device,
    )
    for name in ("fc1_weight", "fc2_weight"):
        weight = STRIDES[case.weight_strides](getattr(mlp, name).detach())
        setattr(mlp, name, nn.Parameter(weight))
    for name, p in mlp.named_parameters():
        p.requires_grad_(name in case.wanted)
    x, dy = (
        STRIDES[name](
            poison_unowned(rand(layout.num_rows, case.hidden, dtype=case.dtype, device=device).detach(), layout)
        )
        for name in (case.x_strides, case.dy_strides)
    )
    x.requires_grad_("x" in case.wanted)
    probs = None
    if case.probs_dtype is not None:
        probs = rand(layout.num_rows, dtype=case.probs_dtype, device=device, low=0, requires_grad=False)
        poison_unowned(probs, layout).requires_grad_("probs" in case.wanted)
    check(mlp, x, layout.bounds, layout.rows(device), probs, dy, draws=8)


@pytest.mark.parametrize("counts", [[33, 0, 5, 64], [16, 16, 16, 16]], ids=["uneven", "equal"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_all_gradients_at_a_larger_size(dtype: torch.dtype, activation: str, counts: list[int], device: str) -> None:
    mlp = GroupedMLP(128, 96, 4, activation=activation, bias=True, dtype=dtype, device=device)
    x, dy = (rand(sum(counts), 128, dtype=dtype, device=device) for _ in range(2))
    probs = rand(sum(counts), dtype=torch.float32, device=device, low=0)
    check(mlp, x, running(counts), counts, probs, dy.detach())
