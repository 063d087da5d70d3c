"""The routed layer of a few tokens from which no gradient is wanted, as one op: decoding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grouped_experts.ops.checks import check_values_of_ids
from grouped_experts.ops.families import by_family, choose_family
from grouped_experts.registration import define_op, refuse_gradient

# The most (token, choice) slots: the weights of an expert that several chose are read for each of them.
MOST_SLOTS = 32
MOST_COLUMNS = 2**17  # which the kernels' grids reach


def suits_few_tokens(x: Tensor, top_k_ids: Tensor, fc1_weight: Tensor, fc2_weight: Tensor) -> bool:
    """Whether `few_tokens_op` is the faster way: few slots on a GPU, and rows of weights in one piece."""
    if choose_family(x.device, (x.dtype,)) == "reference":
        return False
    whole = fc1_weight.stride(2) == 1 and fc2_weight.stride(2) == 1
    return 0 < top_k_ids.numel() <= MOST_SLOTS and whole and max(fc1_weight.shape[1:]) <= MOST_COLUMNS


def _with_ids_checked(x: Tensor, top_k_ids: Tensor, top_k_probs: Tensor | None, fc1_weight: Tensor, *rest: Any) -> Any:
    check_values_of_ids(top_k_ids, fc1_weight.shape[0])
    return _by_family(x, top_k_ids, top_k_probs, fc1_weight, *rest)


_by_family = by_family("few_tokens")

# As `grouped_experts.nn.routed_experts`, without checks; weights in the dtype of x, with a unit stride in their rows.
few_tokens_op = define_op(
    "few_tokens(Tensor x, Tensor top_k_ids, Tensor? top_k_probs, Tensor fc1_weight, Tensor fc2_weight,"
    " Tensor? fc1_bias, Tensor? fc2_bias, str activation) -> Tensor",
    implementation=_with_ids_checked,
    fake=lambda x, *rest: x.new_empty(x.shape),
)
refuse_gradient(few_tokens_op)
