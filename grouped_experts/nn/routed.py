"""The experts of a routed layer as a function: tokens with their top-k choices in, tokens out."""

from __future__ import annotations

from torch import Tensor

from grouped_experts.activations import get_activation
from grouped_experts.nn.few_tokens import apply_to_few_tokens, is_of_few_tokens
from grouped_experts.nn.function import Weights, apply_experts
from grouped_experts.nn.inputs import check_choices, check_weights, compute_dtype, routed_ranges
from grouped_experts.nn.products import Products
from grouped_experts.ops.checks import check_float, check_ids, check_shape
from grouped_experts.ops.permute import route_rows


def routed_experts(
    x: Tensor,
    top_k_ids: Tensor,
    top_k_probs: Tensor | None,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
) -> Tensor:
    """y_t = sum over j of p_tj (W2_e act(W1_e x_t + b1_e) + b2_e), e = top_k_ids[t, j]; in fp32, in a fixed order.

    x (T, H) tokens in any order. top_k_ids (T, k) int32 | int64, k up to E, duplicates allowed; an id equal to E marks
    a choice that is not computed here ("not on this rank") and adds nothing (as in `grouped_experts.ops.route`).
    top_k_probs (T, k) in any floating dtype, ones if None. fc1_weight (E, 2I, H), [gate | up], or (E, I, H) without a
    gate; fc2_weight (E, H, I); fc1_bias (E, 2I) or (E, I), fc2_bias (E, H). activation: as in `GroupedMLP`.

    Returns y (T, H). Dtypes and autocast as in `GroupedMLP`. Differentiable in all floating tensors. For the backward
    it keeps x, h (T k, 2I), a prob and two integers a row, and no rows of x, dy or y in their experts' order.
    Where no gradient is wanted, up to 32 (token, choice) pairs on a GPU have kernels of their own, which round less:
    y is not, to the bit, that of the same tokens among more, or in a call that is to be differentiated.
    Raises ValueError for a shape, id, device or unknown activation, TypeError for a dtype that does not fit.
    """
    check_float("x", x)
    check_shape("x", x, (None, None), "(T, H)")
    for name, weight in (("fc1_weight", fc1_weight), ("fc2_weight", fc2_weight)):
        check_float(name, weight)
        check_shape(name, weight, (None, None, None), "(E, 2I, H)" if name == "fc1_weight" else "(E, H, I)")
    get_activation(activation)
    weights = Weights(fc1_weight, fc2_weight, fc1_bias, fc2_bias)
    num_experts, intermediate_size = fc1_weight.shape[0], fc2_weight.shape[2]
    check_weights(weights, activation, num_experts, x.shape[1], intermediate_size, like=x)
    dtype = compute_dtype(x, weights)
    check_ids(top_k_ids, num_experts)
    check_choices(top_k_ids, x, top_k_probs, "top_k_ids", "top_k_probs")
    if is_of_few_tokens(x, top_k_ids, top_k_probs, weights):
        return apply_to_few_tokens(x, top_k_ids, top_k_probs, weights, activation, dtype)
    routing = route_rows(top_k_ids, num_experts, dtype, top_k_probs)
    rows, tiles = routed_ranges(routing, dtype)
    return apply_experts(x, top_k_probs, rows, tiles, routing, weights, activation, Products(dtype))
