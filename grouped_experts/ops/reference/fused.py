"""The two products of the layer that are fused with the activation."""

from __future__ import annotations

from torch import Tensor

from grouped_experts.activations import get_activation
from grouped_experts.ops.host_ranges import host_ranges
from grouped_experts.ops.reference.activation import scaled_activation_backward_into, scaled_activation_into
from grouped_experts.ops.reference.products import accumulation_dtype, gather_rows, m_grouped_gemm, row_product


def fc1_activation(
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
    """h = x W1_e^T + b1_e, rounded; a = p * act(h) of the rounded h. Both undefined in rows of no expert."""
    act = get_activation(activation)
    h = m_grouped_gemm(x, fc1_weight, starts, ends, fc1_bias, None, True, row_index=row_index)
    ranges = host_ranges(starts, ends, h.shape[0])
    a = h.new_empty(h.shape[0], h.shape[1] // 2 if act.gated else h.shape[1])
    scaled_activation_into(a, h, probs, act, ranges.owned)
    return h, a


def fc2_dgrad_activation(
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
    """da = dy W2_e; dh = act'(h) (p * da), a = p * act(h), dprobs = sum_j da_j act(h)_j + dy . b2_e.

    dh and a are undefined in rows of no expert, dprobs (fp32) is zero there. What is not needed comes back empty.
    The kernels keep da in fp32. Here it is rounded once to the dtype of dy, as PyTorch's CPU products come: those of
    bf16 and fp16 have no fp32 output, and widening the operands instead costs about a tenth of the layer's time.
    """
    dy = gather_rows(dy, row_index)
    ranges = host_ranges(starts, ends, dy.shape[0])
    dtype = accumulation_dtype(dy.dtype)
    da = row_product(dy, fc2_weight, ranges, dy.dtype)
    dh = h.new_empty(h.shape)
    a = h.new_empty(da.shape if need_a else (0, da.shape[1]))
    dprobs = h.new_empty(h.shape[0] if need_dprobs else 0, dtype=dtype)
    scaled_activation_backward_into(
        dh,
        a if need_a else None,
        dprobs if need_dprobs else None,
        da,
        h,
        probs,
        get_activation(activation),
        ranges.owned,
    )
    if need_dprobs:
        ranges.zero_gaps(dprobs)
        if fc2_bias is not None:
            rows = zip(ranges.cut(dy), ranges.cut(dprobs), fc2_bias.to(dtype).unbind(), strict=True)
            for dy_rows, dp_rows, bias in rows:
                dp_rows += dy_rows.to(dtype) @ bias
    return dh, a, dprobs
