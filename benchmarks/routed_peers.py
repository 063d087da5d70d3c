"""Routed layers of other packages behind one signature; each is there, or says why it is not.

run(x, top_k_ids, top_k_probs, fc1_weight, fc2_weight) -> y (T, H): x (T, H), top_k_ids (T, k) int64 as topk has them,
top_k_probs (T, k) fp32, fc1_weight (E, 2I, H) with the gate first, fc2_weight (E, H, I). What a package wants otherwise
is made inside of the call, as its own modules make it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.peers import routed_composite

RoutedExperts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
PACKAGES = ("torch", "triton", "liger-kernel", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "transformers")


class Peer(NamedTuple):
    """run, or why there is none."""

    run: RoutedExperts | None
    missing: str = ""


def composite() -> Peer:
    def run(x: Tensor, ids: Tensor, probs: Tensor, fc1_weight: Tensor, fc2_weight: Tensor) -> Tensor:
        return routed_composite(x, fc1_weight, fc2_weight, ids, probs)

    return Peer(run)


def liger() -> Peer:
    """Liger's Triton kernels, which tune themselves for every (H, I). Ids of int32, the weights as they are."""

    def load() -> RoutedExperts:
        function = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

        def run(x: Tensor, ids: Tensor, probs: Tensor, fc1_weight: Tensor, fc2_weight: Tensor) -> Tensor:
            return function.apply(x, fc1_weight, fc2_weight, ids.int(), probs)

        return run

    return _loaded(load)


def sonic_moe() -> Peer:
    """SonicMoE's function for given ids: weights as (2I, H, E) and (H, I, E) views, a token and an expert per slot."""

    def load() -> RoutedExperts:
        layer = import_module("sonicmoe.functional").moe_general_routing_inputs
        swiglu = import_module("sonicmoe.enums").ActivationType.SWIGLU

        def run(x: Tensor, ids: Tensor, probs: Tensor, fc1_weight: Tensor, fc2_weight: Tensor) -> Tensor:
            tokens = torch.arange(x.shape[0], dtype=torch.int32, device=x.device).repeat_interleave(ids.shape[1])
            y, _ = layer(
                x,
                probs.reshape(-1),
                tokens,
                ids.reshape(-1).int(),
                fc1_weight.permute(1, 2, 0),
                None,
                fc2_weight.permute(1, 2, 0),
                None,
                E=fc1_weight.shape[0],
                stream_id=None,
                activation_type=swiglu,
                is_inference_mode_enabled=not torch.is_grad_enabled(),
                concat_layout=True,
            )
            return y

        return run

    return _loaded(load)


PEERS: dict[str, Callable[[], Peer]] = {
    "F.grouped_mm composite": composite,
    "Liger fused MoE": liger,
    "SonicMoE": sonic_moe,
}
TUNE_THEMSELVES = ("Liger fused MoE", "SonicMoE")  # for every shape anew, which takes minutes


def transformers_experts() -> dict[str, Peer]:
    """Qwen3MoeExperts by its own loop ("eager") and by each function that transformers registers for it."""
    try:
        names = ["eager", *import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS]
    except Exception as error:
        return {"transformers": Peer(None, _why_not_there(error))}
    return {f"transformers {name}": _loaded(partial(_qwen3_experts, name)) for name in names}


def _qwen3_experts(implementation: str) -> RoutedExperts:
    config_class = import_module("transformers").Qwen3MoeConfig
    experts_class = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe").Qwen3MoeExperts

    @cache
    def module(experts: int, hidden: int, inner: int) -> Any:
        config = config_class(hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts)
        config._experts_implementation = implementation
        with torch.device("meta"):
            made = experts_class(config)
        del made.gate_up_proj, made.down_proj  # plain tensors take their places
        return made

    def run(x: Tensor, ids: Tensor, probs: Tensor, fc1_weight: Tensor, fc2_weight: Tensor) -> Tensor:
        made = module(*fc2_weight.shape)
        made.gate_up_proj, made.down_proj = fc1_weight, fc2_weight
        return made(x, ids, probs)

    return run


def present(peers: dict[str, Peer]) -> tuple[dict[str, RoutedExperts], dict[str, str]]:
    """Those that can run, and why the others cannot."""
    runs = {name: peer.run for name, peer in peers.items() if peer.run is not None}
    return runs, {name: peer.missing for name, peer in peers.items() if peer.run is None}


def reason(error: Exception) -> str:
    """Its type and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _loaded(load: Callable[[], RoutedExperts]) -> Peer:
    try:
        return Peer(load())
    except Exception as error:  # a package built for another torch or GPU fails in ways of its own
        return Peer(None, _why_not_there(error))


def _why_not_there(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error}"
    return f"does not import: {reason(error)}"
