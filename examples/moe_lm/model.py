"""A decoder-only transformer over bytes with a Mixture-of-Experts MLP in every block.

B sequences   C their length (context)   H hidden size   A attention heads   D = H / A   L layers   E experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from grouped_experts import MoE
from moe_lm.errors import UserError

VOCABULARY = 256  # a token is a byte
ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the model."""

    layers: int = 4
    """number of transformer blocks"""
    hidden_size: int = 128
    """width of the model"""
    heads: int = 4
    """attention heads in every block; the width is divided among them"""
    experts: int = 8
    """experts in every block"""
    top_k: int = 2
    """experts that every byte is sent to"""
    intermediate_size: int = 128
    """width inside an expert"""
    context: int = 128
    """bytes of text that the model sees at once"""

    def check(self) -> None:
        """Raise UserError for sizes that do not fit together."""
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise UserError(f"{name}: wanted at least 1, got {getattr(self, name)}")
        if self.hidden_size % (2 * self.heads):
            raise UserError(
                f"hidden_size: wanted a multiple of twice the number of heads, {2 * self.heads}, got {self.hidden_size}"
            )
        if self.top_k > self.experts:
            raise UserError(f"top_k: wanted at most the number of experts, {self.experts}, got {self.top_k}")


class LanguageModelOutput(NamedTuple):
    """logits (B, C, 256); load_balancing_loss (), the mean over layers; tokens_per_expert (L, E) int32."""

    logits: Tensor
    load_balancing_loss: Tensor
    tokens_per_expert: Tensor


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig, *, defer_wgrad: bool = False, precision: str | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, defer_wgrad, precision) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        rotation = rope_rotation(config.context, config.hidden_size // config.heads)
        self.register_buffer("rotation", rotation, persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> LanguageModelOutput:
        """tokens (B, C) int64, values below 256."""
        x = self.embedding(tokens)
        losses, loads = [], []
        for block in self.blocks:
            x, loss, load = block(x, self.rotation)
            losses.append(loss)
            loads.append(load)
        return LanguageModelOutput(self.head(self.norm(x)), torch.stack(losses).mean(), torch.stack(loads))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MoE(norm(x))."""

    def __init__(self, config: ModelConfig, defer_wgrad: bool, precision: str | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config.hidden_size, config.heads)
        self.moe_norm = nn.RMSNorm(config.hidden_size)
        self.moe = MoE(
            config.hidden_size,
            config.intermediate_size,
            config.experts,
            config.top_k,
            defer_wgrad=defer_wgrad,
            precision=precision,
        )

    def forward(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, C, H) -> x (B, C, H), load-balancing loss (), tokens_per_expert (E,)."""
        x = x + self.attention(self.attention_norm(x), rotation)
        out = self.moe(self.moe_norm(x))
        return x + out.y, out.load_balancing_loss, out.tokens_per_expert


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x (B, C, H), rotation (2, C, D) -> (B, C, H)."""
        q, k, v = rearrange(self.qkv(x), "b c (three a d) -> three b a c d", three=3, a=self.heads)
        y = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        return self.out(rearrange(y, "b a c d -> b c (a d)"))


def rope_rotation(context: int, head_size: int) -> Tensor:
    """cos and sin of position / base^(2i / D), each angle twice: (2, C, D).

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34.
    """
    frequency = ROPE_BASE ** (-torch.arange(0, head_size, 2) / head_size)
    angle = torch.outer(torch.arange(context), frequency).repeat(1, 2)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + D/2}) of x (B, A, C, D) by the angle of their position; dtype of x."""
    cos, sin = rotation[:, : x.shape[2]]
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
