"""grouped_experts: the expert layer of Mixture-of-Experts models as a PyTorch module.

The layer, and what it computes:

    y = mlp(x, tokens_per_expert, probs)      # fc1 -> activation x router prob -> fc2

and from tokens with their top-k choices: `routed_experts`.
"""

from grouped_experts import nn, ops
from grouped_experts.nn import (
    FP8Recipe,
    GroupedMLP,
    MoE,
    QuantizedWeights,
    backward_dw,
    check_no_pending_wgrads,
    routed_experts,
)
from grouped_experts.rows import RowRanges

__version__ = "0.1.0"

__all__ = [
    "FP8Recipe",
    "GroupedMLP",
    "MoE",
    "QuantizedWeights",
    "RowRanges",
    "backward_dw",
    "check_no_pending_wgrads",
    "nn",
    "ops",
    "routed_experts",
]
