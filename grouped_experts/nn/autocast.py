"""What autocast asks of a layer."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants for a product with x; None where it is off, unknown (meta) or x is fp64."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def outside_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Compute in the dtypes that are there."""
    if not torch.amp.is_autocast_available(x.device.type):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)
