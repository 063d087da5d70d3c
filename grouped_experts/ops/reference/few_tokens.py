"""The routed layer of few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.activations import get_activation
from grouped_experts.ops.reference.products import accumulation_dtype


def few_tokens(
    x: Tensor,
    top_k_ids: Tensor,
    top_k_probs: Tensor | None,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """y_t = sum over j of W2_e a_tj + p_tj b2_e, a = p act(h), h = W1_e x_t + b1_e; h and a rounded, sums in fp32."""
    num_tokens, choices = top_k_ids.shape
    act, dtype = get_activation(activation), accumulation_dtype(x.dtype)
    ids = top_k_ids.reshape(-1).to(torch.int64)
    slot = ((ids >= 0) & (ids < fc1_weight.shape[0])).nonzero()[:, 0]
    expert, token = ids[slot], torch.div(slot, max(1, choices), rounding_mode="floor")
    h = (fc1_weight[expert].to(dtype) @ x[token].to(dtype)[:, :, None])[:, :, 0]
    h = h if fc1_bias is None else h + fc1_bias[expert].to(dtype)
    a = act.value(*act.split(h.to(x.dtype).to(dtype)))
    probs = None if top_k_probs is None else top_k_probs.reshape(-1)[slot].to(dtype)[:, None]
    a = (a if probs is None else probs * a).to(x.dtype)
    y = (fc2_weight[expert].to(dtype) @ a.to(dtype)[:, :, None])[:, :, 0]
    if fc2_bias is not None:
        y += fc2_bias[expert].to(dtype) if probs is None else probs * fc2_bias[expert].to(dtype)
    slots = y.new_zeros(num_tokens * choices, y.shape[1])
    slots[slot] = y
    return slots.view(num_tokens, choices, y.shape[1]).sum(1).to(x.dtype)
