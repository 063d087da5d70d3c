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


@dataclass(frozen=True)
class Activation:
    """value(*parts) = s, and gradient(ds, *parts) = ds * d value / d part, a tensor per part.

    parts are (gate, up) or (h,).
    """

    name: str
    gated: bool
    value: Callable[..., Tensor]
    gradient: Callable[..., tuple[Tensor, ...]]

    def width(self, intermediate_size: int) -> int:
        """Columns of h for `intermediate_size` I columns of s: 2I with a gate, I without."""
        return 2 * intermediate_size if self.gated else intermediate_size

    def split(self, h: Tensor) -> tuple[Tensor, ...]:
        """The parts of h (T, 2I) or (T, I), as views: gate = the first I columns, up = the last I."""
        if not self.gated:
            return (h,)
        half = h.shape[-1] // 2
        return h[..., :half], h[..., half:]


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """s = silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020)."""
    return F.silu(gate).mul_(up)


def _swiglu_gradient(ds: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(ds * up, gate), F.silu(gate).mul_(ds)


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    """s = gelu(gate) * up with the exact (erf) gelu (Shazeer, 2020)."""
    return F.gelu(gate).mul_(up)


def _geglu_gradient(ds: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.gelu_backward(ds * up, gate), F.gelu(gate).mul_(ds)


CLAMPED_SWIGLU_ALPHA = 1.702
CLAMPED_SWIGLU_LIMIT = 7.0


def _clamp(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.clamp(max=CLAMPED_SWIGLU_LIMIT), up.clamp(-CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """s = g sigmoid(1.702 g) (u + 1) with g = min(gate, 7), u = clamp(up, -7, 7): the experts of gpt-oss."""
    gate, up = _clamp(gate, up)
    return gate * torch.sigmoid(CLAMPED_SWIGLU_ALPHA * gate) * (up + 1)


def _clamped_swiglu_gradient(ds: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Zero where the clamp holds its input; at the limit itself the gradient passes, as torch.clamp's does."""
    gate_passes, up_passes = gate <= CLAMPED_SWIGLU_LIMIT, up.abs() <= CLAMPED_SWIGLU_LIMIT
    gate, up = _clamp(gate, up)
    sigmoid = torch.sigmoid(CLAMPED_SWIGLU_ALPHA * gate)
    swish = gate * sigmoid
    d_gate = ds * (up + 1) * (sigmoid + CLAMPED_SWIGLU_ALPHA * swish * (1 - sigmoid))
    return torch.where(gate_passes, d_gate, 0.0), torch.where(up_passes, ds * swish, 0.0)


def _squared_relu(h: Tensor) -> Tensor:
    """s = relu(h)^2 (So et al., "Primer", 2021)."""
    return torch.relu(h).square()


def _squared_relu_gradient(ds: Tensor, h: Tensor) -> tuple[Tensor]:
    return (2 * torch.relu(h) * ds,)


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("swiglu", True, _swiglu, _swiglu_gradient),
        Activation("geglu", True, _geglu, _geglu_gradient),
        Activation("clamped_swiglu", True, _clamped_swiglu, _clamped_swiglu_gradient),
        Activation("squared_relu", False, _squared_relu, _squared_relu_gradient),
    )
}


def get_activation(name: str) -> Activation:
    """The activation of that name. Raises ValueError for a name that is none."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: wanted one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
