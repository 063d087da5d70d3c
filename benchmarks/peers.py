"""What the layer is measured against: the same mathematics written by hand with what PyTorch has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm_composite(x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, ends: Tensor, probs: Tensor) -> Tensor:
    """`F.grouped_mm` for both products and eager SwiGLU between them.

    x (T, H), fc1_weight (E, 2I, H), fc2_weight (E, H, I), ends (E,) int32 running sum of the counts, probs (T,).
    """
    h = F.grouped_mm(x, fc1_weight.transpose(1, 2), offs=ends)
    gate, up = h.chunk(2, dim=-1)
    a = (F.silu(gate) * up * probs[:, None]).to(x.dtype)
    return F.grouped_mm(a, fc2_weight.transpose(1, 2), offs=ends)


def routed_composite(x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, top_k_ids: Tensor, probs: Tensor) -> Tensor:
    """`grouped_mm_composite` between an index_select of the tokens' rows and an index_add of what the experts made.

    x (T, H), top_k_ids (T, k) int64, probs (T, k). Does not wait for the GPU: counts are found by a binary search.
    """
    ids, slots = top_k_ids.flatten().sort(stable=True)
    experts = torch.arange(fc1_weight.shape[0], device=x.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    tokens = slots // top_k_ids.shape[1]
    rows, row_probs = x.index_select(0, tokens), probs.flatten().index_select(0, slots)
    y = grouped_mm_composite(rows, fc1_weight, fc2_weight, ends, row_probs)
    return torch.zeros_like(x).index_add(0, tokens, y)


def routed_loop(x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, top_k_ids: Tensor, probs: Tensor) -> Tensor:
    """`loop_over_experts` in place of the grouped products: in fp32, what the others are checked against. Waits."""
    ids, slots = top_k_ids.flatten().sort(stable=True)
    counts = ids.bincount(minlength=fc1_weight.shape[0]).tolist()
    tokens = slots // top_k_ids.shape[1]
    rows, row_probs = x.index_select(0, tokens), probs.flatten().index_select(0, slots)
    y = loop_over_experts(rows, fc1_weight, fc2_weight, counts, row_probs)
    return torch.zeros_like(x).index_add(0, tokens, y)


def loop_over_experts(x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, counts: list[int], probs: Tensor) -> Tensor:
    """The loop that most models start from; each backward of `weight[e]` writes a gradient of full size."""
    outputs = []
    for expert, (rows, p) in enumerate(zip(x.split(counts), probs.split(counts), strict=True)):
        gate, up = F.linear(rows, fc1_weight[expert]).chunk(2, dim=-1)
        a = (F.silu(gate) * up * p[:, None]).to(x.dtype)
        outputs.append(F.linear(a, fc2_weight[expert]))
    return torch.cat(outputs)
