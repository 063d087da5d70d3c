"""The routed layer of a few tokens from which no gradient is wanted, as one op: decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grouped_experts.ops.checks import check_values_of_ids
from grouped_experts.ops.families import by_family, forced_family
from grouped_experts.registration import define_op, refuse_gradient

# The most (token, choice) slots, and how many experts there must be for each: the weights of an expert that several
# slots chose are read for each of them. The choices of one token are distinct as a rule.
MOST_SLOTS = 32
EXPERTS_FOR_A_SLOT = 4
MOST_COLUMNS = 2 * 65535  # of a weight, in programs of two: what a launch takes in its second dimension


def suits_few_tokens(x: Tensor, top_k_ids: Tensor, fc1_weight: Tensor, fc2_weight: Tensor) -> bool:
    """Whether `few_tokens_op` is the faster way: few slots on a GPU, and rows of weights in one piece.

    In compiled code, a number of tokens that is not fixed counts as many: it is not asked for, lest there be a guard.
    """
    kernels = x.device.type == "cuda" if forced_family() is None else forced_family() != "reference"
    if not kernels or x.dtype == torch.float64:
        return False
    slots, tokens, experts = top_k_ids.numel(), top_k_ids.shape[0], fc1_weight.shape[0]
    few = [slots > 0, slots <= MOST_SLOTS, max(fc1_weight.shape[1:]) <= MOST_COLUMNS]
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads the compiler

        spread = statically_known_true(tokens == 1) or statically_known_true(slots * EXPERTS_FOR_A_SLOT <= experts)
        suits = spread and all(statically_known_true(condition) for condition in few)
    else:
        suits = (tokens == 1 or slots * EXPERTS_FOR_A_SLOT <= experts) and all(few)
    return suits and fc1_weight.stride(2) == 1 and fc2_weight.stride(2) == 1


_run = by_family("few_tokens")


def _few_tokens(x: Tensor, top_k_ids: Tensor, top_k_probs: Tensor | None, fc1_weight: Tensor, *rest: Any) -> Any:
    check_values_of_ids(top_k_ids, fc1_weight.shape[0])
    return _run(x, top_k_ids, top_k_probs, fc1_weight, *rest)


# As `grouped_experts.nn.routed_experts`, without checks of shapes; weights in the dtype of x.
few_tokens_op = define_op(
    "few_tokens(Tensor x, Tensor top_k_ids, Tensor? top_k_probs, Tensor fc1_weight, Tensor fc2_weight,"
    " Tensor? fc1_bias, Tensor? fc2_bias, str activation) -> Tensor",
    implementation=_few_tokens,
    fake=lambda x, *rest: x.new_empty(x.shape),
)
refuse_gradient(few_tokens_op)
