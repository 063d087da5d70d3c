"""The activation between fc1 and fc2, scaled by the router prob: forward and backward on their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grouped_experts.activations import Activation, get_activation
from grouped_experts.ops import reference
from grouped_experts.ops.checks import check_float, check_matrix, check_row_vector, check_rows, check_shape
from grouped_experts.ops.families import by_family
from grouped_experts.registration import define_gradient, define_op, refuse_gradient
from grouped_experts.rows import RowRanges


def scaled_activation(
    h: Tensor, probs: Tensor | None = None, rows: RowRanges | None = None, *, activation: str = "swiglu"
) -> Tensor:
    """a[r] = p[r] * act(h[r]), elementwise in fp32 (fp64 for fp64), rounded once.

    h (T, 2I) = [gate | up], or (T, I) for an activation without a gate, in bf16 | fp16 | fp32 | fp64.
    probs (T,) in any floating dtype, ones if not given.
    rows: with it, rows of no expert are zero and h is not read there.
    activation: "swiglu", "geglu", "clamped_swiglu" or "squared_relu" (`grouped_experts.activations`).

    Returns a (T, I) in the dtype of h. Differentiable in h and probs.
    Raises ValueError for a shape, device or unknown activation, TypeError for a dtype that does not fit.
    """
    check_h(h, get_activation(activation), probs, rows)
    return scaled_activation_op(h, probs, *_starts_ends(rows), activation)


def scaled_activation_backward(
    da: Tensor,
    h: Tensor,
    probs: Tensor | None = None,
    rows: RowRanges | None = None,
    *,
    activation: str = "swiglu",
) -> tuple[Tensor, Tensor, Tensor]:
    """dh = act'(h) (p * da), a = p * act(h), dprobs[r] = sum_j da[r, j] act(h[r])_j.

    da (T, I) in the dtype of h; the rest as in `scaled_activation`, whose a is recomputed here bit for bit.
    Returns dh (the shape of h), a (T, I), both in the dtype of h, and dprobs (T,) in fp32 (fp64 for fp64), summed in a
    fixed order; zero in rows of no expert. Not differentiable. Raises as `scaled_activation` does.
    """
    act = get_activation(activation)
    check_h(h, act, probs, rows)
    check_matrix("da", da, (h.shape[0], h.shape[1] // act.width(1)), "(T, I)", like=h)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (da, h, probs)):
        raise ValueError(
            "scaled_activation_backward: wanted tensors without requires_grad (or torch.no_grad()), got one with it"
        )
    return scaled_activation_backward_op(da, h, probs, *_starts_ends(rows), activation)


def check_h(h: Tensor, act: Activation, probs: Tensor | None, rows: RowRanges | None) -> None:
    check_float("h", h)
    check_shape("h", h, (None, None), "(T, 2I)" if act.gated else "(T, I)")
    if act.gated and h.shape[1] % 2:
        raise ValueError(f"h: wanted an even number of columns, [gate | up], got {h.shape[1]}")
    if probs is not None:
        check_row_vector("probs", probs, h.shape[0], like=h)
    if rows is not None:
        check_rows(rows, None, like=h)


def _starts_ends(rows: RowRanges | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if rows is None else (rows.starts, rows.ends)


def _fake(h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str) -> Tensor:
    return h.new_empty(h.shape[0], h.shape[1] // get_activation(activation).width(1))


def _fake_backward(
    da: Tensor, h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    dprobs = h.new_empty(h.shape[0], dtype=reference.accumulation_dtype(h.dtype))
    return h.new_empty(h.shape), da.new_empty(da.shape), dprobs


scaled_activation_op = define_op(
    "scaled_activation(Tensor h, Tensor? probs, Tensor? starts, Tensor? ends, str activation) -> Tensor",
    implementation=by_family("scaled_activation"),
    fake=_fake,
)
scaled_activation_backward_op = define_op(
    "scaled_activation_backward(Tensor da, Tensor h, Tensor? probs, Tensor? starts, Tensor? ends, str activation)"
    " -> (Tensor, Tensor, Tensor)",
    implementation=by_family("scaled_activation_backward"),
    fake=_fake_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, probs, starts, ends, ctx.activation = inputs
    ctx.save_for_backward(h, probs, starts, ends)


def _backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
    h, probs, starts, ends = ctx.saved_tensors
    dh, _, dprobs = scaled_activation_backward_op(da, h, probs, starts, ends, ctx.activation)
    return dh, None if probs is None else dprobs.to(probs.dtype), None, None, None


define_gradient(scaled_activation_op, _backward, _save)
refuse_gradient(scaled_activation_backward_op)
