"""The two products of the layer that are fused with the activation: fc1 forward and fc2 dgrad.

What a chain of ops would write and read again stays in the kernel: the forward goes on from h as it stores it, and the
backward from da, which is never rounded.
Neither is differentiable: they are the two halves of `GroupedMLP`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.activations import get_activation
from grouped_experts.ops import reference
from grouped_experts.ops.activation import check_h
from grouped_experts.ops.checks import (
    check_expected_rows,
    check_float,
    check_matrix,
    check_row_index,
    check_row_vector,
    check_rows,
    check_shape,
)
from grouped_experts.ops.families import by_family
from grouped_experts.registration import define_op, refuse_gradient
from grouped_experts.rows import RowRanges, num_rows


def fc1_activation(
    x: Tensor,
    fc1_weight: Tensor,
    rows: RowRanges,
    probs: Tensor | None = None,
    fc1_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    row_index: Tensor | None = None,
    expected_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """h[r] = x[r] @ W1_e.T (+ b1_e), rounded; a[r] = p[r] * act(h[r]), computed in fp32 from the rounded h.

    x (T, H); fc1_weight (E, 2I, H), or (E, I, H) without a gate; fc1_bias (E, 2I), or (E, I): one dtype of bf16 |
    fp16 | fp32 | fp64. probs (T,) in any floating dtype, ones if not given.
    row_index (R,) int32: as in `m_grouped_gemm`, x[row_index[r]] is row r; probs, h and a are of R rows then.
    expected_rows: as there.

    Returns h (T, 2I) or (T, I), and a (T, I), in the dtype of x; both undefined in rows of no expert.
    Raises ValueError for a shape, device or unknown activation, TypeError for a dtype that does not fit.
    """
    act = get_activation(activation)
    check_float("x", x)
    check_shape("x", x, (None, None), "(T, H)")
    legend = "(E, 2I, H)" if act.gated else "(E, I, H)"
    check_matrix("fc1_weight", fc1_weight, (None, None, x.shape[1]), legend, like=x)
    if fc1_weight.shape[1] % act.width(1):
        raise ValueError(f"fc1_weight: wanted an even number of rows, [gate | up], got {fc1_weight.shape[1]}")
    check_rows(rows, fc1_weight.shape[0], like=x)
    if fc1_bias is not None:
        check_matrix("fc1_bias", fc1_bias, tuple(fc1_weight.shape[:2]), "(E, 2I)" if act.gated else "(E, I)", like=x)
    if row_index is not None:
        check_row_index("row_index", row_index, x, rows)
    if probs is not None:
        check_row_vector("probs", probs, num_rows(x, row_index), like=x)
    _refuse_gradients("fc1_activation", x, fc1_weight, fc1_bias, probs)
    expected = check_expected_rows(expected_rows)
    return fc1_activation_op(
        x, fc1_weight, rows.starts, rows.ends, fc1_bias, probs, activation, None, row_index, expected
    )


def fc2_dgrad_activation(
    dy: Tensor,
    fc2_weight: Tensor,
    h: Tensor,
    rows: RowRanges,
    probs: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    row_index: Tensor | None = None,
    expected_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """da = dy W2_e stays in fp32; dh = act'(h) (p * da), a = p * act(h), dprobs[r] = sum_j da_j act(h)_j (+ dy . b2_e).

    On a CPU, da of bf16 and fp16 is rounded once, as PyTorch's products come there (`grouped_experts.ops.reference`).
    dy (T, H), fc2_weight (E, H, I), h (T, 2I), or (T, I) without a gate, fc2_bias (E, H): one dtype. probs (T,) in any
    floating dtype, ones if not given. a is that of `fc1_activation`, bit for bit.
    row_index (R,) int32: as in `m_grouped_gemm`, dy[row_index[r]] is row r; everything else is of R rows then.
    expected_rows: as there.

    Returns dh (the shape of h) and a (T, I) in the dtype of h, both undefined in rows of no expert, and dprobs (T,) in
    fp32 (fp64 for fp64), zero there, summed in a fixed order. Raises as `fc1_activation` does.
    """
    act = get_activation(activation)
    check_float("dy", dy)
    check_shape("dy", dy, (None, None), "(T, H)")
    check_matrix("fc2_weight", fc2_weight, (None, dy.shape[1], None), "(E, H, I)", like=dy)
    check_rows(rows, fc2_weight.shape[0], like=dy)
    width = act.width(fc2_weight.shape[2])
    if row_index is not None:
        check_row_index("row_index", row_index, dy, rows)
    check_matrix("h", h, (num_rows(dy, row_index), width), "(T, 2I)" if act.gated else "(T, I)", like=dy)
    check_h(h, act, probs, rows)
    if fc2_bias is not None:
        check_matrix("fc2_bias", fc2_bias, tuple(fc2_weight.shape[:2]), "(E, H)", like=dy)
    _refuse_gradients("fc2_dgrad_activation", dy, fc2_weight, h, fc2_bias, probs)
    expected = check_expected_rows(expected_rows)
    return fc2_dgrad_activation_op(
        dy, fc2_weight, h, rows.starts, rows.ends, probs, fc2_bias, activation, True, True, None, row_index, expected
    )


def _refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(
            f"{name}: wanted tensors without requires_grad (or torch.no_grad()), got one with it: "
            "gradients are GroupedMLP's business"
        )


def _fake_fc1_activation(
    x: Tensor,
    fc1_weight: Tensor,
    starts: Tensor,
    ends: Tensor,
    fc1_bias: Tensor | None,
    probs: Tensor | None,
    activation: str,
    tiles: Tensor | None = None,
    row_index: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    width = fc1_weight.shape[1]
    h = x.new_empty(num_rows(x, row_index), width)
    return h, x.new_empty(h.shape[0], width // get_activation(activation).width(1))


def _fake_fc2_dgrad_activation(
    dy: Tensor,
    fc2_weight: Tensor,
    h: Tensor,
    starts: Tensor,
    ends: Tensor,
    probs: Tensor | None,
    fc2_bias: Tensor | None,
    activation: str,
    need_a: bool,
    need_dprobs: bool,
    tiles: Tensor | None = None,
    row_index: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    a = h.new_empty(h.shape[0] if need_a else 0, fc2_weight.shape[2])
    dprobs = h.new_empty(h.shape[0] if need_dprobs else 0, dtype=reference.accumulation_dtype(h.dtype))
    return h.new_empty(h.shape), a, dprobs


fc1_activation_op = define_op(
    "fc1_activation(Tensor x, Tensor fc1_weight, Tensor starts, Tensor ends, Tensor? fc1_bias, Tensor? probs,"
    " str activation, Tensor? tiles=None, Tensor? row_index=None, SymInt expected_rows=0) -> (Tensor, Tensor)",
    implementation=by_family("fc1_activation"),
    fake=_fake_fc1_activation,
)
fc2_dgrad_activation_op = define_op(
    "fc2_dgrad_activation(Tensor dy, Tensor fc2_weight, Tensor h, Tensor starts, Tensor ends, Tensor? probs,"
    " Tensor? fc2_bias, str activation, bool need_a, bool need_dprobs, Tensor? tiles=None, Tensor? row_index=None,"
    " SymInt expected_rows=0) -> (Tensor, Tensor, Tensor)",
    implementation=by_family("fc2_dgrad_activation"),
    fake=_fake_fc2_dgrad_activation,
)
refuse_gradient(fc1_activation_op)
refuse_gradient(fc2_dgrad_activation_op)
