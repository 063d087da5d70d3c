"""The activations between fc1 and fc2, each once: its value and its gradient.

An activation maps h to s, element by element. With a gate, h = [gate | up] and s has half its width; without one, s has
the width of h. Inputs are fp32 (fp64 for fp64 data): callers convert on load and round once at the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# gradient(ds, parts) writes ds * d s / d part into each of `parts`, rounded to its dtype; to be called once.
Gradient = Callable[[Tensor, tuple[Tensor, ...]], None]
Linearize = Callable[..., tuple[Tensor, Gradient]]


@dataclass(frozen=True)
class Activation:
    """linearize(*parts) = (s, gradient): the value, and the gradient there; parts are (gate, up) or (h,)."""

    name: str
    gated: bool
    linearize: Linearize

    def value(self, *parts: Tensor) -> Tensor:
        return self.linearize(*parts)[0]

    def width(self, intermediate_size: int) -> int:
        """Columns of h for `intermediate_size` I columns of s: 2I with a gate, I without."""
        return 2 * intermediate_size if self.gated else intermediate_size

    def split(self, h: Tensor) -> tuple[Tensor, ...]:
        """The parts of h (T, 2I) or (T, I), as views: gate = the first I columns, up = the last I."""
        if not self.gated:
            return (h,)
        half = h.shape[-1] // 2
        return h[..., :half], h[..., half:]


def multiply_into(out: Tensor, x: Tensor, y: Tensor) -> None:
    """out = x * y, computed in x's dtype and rounded to out's. May overwrite x.

    An operation that writes another dtype than it computes in allocates a result and copies it: x serves as well.
    """
    if out.dtype == x.dtype:
        torch.mul(x, y, out=out)
    else:
        out.copy_(x.mul_(y))


def _gated_linear_unit(function: Callable[[Tensor], Tensor], backward: Callable[..., Tensor]) -> Linearize:
    """s = function(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020); backward: PyTorch's of function."""

    def linearize(gate: Tensor, up: Tensor) -> tuple[Tensor, Gradient]:
        value = function(gate)

        def gradient(ds: Tensor, parts: tuple[Tensor, ...]) -> None:
            d_gate, d_up = parts
            multiply_into(d_up, value, ds)
            d_value = torch.mul(ds, up, out=d_gate) if d_gate.dtype == ds.dtype else ds * up
            backward(d_value, gate, grad_input=d_value)
            if d_value is not d_gate:
                d_gate.copy_(d_value)

        return value * up, gradient

    return linearize


CLAMPED_SWIGLU_ALPHA = 1.702
CLAMPED_SWIGLU_LIMIT = 7.0


def _clamped_swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, Gradient]:
    """s = g sigmoid(1.702 g) (u + 1) with g = min(gate, 7), u = clamp(up, -7, 7): the experts of gpt-oss.

    The gradient is zero where a clamp holds its input; at the limit itself it passes, as torch.clamp's does.
    """
    g, u = gate.clamp(max=CLAMPED_SWIGLU_LIMIT), up.clamp(-CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)
    sigmoid = torch.sigmoid(CLAMPED_SWIGLU_ALPHA * g)
    swish = g * sigmoid

    def gradient(ds: Tensor, parts: tuple[Tensor, ...]) -> None:
        d_gate = ds * (u + 1) * (sigmoid + CLAMPED_SWIGLU_ALPHA * swish * (1 - sigmoid))
        parts[0].copy_(torch.where(gate <= CLAMPED_SWIGLU_LIMIT, d_gate, 0.0))
        parts[1].copy_(torch.where(up.abs() <= CLAMPED_SWIGLU_LIMIT, ds * swish, 0.0))

    return swish * (u + 1), gradient


def _squared_relu(h: Tensor) -> tuple[Tensor, Gradient]:
    """s = relu(h)^2 (So et al., "Primer", 2021)."""
    positive = torch.relu(h)

    def gradient(ds: Tensor, parts: tuple[Tensor, ...]) -> None:
        multiply_into(parts[0], 2 * positive, ds)

    return positive.square(), gradient


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("swiglu", True, _gated_linear_unit(F.silu, torch.ops.aten.silu_backward.grad_input)),
        Activation("geglu", True, _gated_linear_unit(F.gelu, torch.ops.aten.gelu_backward.grad_input)),  # exact, by erf
        Activation("clamped_swiglu", True, _clamped_swiglu),
        Activation("squared_relu", False, _squared_relu),
    )
}


def get_activation(name: str) -> Activation:
    """The activation of that name. Raises ValueError for a name that is none."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: wanted one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
