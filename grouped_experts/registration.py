"""How an op of this package is made known to PyTorch: one `torch.library` namespace, one call per op."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

# `Library.define/impl` costs about 3 us a call where the `custom_op` decorator costs 10 (measured on a CPU).
_library = torch.library.Library("grouped_experts", "DEF")


def define_op(
    schema: str, *, implementation: Callable[..., Any], fake: Callable[..., Any], factory: bool = False
) -> Callable[..., Any]:
    """Register `grouped_experts::<schema>` and return its overload.

    implementation runs on every backend that has none of its own; fake computes output shapes and dtypes only.
    factory marks an op without tensor inputs, which the dispatcher cannot place by its arguments.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    key = "BackendSelect" if factory else "CompositeExplicitAutograd"
    _library.impl(name, _outside_autocast(implementation), key)
    torch.library.register_fake(f"grouped_experts::{name}", fake, lib=_library)
    return getattr(torch.ops.grouped_experts, name).default


def implement_op(name: str, implementation: Callable[..., Any], key: str) -> None:
    """Give an op that is already defined an implementation of its own for one dispatch key, such as "CUDA"."""
    _library.impl(name, _outside_autocast(implementation), key)


def define_gradient(op: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Give `op` a gradient formula."""
    torch.library.register_autograd(op, backward, setup_context=setup_context, lib=_library)  # type: ignore[arg-type]


def refuse_gradient(op: Callable[..., Any]) -> None:
    """Let nothing differentiate `op`: its outputs carry the graph on, and a backward through them raises.

    Without a formula of its own, autograd would record what the implementation does inside, or drop the gradient.
    """

    def backward(ctx: Any, *gradients: Any) -> None:
        raise RuntimeError(f"{op}: not differentiable: no gradient goes through it")

    define_gradient(op, backward, lambda ctx, inputs, output: None)


def below_autograd() -> AbstractContextManager[None]:
    """Ops called inside go straight to their implementations: for code that brings the gradient itself.

    Each call would pass through Python for its own gradient formula first, to find that none is wanted: about 10 us.
    """
    return contextlib.nullcontext() if torch.compiler.is_compiling() else torch._C._AutoDispatchBelowAutograd()


def _outside_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """An op computes in the dtype of its inputs: autocast decides before the op, not inside it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return call
