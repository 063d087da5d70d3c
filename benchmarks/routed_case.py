"""Inputs of the routed layer, its runs over them, and the check against fp32 that comes before every timing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_inputs import Shape, check, normal, uneven_choices
from benchmarks.gpu_layers import Step, forward_backward
from benchmarks.peers import routed_loop
from benchmarks.routed_peers import RoutedExperts, reason
from benchmarks.timing import Round

OURS = "ours"
Times = dict[str, list[float]]  # ms of every round, by layer
LIMIT = 3e-2  # of |result - fp32| / |fp32|: everything is rounded to bf16, by some also what they sum


@dataclass(frozen=True)
class Case:
    """T tokens with k distinct experts each; every tensor but ids and dy asks for its gradient."""

    x: Tensor
    ids: Tensor
    probs: Tensor
    fc1_weight: Tensor
    fc2_weight: Tensor
    dy: Tensor

    @classmethod
    def random(cls, shape: Shape) -> Case:
        tokens, hidden, inner, experts, top_k = (shape[name] for name in ("T", "H", "I", "E", "top_k"))
        x, dy = normal(tokens, hidden), normal(tokens, hidden)
        probs = torch.rand(tokens, top_k, device=x.device)
        fc1_weight = normal(experts, 2 * inner, hidden) * hidden**-0.5
        fc2_weight = normal(experts, hidden, inner) * inner**-0.5
        for leaf in (x, probs, fc1_weight, fc2_weight):
            leaf.requires_grad_()
        return cls(x, uneven_choices(tokens, experts, top_k), probs, fc1_weight, fc2_weight, dy)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.probs, self.fc1_weight, self.fc2_weight]

    def forward(self, run: RoutedExperts) -> Callable[[], Tensor]:
        return lambda: run(self.x, self.ids, self.probs, self.fc1_weight, self.fc2_weight)

    def step(self, run: RoutedExperts) -> Step:
        """Forward + backward: y and the gradients of the leaves."""
        return forward_backward(self.forward(run), self.leaves, self.dy)

    def inference(self, run: RoutedExperts) -> Step:
        """Forward alone, of which nothing is kept."""
        forward = self.forward(run)

        def step() -> list[Tensor]:
            with torch.no_grad():
                return [forward()]

        return step

    def exact(self) -> list[Tensor]:
        """What `step` returns, from the same values in fp32."""
        x, probs, fc1_weight, fc2_weight = leaves = [leaf.detach().float().requires_grad_() for leaf in self.leaves]
        y = routed_loop(x, fc1_weight, fc2_weight, self.ids, probs)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy.float())]


def failures(steps: Mapping[str, Step], wanted: Sequence[Tensor]) -> dict[str, str]:
    """Why a step must not be timed: what it raised, or how far it is off. The first run of each tunes and compiles it.

    Raises AssertionError where it is ours.
    """
    failed = {}
    for name, step in steps.items():
        try:
            step()
            check(name, step(), wanted, LIMIT)
        except Exception as error:
            if name == OURS:
                raise
            failed[name] = reason(error)
    return failed


def rounds_beside(times: Times, name: str) -> list[Round]:
    """Ours and one of those that were timed in the same rounds."""
    return [Round(*pair) for pair in zip(times[OURS], times[name], strict=True)]


def label(name: str, waiting: Collection[str]) -> str:
    return f"{name} (waits for the GPU)" if name in waiting else name
