"""MoE: a whole Mixture-of-Experts layer, router -> GroupedMLP on the rows that it routes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from grouped_experts.nn.autocast import autocast_dtype
from grouped_experts.nn.fp8 import FP8Recipe, QuantizedWeights
from grouped_experts.nn.grouped_mlp import GroupedMLP
from grouped_experts.nn.router import Router
from grouped_experts.ops.checks import check_float
from grouped_experts.ops.permute import route_rows
from grouped_experts.rows import RowRanges


class MoEOutput(NamedTuple):
    """y: shape of x. load_balancing_loss (): `Router`'s. tokens_per_expert (E,) int32: how often each was chosen."""

    y: Tensor
    load_balancing_loss: Tensor
    tokens_per_expert: Tensor


class MoE(nn.Module):
    """y_t = sum over the k experts e of token t of p_t,e MLP_e(x_t) (+ MLP_shared(x_t)); no token is dropped.

    `router` (`Router`) chooses the experts and their weights, `experts` (`GroupedMLP`) computes them, and
    `shared_expert`, a GroupedMLP with one expert that takes every token with weight 1, is there if
    shared_intermediate_size is given (DeepSeekMoE, Dai et al., 2024; with shared expert: DeepSeek-V3, equation 12).

    activation, bias, precision: as in `GroupedMLP`.
    score, normalize_top_k, scaling_factor, balancing_bias: as in `Router`.
    defer_wgrad: weight gradients of the experts wait for `grouped_experts.backward_dw(model)`; the router's do not.

    Raises ValueError as `GroupedMLP` and `Router` do, and for a shared_intermediate_size below 1.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        score: str = "softmax",
        normalize_top_k: bool | None = None,
        scaling_factor: float = 1.0,
        balancing_bias: bool = False,
        shared_intermediate_size: int | None = None,
        defer_wgrad: bool = False,
        precision: str | FP8Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if shared_intermediate_size is not None and shared_intermediate_size < 1:
            raise ValueError(f"shared_intermediate_size: wanted an int >= 1 or None, got {shared_intermediate_size}")
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            score=score,
            normalize_top_k=normalize_top_k,
            scaling_factor=scaling_factor,
            balancing_bias=balancing_bias,
            device=device,
            dtype=dtype,
        )

        def mlp(size: int, count: int) -> GroupedMLP:
            return GroupedMLP(
                hidden_size,
                size,
                count,
                activation=activation,
                bias=bias,
                defer_wgrad=defer_wgrad,
                precision=precision,
                device=device,
                dtype=dtype,
            )

        self.experts = mlp(intermediate_size, num_experts)
        self.shared_expert = None if shared_intermediate_size is None else mlp(shared_intermediate_size, 1)

    def forward(self, x: Tensor, *, weights: QuantizedWeights | None = None) -> MoEOutput:
        """x (..., H) -> y (..., H), the load-balancing loss (fp32; fp64 for fp64), tokens_per_expert (E,) int32.

        weights: of `experts.quantize_weights()`, with a precision; a shared expert casts its own at every call.
        y has the dtype of x, under autocast autocast's; the router computes in fp32 from x as it came.
        Raises ValueError for a shape or device, TypeError for a dtype that does not fit.
        """
        check_float("x", x)
        hidden_size = self.router.hidden_size
        if x.dim() < 1 or x.shape[-1] != hidden_size:
            raise ValueError(f"x: wanted shape (..., H) = (..., {hidden_size}), got {tuple(x.shape)}")
        tokens = x.reshape(-1, hidden_size)
        routed = self.router(tokens)
        tokens = tokens.to(autocast_dtype(tokens) or tokens.dtype)  # once for all experts
        routing = route_rows(routed.top_k_ids, self.router.num_experts, tokens.dtype, routed.top_k_probs)
        y = self.experts(tokens, routing, routed.top_k_probs, weights=weights)
        if self.shared_expert is not None:
            y = y + self.shared_expert(tokens, _one_range(tokens))
        return MoEOutput(y.reshape(x.shape), routed.load_balancing_loss, routing.counts)


def _one_range(x: Tensor) -> RowRanges:
    """All rows belong to one expert. Made on the device: CUDA graphs cannot capture the copy of a list of counts."""
    return RowRanges(
        torch.zeros(1, dtype=torch.int32, device=x.device),
        torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device),
    )
