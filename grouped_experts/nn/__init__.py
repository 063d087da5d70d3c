"""Modules: parameters, initialisation, state, and a short forward."""

from grouped_experts.nn.fp8 import FP8Recipe, QuantizedWeights
from grouped_experts.nn.grouped_mlp import GroupedMLP, backward_dw, check_no_pending_wgrads
from grouped_experts.nn.moe import MoE, MoEOutput
from grouped_experts.nn.routed import routed_experts
from grouped_experts.nn.router import Router, RouterOutput

__all__ = [
    "FP8Recipe",
    "GroupedMLP",
    "MoE",
    "MoEOutput",
    "QuantizedWeights",
    "Router",
    "RouterOutput",
    "backward_dw",
    "check_no_pending_wgrads",
    "routed_experts",
]
