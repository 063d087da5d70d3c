"""The routed layer in tests: a case, and three ways to compute it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from exact import plain_activation
from inputs import ACTIVATIONS
from layer import WEIGHTS, Results, Rounding, assert_right, exactly, rand, rounding_to
from torch import Tensor

from grouped_experts import GroupedMLP, RowRanges, routed_experts
from grouped_experts.nn.function import Weights, apply_experts
from grouped_experts.nn.products import Products
from grouped_experts.ops import permute, route, unpermute

FP32, FP64 = torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    """Leaves of x (T, H), ids (T, k), probs (T, k) or None and the weights, and a gradient of y."""

    x: Tensor
    ids: Tensor
    probs: Tensor | None
    weights: dict[str, Tensor]
    dy: Tensor
    activation: str

    @property
    def num_experts(self) -> int:
        return self.weights["fc1_weight"].shape[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"x": self.x} | ({} if self.probs is None else {"probs": self.probs}) | self.weights

    def results(self, y: Tensor) -> Results:
        """y and all gradients that are wanted."""
        wanted = {name: t for name, t in self.tensors.items() if t.requires_grad}
        dy = self.dy.to(y.dtype)
        grads = torch.autograd.grad(y, list(wanted.values()), dy, materialize_grads=True) if wanted else ()
        none: Results = dict.fromkeys(self.tensors)
        return {"y": y.detach()} | none | dict(zip(wanted, grads, strict=True))

    def layer(self, **options: Any) -> GroupedMLP:
        """A module that has these very weights."""
        num_experts, hidden, inner = self.weights["fc2_weight"].shape
        bias = "fc1_bias" in self.weights
        layer = GroupedMLP(hidden, inner, num_experts, activation=self.activation, bias=bias, device="meta", **options)
        for name, weight in self.weights.items():
            setattr(layer, name, torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad))
        return layer


def make_case(
    ids: Tensor,
    num_experts: int,
    hidden: int = 6,
    inner: int = 4,
    *,
    dtype: torch.dtype = FP32,
    probs_dtype: torch.dtype | None = FP32,
    bias: bool = True,
    activation: str = "swiglu",
    weight_dtype: torch.dtype | None = None,
) -> Case:
    device = str(ids.device)
    width = inner if activation == "squared_relu" else 2 * inner
    shapes = {"fc1_weight": (width, hidden), "fc2_weight": (hidden, inner)}
    shapes |= {"fc1_bias": (width,), "fc2_bias": (hidden,)} if bias else {}
    weights = {
        name: rand(num_experts, *shape, dtype=weight_dtype or dtype, device=device) for name, shape in shapes.items()
    }
    probs = None if probs_dtype is None else rand(*ids.shape, dtype=probs_dtype, device=device, low=0)
    x, dy = (rand(ids.shape[0], hidden, dtype=dtype, device=device) for _ in range(2))
    return Case(x, ids, probs, weights, dy.detach(), activation)


def by_function(case: Case) -> Results:
    return case.results(routed_experts(case.x, case.ids, case.probs, **case.weights, activation=case.activation))


def materialised(case: Case) -> Tensor:
    """Rows copied into their experts' order, the layer on them, and back."""
    probs = torch.ones(case.ids.shape, device=case.x.device) if case.probs is None else case.probs
    rows = permute(case.x, case.ids, probs, case.num_experts)
    ranges = RowRanges.contiguous(rows.counts, num_rows=rows.x.shape[0])
    row_probs = None if case.probs is None else rows.probs
    weights = Weights(*(case.weights.get(name) for name in WEIGHTS))
    y = apply_experts(rows.x, row_probs, ranges, None, None, weights, case.activation, Products(case.x.dtype))
    return unpermute(y, rows.routing)


def by_rows(case: Case) -> Results:
    return case.results(materialised(case))


def by_definition(case: Case, dtype: torch.dtype, rounding: Rounding = exactly) -> Results:
    """Every expert on all tokens, and of it as much as they chose; `rounding` where a result is stored."""

    def leaf(t: Tensor) -> Tensor:
        return t.detach().to(torch.promote_types(t.dtype, dtype)).requires_grad_(t.requires_grad)

    x = case.x.detach()
    nobody = case.ids.eq(case.num_experts).all(1, keepdim=True)
    x = torch.where(nobody, 0, x).to(dtype).requires_grad_(case.x.requires_grad)
    probs = torch.ones(case.ids.shape, dtype=dtype, device=x.device) if case.probs is None else leaf(case.probs)
    leaves = {name: leaf(w) for name, w in case.weights.items()}
    y = torch.zeros_like(x)
    for e in range(case.num_experts):
        w1, w2, b1, b2 = (leaves[name][e].to(dtype) if name in leaves else None for name in WEIGHTS)
        a = rounding(plain_activation(rounding(F.linear(x, w1, b1)), case.activation))
        of_expert = rounding(F.linear(a, w2, b2))
        y = y + (torch.where(case.ids == e, probs, 0).sum(1, keepdim=True) * of_expert).to(dtype)
    tensors = {"x": x} | ({} if case.probs is None else {"probs": probs}) | leaves
    return replace(case, x=x, probs=tensors.get("probs"), weights=leaves).results(rounding(y))


def random_ids(r: random.Random, num_experts: int, choices: int, tokens: int) -> Tensor:
    """Distinct experts, any, hardly more than one, some or all of nobody; duplicates among a token's, too."""
    experts = list(range(num_experts))
    busy = r.sample(experts, r.randint(1, num_experts))
    ways: list[Callable[[], list[int]]] = [
        lambda: r.sample(experts, choices),
        lambda: r.choices(experts, k=choices),
        lambda: r.choices(busy, k=choices),
        lambda: r.choices([*experts, num_experts], k=choices),
        lambda: [num_experts] * choices,
    ]
    kind = r.randrange(7)
    chosen = [ways[kind if kind < 5 else r.randrange(5)]() for _ in range(tokens)]
    return torch.tensor(chosen, dtype=r.choice([torch.int32, torch.int64])).view(tokens, choices)


def random_case(seed: int, dtype: torch.dtype, device: str) -> Case:
    """On a GPU of one width and one activation: kernels for every other one would take minutes to compile."""
    r = random.Random(seed)
    num_experts = r.randint(1, 6)
    ids = random_ids(r, num_experts, r.randint(1, num_experts), r.choice([0, 1, 2, r.randint(3, 40)]))
    hidden, inner, activation = r.choice([1, 6, 16]), r.choice([1, 4, 8]), ACTIVATIONS[seed % 4]
    if device == "cuda":
        hidden, inner, activation = 6, 4, "swiglu"
    case = make_case(
        ids.to(device),
        num_experts,
        hidden,
        inner,
        dtype=dtype,
        probs_dtype=r.choice([None, FP32, dtype]),
        bias=r.random() < 0.5,
        activation=activation,
    )
    with torch.no_grad():
        case.x[case.ids.eq(num_experts).all(1)] = torch.nan
    return case


def assert_as_by_definition(actual: Results, case: Case) -> None:
    dtype = case.x.dtype
    exact = by_definition(case, FP64)
    if dtype == FP64:
        for name, value in exact.items():
            tolerance = 1e-5 if actual[name].dtype == FP32 else 1e-12  # of probs in fp32
            torch.testing.assert_close(actual[name].double(), value, rtol=tolerance, atol=tolerance)
        return
    terms = max(case.x.shape[0], *case.weights["fc1_weight"].shape[1:])
    draws = [by_definition(case, FP64, rounding_to(dtype, terms)) for _ in range(2)]
    assert_right(actual, [by_definition(case, dtype), *draws], exact, dtype)


def backward(layer: GroupedMLP, case: Case) -> None:
    layer(case.x, route(case.ids, case.num_experts), case.probs).backward(case.dy)
