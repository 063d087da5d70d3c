"""The layer by its definition, y = fc2(p * act(fc1 x)): a loop over experts, differentiated by autograd, in any dtype.

In fp64 it is the exact result; in the dtype of the layer it is what one would write without the package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from exact import Bounds, eps, owned_rows, plain_activation
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grouped_experts import GroupedMLP, RowRanges

Counts = Sequence[int] | Tensor | RowRanges
Results = dict[str, Tensor | None]  # "y", and by name the gradient of whatever wants one

WEIGHTS = ["fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias"]


Rounding = Callable[[Tensor], Tensor]


def exactly(t: Tensor) -> Tensor:
    return t


def rounding_to(dtype: torch.dtype, terms: int) -> Rounding:
    """A random half step of `dtype` up or down, in the value and, on the way back, in the gradient.

    Monte Carlo arithmetic (Parker, 1997): how far roundings can move the results where these are ill-conditioned, which
    one eager run may miss by luck. A product sums `terms` terms, and where it does so in `dtype` itself their roundings
    walk at random: sqrt(terms) steps (Higham and Mary, 2019).
    """
    step = eps(dtype) / 2 * (terms**0.5 if dtype in (torch.float32, torch.float64) else 1)
    return lambda t: t * (1 + step * (2 * torch.randint(0, 2, t.shape, device=t.device, dtype=t.dtype) - 1))


def loop(
    x: Tensor,
    bounds: Bounds,
    probs: Tensor | None,
    weights: dict[str, Tensor],
    activation: str,
    dtype: torch.dtype,
    rounding: Rounding = exactly,
) -> Tensor:
    """The layer on 2-D x, in `dtype`; zero for rows of no expert. `rounding` is applied where a result is stored."""
    x = x.to(dtype)
    experts = {name: w.to(dtype).unbind() for name, w in weights.items()}  # indexing w[e] would take E times as long
    pieces, behind = [], 0
    for expert, (start, end) in enumerate(bounds):
        if start == end:
            continue
        pieces.append(x.new_zeros(start - behind, x.shape[1]))
        behind = end
        w1, w2, b1, b2 = (experts[name][expert] if name in experts else None for name in WEIGHTS)
        a = plain_activation(rounding(F.linear(x[start:end], w1, b1)), activation)
        if probs is not None:
            a = (a * probs[start:end, None]).to(dtype)
        y = F.linear(rounding(a), w2)
        if b2 is not None:
            y = y + (b2 if probs is None else (probs[start:end, None] * b2).to(dtype))
        pieces.append(rounding(y))
    return torch.cat([*pieces, x.new_zeros(x.shape[0] - behind, x.shape[1])])


def by_loop(
    mlp: GroupedMLP,
    x: Tensor,
    bounds: Bounds,
    probs: Tensor | None,
    dy: Tensor,
    dtype: torch.dtype,
    rounding: Rounding = exactly,
) -> Results:
    """y and all gradients by `loop` in `dtype`: exact in fp64, eager in the dtype of x."""

    def leaf(t: Tensor) -> Tensor:
        copy = t.detach().to(torch.float64) if dtype == torch.float64 else t.detach()
        return copy.clone().requires_grad_(t.requires_grad)

    leaves = {name: leaf(t) for name, t in _tensors(mlp, x, probs).items()}
    weights = {name: t for name, t in leaves.items() if name in WEIGHTS}
    p = leaves.get("probs")
    p = None if p is None else p.reshape(-1)
    y = loop(leaves["x"].flatten(0, -2), bounds, p, weights, mlp.activation, dtype, rounding).view(x.shape)
    wanted = [t for t in leaves.values() if t.requires_grad]
    if y.requires_grad:
        gradients = iter(torch.autograd.grad(y, wanted, dy.to(dtype), materialize_grads=True))
    else:  # no expert has rows
        gradients = map(torch.zeros_like, wanted)
    return {"y": y.detach()} | {name: next(gradients) if t.requires_grad else None for name, t in leaves.items()}


def eager(mlp: GroupedMLP, x: Tensor, bounds: Bounds, probs: Tensor | None, dy: Tensor, exact: Results) -> Results:
    """What eager torch gives in the dtype of x. In fp64 `loop` counts as exact: its error there is fp32's, scaled."""
    if x.dtype != torch.float64:
        return by_loop(mlp, x, bounds, probs, dy, x.dtype)
    mlp = copy.deepcopy(mlp).float()
    x = x.detach().float().requires_grad_(x.requires_grad)
    in_fp32 = by_loop(mlp, x, bounds, probs, dy, torch.float32)
    scale = eps(torch.float64) / eps(torch.float32)
    return {
        name: None if value is None else value + (in_fp32[name].double() - value) * scale
        for name, value in exact.items()
    }


def by_layer(mlp: GroupedMLP, x: Tensor, counts: Counts, probs: Tensor | None, dy: Tensor) -> Results:
    """y and all gradients by the layer itself, deferred ones delivered."""
    tensors = _tensors(mlp, x, probs)
    for t in tensors.values():
        t.grad = None
    y = mlp(x, counts, probs)
    if y.requires_grad:
        y.backward(dy)
        mlp.backward_dw()
    return {"y": y.detach()} | {name: t.grad for name, t in tensors.items()}


def check(
    mlp: GroupedMLP, x: Tensor, bounds: Bounds, counts: Counts, probs: Tensor | None, dy: Tensor, *, draws: int = 0
) -> Results:
    """Every result of the layer, one by one: as accurate as eager, zero in rows of no expert.

    draws: runs with random roundings, beside the eager one, whose errors are allowed too.
    """
    actual = by_layer(mlp, x, counts, probs, dy)
    exact = by_loop(mlp, x, bounds, probs, dy, torch.float64)
    allowed = [eager(mlp, x, bounds, probs, dy, exact)]
    rounding = rounding_to(x.dtype, terms=max(x.shape[:-1].numel(), *mlp.fc1_weight.shape[1:]))
    allowed += [by_loop(mlp, x, bounds, probs, dy, torch.float64, rounding) for _ in range(draws)]
    assert_right(actual, allowed, exact, x.dtype)
    for name, t in _tensors(mlp, x, probs).items():
        assert actual[name] is None or actual[name].dtype == t.dtype, name
    unowned = ~owned_rows(bounds, x.shape[:-1].numel(), x)[:, 0]
    for name in ("y", "x", "probs"):
        if actual.get(name) is not None:
            assert actual[name].flatten(0, x.dim() - 2)[unowned].eq(0).all(), name
    for name in WEIGHTS:
        if actual.get(name) is not None:
            for gradient, (start, end) in zip(actual[name], bounds, strict=True):
                assert start < end or gradient.eq(0).all(), f"{name} of an idle expert"
    return actual


def assert_right(actual: Results, allowed: Sequence[Results], exact: Results, dtype: torch.dtype) -> None:
    """Each as accurate as eager: error <= 2 * (the largest error of those allowed + one rounding of the largest value).

    The rounding is one to `dtype`, in which h is stored, or to the result's own dtype where that is coarser: a gradient
    of fp32 probs is computed from an h in bf16.
    """
    assert actual.keys() == exact.keys()
    for name, value in exact.items():
        result = actual[name]
        if value is None:
            assert result is None, name
            continue
        assert result is not None, f"no gradient of {name}"
        assert result.shape == value.shape, name
        if value.numel() == 0:
            continue
        error, *errors = (
            (t.double() - value).abs().max().item() for t in (result, *(other[name] for other in allowed))
        )
        bound = 2 * (max(errors) + max(eps(dtype), eps(result.dtype)) * value.abs().max().item())
        assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}, allowed {max(errors):.3g}"


def assert_same(actual: Results, expected: Results) -> None:
    """Equal to the bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or actual[name] is None:
            assert actual[name] is value, name
        else:
            assert actual[name].dtype == value.dtype, name
            assert torch.equal(actual[name], value), name


def assert_equal_sums(actual: Results, expected: Results, terms: int = 64) -> None:
    """Equal but for the order of summation: a sum of n terms errs by up to n roundings (Higham, 2002, section 4.2)."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
            continue
        assert actual[name].dtype == value.dtype, name
        error = (actual[name] - value).abs().max().item()
        bound = terms * eps(value.dtype) * value.abs().max().item()
        assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}"


def gradients(mlp: torch.nn.Module) -> Results:
    return {name: p.grad for name, p in mlp.named_parameters()}


def _tensors(mlp: GroupedMLP, x: Tensor, probs: Tensor | None) -> dict[str, Tensor]:
    return {"x": x} | ({} if probs is None else {"probs": probs}) | dict(mlp.named_parameters())


def running(counts: Sequence[int]) -> list[tuple[int, int]]:
    bounds, row = [], 0
    for count in counts:
        bounds.append((row, row + count))
        row += count
    return bounds


def rand(*shape: int, dtype: torch.dtype, device: str, low: float = -1.0, requires_grad: bool = True) -> Tensor:
    """Uniform in [low, 1), drawn on the CPU: the same numbers on every device."""
    t = torch.rand(*shape, dtype=torch.float64) * (1 - low) + low
    return t.to(device, dtype).requires_grad_(requires_grad)


# ---- the unit fixture: results in closed form

SILU = 0.7310585786300049  # of 1
D_SILU = 0.9276705118714868  # its derivative at 1


def unit_mlp(E: int, H: int, I: int, *, dtype: torch.dtype, device: str, **options: Any) -> GroupedMLP:  # noqa: E741
    """Every fc1 entry 1/H and every fc2 entry 1/I, so that ones give h = 1."""
    mlp = GroupedMLP(H, I, E, dtype=dtype, device=device, **options)
    with torch.no_grad():
        mlp.fc1_weight.fill_(1 / H)
        mlp.fc2_weight.fill_(1 / I)
    return mlp


def unit_results(mlp: GroupedMLP, bounds: Bounds, num_rows: int, p: float, scale: Sequence[float]) -> Results:
    """What ones give for loss = y.sum(), all probs p, and fc2 of expert e scaled by scale[e]; in fp64."""
    E, H, I = mlp.num_experts, mlp.hidden_size, mlp.intermediate_size  # noqa: E741
    device = mlp.fc1_weight.device
    y, dprobs = (torch.zeros(num_rows, dtype=torch.float64, device=device) for _ in range(2))
    dx, dfc1, dfc2 = y.clone(), y.new_zeros(E, 2 * I, H), y.new_zeros(E, H, I)
    for expert, (start, end) in enumerate(bounds):
        y[start:end] = SILU * p * scale[expert]
        dx[start:end] = (SILU + D_SILU) * p * scale[expert]
        dprobs[start:end] = SILU * H * scale[expert]
        dfc1[expert, :I] = (end - start) * p * H / I * D_SILU * scale[expert]
        dfc1[expert, I:] = (end - start) * p * H / I * SILU * scale[expert]
        dfc2[expert] = (end - start) * p * SILU
    y, dx = (t[:, None].expand(num_rows, H) for t in (y, dx))
    return {"y": y, "x": dx, "probs": dprobs, "fc1_weight": dfc1, "fc2_weight": dfc2}


# ---- watching what runs


class Ops(TorchDispatchMode):
    """The ops that ran within: names in order, addresses and shapes of the results; `on_call` sees each name first."""

    def __init__(self, on_call: Callable[[str], None] = lambda name: None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.addresses: dict[str, set[int]] = {}
        self.shapes: dict[str, list[tuple[int, ...]]] = {}
        self._on_call = on_call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        self._on_call(name)
        self.names.append(name)
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(result, Tensor):
                self.addresses.setdefault(name, set()).add(result.data_ptr())
                self.shapes.setdefault(name, []).append(tuple(result.shape))
        return out

    def products(self) -> list[str]:
        return [name for name in self.names if name.startswith("k_grouped")]


def subsets(names: Sequence[str]) -> Iterator[set[str]]:
    for bits in range(2 ** len(names)):
        yield {name for i, name in enumerate(names) if bits >> i & 1}
