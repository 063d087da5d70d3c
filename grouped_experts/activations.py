"""The activations between fc1 and fc2, each once: its value and its derivative.

An activation maps h to s, element by element. With a gate, h = [gate | up] and s has half its width; without one, s has
the width of h. Inputs are fp32 (fp64 for fp64 data): callers convert on load and round once at the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """value(*parts) = s and derivative(*parts) = ds / dpart, a tensor per part; parts are (gate, up) or (h,)."""

    name: str
    gated: bool
    value: Callable[..., Tensor]
    derivative: Callable[..., tuple[Tensor, ...]]

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
    return F.silu(gate) * up


def _swiglu_derivative(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return (sigmoid + silu * (1 - sigmoid)) * up, silu


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    """s = gelu(gate) * up with the exact (erf) gelu (Shazeer, 2020)."""
    return F.gelu(gate) * up


def _geglu_derivative(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
    density = torch.exp(-0.5 * gate * gate) * (1 / math.sqrt(2 * math.pi))
    return (cdf + gate * density) * up, gate * cdf


CLAMPED_SWIGLU_ALPHA = 1.702
CLAMPED_SWIGLU_LIMIT = 7.0


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """s = g sigmoid(1.702 g) (u + 1) with g = min(gate, 7), u = clamp(up, -7, 7): gpt-oss's experts."""
    gate = gate.clamp(max=CLAMPED_SWIGLU_LIMIT)
    up = up.clamp(-CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)
    return gate * torch.sigmoid(CLAMPED_SWIGLU_ALPHA * gate) * (up + 1)


def _clamped_swiglu_derivative(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Zero where the clamp holds its input; at the limit itself the derivative passes, as torch.clamp's does."""
    gate_passes = gate <= CLAMPED_SWIGLU_LIMIT
    up_passes = up.abs() <= CLAMPED_SWIGLU_LIMIT
    gate = gate.clamp(max=CLAMPED_SWIGLU_LIMIT)
    up = up.clamp(-CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)
    sigmoid = torch.sigmoid(CLAMPED_SWIGLU_ALPHA * gate)
    swish = gate * sigmoid
    d_gate = (sigmoid + CLAMPED_SWIGLU_ALPHA * swish * (1 - sigmoid)) * (up + 1)
    return torch.where(gate_passes, d_gate, 0.0), torch.where(up_passes, swish, 0.0)


def _squared_relu(h: Tensor) -> Tensor:
    """s = relu(h)^2 (So et al., "Primer", 2021)."""
    return torch.relu(h).square()


def _squared_relu_derivative(h: Tensor) -> tuple[Tensor]:
    return (2 * torch.relu(h),)


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("swiglu", True, _swiglu, _swiglu_derivative),
        Activation("geglu", True, _geglu, _geglu_derivative),
        Activation("clamped_swiglu", True, _clamped_swiglu, _clamped_swiglu_derivative),
        Activation("squared_relu", False, _squared_relu, _squared_relu_derivative),
    )
}


def get_activation(name: str) -> Activation:
    """The activation of that name. Raises ValueError for a name that is none."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: wanted one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
