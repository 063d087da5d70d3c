"""What the ops mean, in plain loops: `exact_*` in fp64, expert by expert; `eager_*` as one would write it in any dtype.

`bounds` holds (start, end), the rows of every expert. Nothing here calls the package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Bounds = Sequence[tuple[int, int]]


# ---- tolerances


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def assert_as_accurate_as_eager(actual: Tensor, eager: Tensor, exact: Tensor) -> None:
    """error <= 2 * (error of eager torch + one rounding of the largest value, in the coarser dtype of the two)."""
    assert actual.shape == exact.shape == eager.shape
    if exact.numel() == 0:
        return
    error, eager_error = ((y.double() - exact).abs().max().item() for y in (actual, eager))
    rounding = max(eps(actual.dtype), eps(eager.dtype)) * exact.abs().max().item()
    bound = 2 * (eager_error + rounding)
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}, eager {eager_error:.3g}"


def assert_rounded_once(
    actual: Tensor, exact: Tensor, magnitude: Tensor, terms: int, accumulated_in: torch.dtype | None = None
) -> None:
    """|actual - exact| <= one rounding to the dtype of `actual` + the error of an fp32 sum (fp64 for fp64).

    accumulated_in: the dtype of the summands, where it is not that of `actual`.
    magnitude: the sum of the absolute values of the `terms` summands. A sum of n terms in any order errs by at most
    n * eps times that (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4.2); two more for the
    product and the scale.
    """
    assert actual.shape == exact.shape
    accumulation = torch.float64 if (accumulated_in or actual.dtype) == torch.float64 else torch.float32
    bound = (terms + 2) * eps(accumulation) * magnitude + eps(actual.dtype) / 2 * exact.abs() * (1 + eps(actual.dtype))
    bound = bound + torch.finfo(actual.dtype).smallest_normal * eps(actual.dtype)  # below the normal numbers
    excess = ((actual.double() - exact).abs() - bound).flatten()
    worst = int(excess.argmax()) if excess.numel() else None
    assert worst is None or excess[worst] <= 0, (
        f"at flat index {worst}: got {actual.flatten()[worst].item()}, exact {exact.flatten()[worst].item()}, "
        f"bound {bound.flatten()[worst].item():.3g}"
    )
    assert not actual.isnan().any()


# ---- grouped products


def exact_m_grouped(
    x: Tensor,
    w: Tensor,
    bounds: Bounds,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    transpose_w: bool = True,
) -> Tensor:
    x, w = x.double(), w.double()
    w = w if transpose_w else w.transpose(1, 2)
    y = x.new_zeros(x.shape[0], w.shape[1])
    for expert, (start, end) in enumerate(bounds):
        y[start:end] = (x[start:end, None, :] * w[expert]).sum(2)
        if bias is not None:
            y[start:end] += bias[expert].double() * (1 if scale is None else scale[start:end, None].double())
    return y


def eager_m_grouped(
    x: Tensor,
    w: Tensor,
    bounds: Bounds,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    transpose_w: bool = True,
) -> Tensor:
    w = w if transpose_w else w.transpose(1, 2)
    y = x.new_zeros(x.shape[0], w.shape[1])
    for expert, (start, end) in enumerate(bounds):
        if end > start:
            y[start:end] = F.linear(x[start:end], w[expert])
            if bias is not None:
                y[start:end] += bias[expert] * (1 if scale is None else scale[start:end, None].to(x.dtype))
    return y


def exact_k_grouped(a: Tensor, b: Tensor, bounds: Bounds) -> Tensor:
    a, b = a.double(), b.double()
    c = a.new_zeros(len(bounds), a.shape[1], b.shape[1])
    for expert, (start, end) in enumerate(bounds):
        c[expert] = (a[start:end, :, None] * b[start:end, None, :]).sum(0)
    return c


def eager_k_grouped(a: Tensor, b: Tensor, bounds: Bounds) -> Tensor:
    c = a.new_zeros(len(bounds), a.shape[1], b.shape[1])
    for expert, (start, end) in enumerate(bounds):
        c[expert] = a[start:end].t() @ b[start:end]
    return c


def exact_k_grouped_sum(a: Tensor, bounds: Bounds, scale: Tensor | None = None) -> Tensor:
    c = a.new_zeros(len(bounds), a.shape[1], dtype=torch.float64)
    for expert, (start, end) in enumerate(bounds):
        c[expert] = (a[start:end].double() * (1 if scale is None else scale[start:end, None].double())).sum(0)
    return c


def eager_k_grouped_sum(a: Tensor, bounds: Bounds, scale: Tensor | None = None) -> Tensor:
    a = a if scale is None else a * scale[:, None].to(a.dtype)
    c = a.new_zeros(len(bounds), a.shape[1])
    for expert, (start, end) in enumerate(bounds):
        c[expert] = a[start:end].sum(0)
    return c


# ---- activation


def plain_activation(h: Tensor, activation: str) -> Tensor:
    """The activation in the dtype of h, differentiable by autograd. A gate comes first: h = [gate | up]."""
    if activation == "squared_relu":
        return torch.where(h > 0, h * h, 0 * h)
    gate, up = h.chunk(2, dim=-1)
    if activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if activation == "geglu":
        return 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up
    assert activation == "clamped_swiglu"
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def magnitude_of_activation(h: Tensor, activation: str) -> Tensor:
    """What the rounding errors of an activation in fp32 are relative to: exp(x) errs by |x| of its value's eps."""
    h = h.double().abs()
    if activation == "squared_relu":
        return h * h
    gate, up = h.chunk(2, dim=-1)
    return gate * (1 + gate) * (1 + up)


def magnitude_of_derivative(h: Tensor, activation: str) -> Tensor:
    """The same for d activation / d h, in the shape of h."""
    h = h.double().abs()
    if activation == "squared_relu":
        return 2 * h
    gate, up = h.chunk(2, dim=-1)
    return torch.cat([(1 + gate) ** 2 * (1 + up), (1 + gate) ** 2], dim=-1)


def owned_rows(bounds: Bounds, num_rows: int, like: Tensor) -> Tensor:
    """(T, 1) bool: whether some expert owns the row."""
    owned = torch.zeros(num_rows, 1, dtype=torch.bool, device=like.device)
    for start, end in bounds:
        owned[start:end] = True
    return owned


def exact_scaled_activation(h: Tensor, probs: Tensor | None, bounds: Bounds, activation: str) -> Tensor:
    owned = owned_rows(bounds, h.shape[0], h)
    s = plain_activation(h.double(), activation)
    return torch.where(owned, s if probs is None else probs.double()[:, None] * s, 0.0)


def exact_scaled_activation_backward(
    da: Tensor, h: Tensor, probs: Tensor | None, bounds: Bounds, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, a, dprobs, the derivative taken by autograd in fp64."""
    owned = owned_rows(bounds, h.shape[0], h)
    p = torch.ones(h.shape[0], dtype=torch.float64, device=h.device) if probs is None else probs.double()
    da, h, p = (torch.where(owned, t.double(), 0.0) for t in (da, h, p[:, None]))
    h, p = h.detach().requires_grad_(), p.detach().requires_grad_()
    a = torch.where(owned, p * plain_activation(h, activation), 0.0)
    dh, dp = torch.autograd.grad(a, (h, p), da)
    return torch.where(owned, dh, 0.0), a.detach(), torch.where(owned, dp, 0.0)[:, 0]


def eager_scaled_activation_backward(
    da: Tensor, h: Tensor, probs: Tensor | None, bounds: Bounds, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As one would write it in the dtype of h."""
    owned = owned_rows(bounds, h.shape[0], h)
    p = h.new_ones(h.shape[0]) if probs is None else probs.to(h.dtype)
    da, h, p = (torch.where(owned, t, torch.zeros_like(t)) for t in (da, h, p[:, None]))
    h, p = h.detach().requires_grad_(), p.detach().requires_grad_()
    a = p * plain_activation(h, activation)
    dh, dp = torch.autograd.grad(a, (h, p), da)
    zero = torch.zeros((), dtype=h.dtype, device=h.device)
    return torch.where(owned, dh, zero), torch.where(owned, a.detach(), zero), torch.where(owned, dp, zero)[:, 0]


# ---- permute


def exact_route(ids: list[list[int]], num_experts: int) -> tuple[list[int], list[list[int]], list[int]]:
    """counts, slot_to_row, row_to_slot by walking the experts in order, and each one's tokens in theirs."""
    choices = len(ids[0]) if ids else 0
    counts = [0] * num_experts
    slot_to_row = [[-1] * choices for _ in ids]
    row_to_slot: list[int] = []
    for expert in range(num_experts):
        for token, chosen in enumerate(ids):
            for choice, wanted in enumerate(chosen):
                if wanted == expert:
                    slot_to_row[token][choice] = len(row_to_slot)
                    row_to_slot.append(token * choices + choice)
                    counts[expert] += 1
    row_to_slot += [-1] * (len(ids) * choices - len(row_to_slot))
    return counts, slot_to_row, row_to_slot
