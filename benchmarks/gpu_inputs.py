"""What the benchmarks on a GPU share: inputs in bf16, uneven experts, and the check that comes before every timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grouped_experts.ops.families import choose_family

DEVICE = "cuda"
DTYPE = "bfloat16"
COUNTS = "uneven (+-30 %)"

Shape = dict[str, int]

ROUTED_SHAPES: tuple[Shape, ...] = (
    {"T": 24576, "H": 1536, "I": 256, "E": 128, "top_k": 8},
    {"T": 32768, "H": 4096, "I": 1024, "E": 64, "top_k": 4},
    {"T": 32768, "H": 2048, "I": 768, "E": 128, "top_k": 8},
    {"T": 32768, "H": 2048, "I": 1024, "E": 64, "top_k": 8},
)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def uneven_ends(rows: int, experts: int) -> Tensor:
    """Running sum of random counts that differ by about 30 % and sum to `rows`, int32, on the GPU."""
    share = _uneven_shares(experts)
    return (share.cumsum(0) / share.sum() * rows).round().to(torch.int32).to(DEVICE)


def uneven_choices(tokens: int, experts: int, top_k: int) -> Tensor:
    """k distinct experts for every token, (T, k) int64, on the GPU; how often each is chosen differs by about 30 %.

    Top-k of log share + Gumbel noise: draws without replacement in proportion to the shares.
    """
    noise = -torch.empty(tokens, experts, device=DEVICE).exponential_().log()
    return (_uneven_shares(experts).to(DEVICE).log() + noise).topk(top_k).indices


def _uneven_shares(experts: int) -> Tensor:
    return 1 + 0.3 * (2 * torch.rand(experts) - 1)


def path() -> str:
    return choose_family(torch.device(DEVICE), {torch.bfloat16})


def check(op: str, ours: Sequence[Tensor], wanted: Sequence[Tensor], limit: float) -> None:
    """Raise AssertionError if |ours - wanted| / |wanted|, in norms over a whole tensor, is beyond the limit."""
    for position, (mine, theirs) in enumerate(zip(ours, wanted, strict=True)):
        assert mine.shape == theirs.shape, f"{op}: output {position} is {mine.shape}, not {theirs.shape}"
        error = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        assert error <= limit, f"{op}: output {position} is off by {error:.1e}"
