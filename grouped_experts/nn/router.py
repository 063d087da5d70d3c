"""Router: which experts a token goes to, and with which weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grouped_experts.nn.autocast import outside_autocast
from grouped_experts.ops.checks import check_device, check_float, check_shape
from grouped_experts.ops.reference import accumulation_dtype

# What DeepSeek-V3's gate adds to the sum before it divides: sigmoids may all underflow to zero.
NORMALIZATION_EPS = 1e-20

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
}


class RouterOutput(NamedTuple):
    """T tokens, k choices a token. Floats are fp32 (fp64 for fp64 data).

    top_k_ids (T, k) int64: distinct experts, the best first. top_k_probs (T, k): their weights.
    load_balancing_loss (): 1 at perfect balance, up to E where one expert takes all; 0 without tokens.
    """

    top_k_ids: Tensor
    top_k_probs: Tensor
    load_balancing_loss: Tensor


class Router(nn.Module):
    """The k best of E experts for every token, and their weights.

        s = softmax(W x)  or  sigmoid(W x)           in fp32, also under autocast
        ids = top-k over e of s_e (+ b_e)            b: the balancing bias; it chooses, and does nothing else
        p_j = s_ids_j                                normalised: p_j = s_ids_j / sum over i of s_ids_i
        p_j = scaling_factor * p_j

    Softmax, then top-k: Shazeer et al., "Outrageously Large Neural Networks" (2017), in the order of Fedus et al.,
    "Switch Transformers" (2021); normalised, it is Mixtral's softmax over the chosen logits. Sigmoid with a bias that
    only chooses: DeepSeek-V3 (2024), equations 13 to 16.

    The load-balancing loss is E * sum over e of f_e P_e (Switch Transformers, equations 4 to 6): f_e is the share of
    all T k choices that went to expert e, without gradient; P_e is the mean over tokens of s_e, for sigmoid of
    s_e / sum over i of s_i (DeepSeek-V3, equations 17 to 20).

    Parameter: weight (E, H). Buffer, with balancing_bias=True: balancing_bias (E,), always fp32, since steps of
    `update_balancing_bias` would be lost in the rounding of bf16.

    score: "softmax" or "sigmoid".
    normalize_top_k: whether the k weights of a token sum to scaling_factor; by default if k > 1. With k = 1 the weight
        would be constant, and the router would learn nothing from y.

    Raises ValueError for a size below 1, top_k beyond num_experts, an unknown score, or a scaling factor not above 0.
    """

    weight: Tensor
    balancing_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize_top_k: bool | None = None,
        scaling_factor: float = 1.0,
        balancing_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in {"hidden_size": hidden_size, "num_experts": num_experts, "top_k": top_k}.items():
            if size < 1:
                raise ValueError(f"{name}: wanted an int >= 1, got {size}")
        if top_k > num_experts:
            raise ValueError(f"top_k: wanted at most num_experts = {num_experts}, got {top_k}")
        if score not in SCORES:
            raise ValueError(f"score: wanted one of {', '.join(SCORES)}, got {score!r}")
        if not (scaling_factor > 0 and math.isfinite(scaling_factor)):
            raise ValueError(f"scaling_factor: wanted a finite number > 0, got {scaling_factor}")
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.score, self.scaling_factor = score, scaling_factor
        self.normalize_top_k = top_k > 1 if normalize_top_k is None else normalize_top_k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if balancing_bias else None
        self.register_buffer("balancing_bias", bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weight uniform in +-1 / sqrt(H), what `nn.Linear` draws; balancing bias zero."""
        bound = 1 / math.sqrt(self.hidden_size)
        self.weight.uniform_(-bound, bound)
        if self.balancing_bias is not None:
            self.balancing_bias.zero_()

    def forward(self, x: Tensor) -> RouterOutput:
        """x (T, H) bf16 | fp16 | fp32 | fp64 -> top_k_ids, top_k_probs and the load-balancing loss.

        Raises ValueError for a shape or device, TypeError for a dtype that does not fit.
        """
        check_float("x", x)
        check_shape("x", x, (None, self.hidden_size), "(T, H)")
        check_device("x", x, like=self.weight)
        dtype = accumulation_dtype(x.dtype)
        with outside_autocast(x):
            scores = SCORES[self.score](F.linear(x.to(dtype), self.weight.to(dtype)))
            choice = scores.detach()
            if self.balancing_bias is not None:
                choice = choice + self.balancing_bias
            ids = choice.topk(self.top_k, dim=-1).indices
            probs = scores.gather(1, ids)
            if self.normalize_top_k:
                probs = _shares(probs)
            shares = scores if self.score == "softmax" else _shares(scores)
            return RouterOutput(ids, probs * self.scaling_factor, load_balancing_loss(shares, ids))

    @torch.no_grad()
    def update_balancing_bias(self, tokens_per_expert: Tensor, rate: float) -> None:
        """b_e += rate * sign(mean load - load_e), after a step, so that idle experts are chosen more often.

        tokens_per_expert (E,), any integer or floating dtype: the load of the whole batch; with several ranks or
        micro-batches, their sum. DeepSeek-V3 (2024), section 2.1.2, with rate 0.001. No synchronisation.
        Raises ValueError without a balancing bias, or for a shape that does not fit.
        """
        if self.balancing_bias is None:
            raise ValueError("balancing_bias: wanted a router made with balancing_bias=True, got one without")
        check_shape("tokens_per_expert", tokens_per_expert, (self.num_experts,), "(E,)")
        load = tokens_per_expert.to(self.balancing_bias)
        self.balancing_bias += rate * torch.sign(load.mean() - load)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """What `.to`, `.half` and the like go through: the balancing bias changes its device, never its dtype."""
        before = self.balancing_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after: Any = self.balancing_bias
        if before is not None and after.dtype != before.dtype:
            self.balancing_bias = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        text = f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}"
        text += f", score={self.score!r}, normalize_top_k={self.normalize_top_k}, scaling_factor={self.scaling_factor}"
        return text + (", balancing_bias=True" if self.balancing_bias is not None else "")


def load_balancing_loss(shares: Tensor, top_k_ids: Tensor) -> Tensor:
    """E * sum over e of f_e P_e: f_e the share of the choices that expert e got, P_e its mean score.

    shares (T, E): scores that sum to 1 over the experts; top_k_ids (T, k) int64. Returns a scalar, dtype of shares.
    """
    num_experts = shares.shape[1]
    slots = top_k_ids.reshape(-1)
    # Integers: their atomics on a GPU add up to the same sum in any order.
    counts = torch.zeros(num_experts, dtype=torch.int64, device=slots.device)
    counts = counts.scatter_add(0, slots, torch.ones_like(slots))
    f = counts.to(shares.dtype) / max(slots.shape[0], 1)
    p = shares.sum(0) / max(shares.shape[0], 1)
    return num_experts * (f * p).sum()


def _shares(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + NORMALIZATION_EPS)
