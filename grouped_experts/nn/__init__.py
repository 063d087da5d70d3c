"""Modules: parameters, initialisation, state, and a short forward."""

from grouped_experts.nn.grouped_mlp import GroupedMLP, backward_dw, check_no_pending_wgrads

__all__ = ["GroupedMLP", "backward_dw", "check_no_pending_wgrads"]
