"""When a routed call is one of few tokens without gradients, which has kernels of its own, and that call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from grouped_experts.nn.function import Weights
from grouped_experts.nn.products import cast
from grouped_experts.ops.few_tokens import few_tokens_op, suits_few_tokens


def is_of_few_tokens(x: Tensor, top_k_ids: Tensor, top_k_probs: Tensor | None, weights: Weights) -> bool:
    if forward_ad._current_level >= 0:  # which the layer refuses, and those kernels would not notice
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, top_k_probs, *weights)):
        return False
    return suits_few_tokens(x, top_k_ids, weights.fc1_weight, weights.fc2_weight)


def apply_to_few_tokens(
    x: Tensor, top_k_ids: Tensor, top_k_probs: Tensor | None, weights: Weights, activation: str, dtype: torch.dtype
) -> Tensor:
    """As `apply_experts` with the routing of these ids, but for roundings: y of a row is not rounded by itself."""
    cast_weights = (None if w is None else cast(w, dtype) for w in weights)
    return few_tokens_op(cast(x, dtype), top_k_ids, top_k_probs, *cast_weights, activation)
