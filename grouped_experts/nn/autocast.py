"""What autocast asks of a layer."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants for a product with x; None where it is off, x is fp64, or on meta."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta":
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def outside_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Compute in the dtypes that are there."""
    if x.device.type == "meta":  # which has no autocast
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)
