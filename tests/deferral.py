"""A small deferred layer, batches for it, and the gradients that a plain backward gives it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from layer import Results, gradients, rand
from torch import Tensor

from grouped_experts import GroupedMLP

COUNTS = [3, 0, 4]


def make(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> GroupedMLP:
    return GroupedMLP(6, 4, 3, **{"bias": True, "defer_wgrad": True, "dtype": dtype, "device": device} | options)


def plain_twin(mlp: GroupedMLP) -> GroupedMLP:
    twin = copy.deepcopy(mlp)
    twin.defer_wgrad = False
    return twin


def batch(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, probs, dy."""
    x = rand(7, 6, dtype=dtype, device=device)
    return (
        x,
        rand(7, dtype=torch.float32, device=device, low=0),
        rand(7, 6, dtype=dtype, device=device, requires_grad=False),
    )


def step(mlp: GroupedMLP, x: Tensor, probs: Tensor | None, dy: Tensor) -> None:
    mlp(x, COUNTS, probs).backward(dy)


def plain_gradients(mlp: GroupedMLP, *batches: tuple[Tensor, Tensor, Tensor]) -> Results:
    """Of the weights, after plain backwards over the batches."""
    twin = plain_twin(mlp)
    twin.zero_grad()
    for x, probs, dy in batches:
        step(twin, x.detach(), probs.detach(), dy)
    return gradients(twin)


def exact_gradients(mlp: GroupedMLP, *batches: tuple[Tensor, Tensor, Tensor]) -> Results:
    """As `plain_gradients`, in fp64."""
    twin = copy.deepcopy(mlp).double()
    return plain_gradients(twin, *[(x.double(), probs, dy.double()) for x, probs, dy in batches])
