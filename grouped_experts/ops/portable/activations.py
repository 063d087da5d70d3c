"""The activations as Triton functions: value and gradient of `grouped_experts.activations`, on fp32 blocks.

A function without a gate takes the same arguments and ignores `up`. PRECISE: for fp32 data, whose last bits count.
No sum of two products: a compiler may fuse either with the sum, and then the last bit depends on what else is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

ALPHA = tl.constexpr(1.702)  # gpt-oss
LIMIT = tl.constexpr(7.0)


@triton.jit
def sigmoid(x, PRECISE: tl.constexpr):
    """1 / (1 + exp(-x)). The square of a reciprocal root takes less than a division, which minds the range.

    Its error is twice as large.
    """
    if PRECISE:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        root = tl.rsqrt(1.0 + tl.exp(-x))
        return root * root


@triton.jit
def swiglu(gate, up, PRECISE: tl.constexpr):
    return gate * sigmoid(gate, PRECISE) * up  # as in the gradient, so that both share the division


@triton.jit
def swiglu_gradient(ds, gate, up, PRECISE: tl.constexpr):
    s = sigmoid(gate, PRECISE)
    silu = gate * s
    return ds * up * (s * (1.0 + gate * (1.0 - s))), ds * silu


@triton.jit
def gelu_cdf(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def geglu(gate, up, PRECISE: tl.constexpr):
    return gate * gelu_cdf(gate) * up


@triton.jit
def geglu_gradient(ds, gate, up, PRECISE: tl.constexpr):
    cdf = gelu_cdf(gate)
    density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    return ds * up * tl.fma(gate, density, cdf), ds * gate * cdf


@triton.jit
def clamped(gate, up):
    """NaN passes, as it does through torch.clamp."""
    g = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return g, tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamped_swiglu(gate, up, PRECISE: tl.constexpr):
    g, u = clamped(gate, up)
    return g * sigmoid(g * ALPHA, PRECISE) * (u + 1.0)


@triton.jit
def clamped_swiglu_gradient(ds, gate, up, PRECISE: tl.constexpr):
    g, u = clamped(gate, up)
    s = sigmoid(g * ALPHA, PRECISE)
    swish = g * s
    d_gate = ds * (u + 1.0) * tl.fma(swish * ALPHA, 1.0 - s, s)
    d_up = ds * swish
    return tl.where(gate <= LIMIT, d_gate, 0.0), tl.where(tl.abs(up) <= LIMIT, d_up, 0.0)


@triton.jit
def squared_relu(h, up, PRECISE: tl.constexpr):
    positive = tl.where(h < 0.0, 0.0, h)
    return positive * positive


@triton.jit
def squared_relu_gradient(ds, h, up, PRECISE: tl.constexpr):
    d_h = 2.0 * tl.where(h < 0.0, 0.0, h) * ds
    return d_h, d_h


VALUES = {"swiglu": swiglu, "geglu": geglu, "clamped_swiglu": clamped_swiglu, "squared_relu": squared_relu}
GRADIENTS = {
    "swiglu": swiglu_gradient,
    "geglu": geglu_gradient,
    "clamped_swiglu": clamped_swiglu_gradient,
    "squared_relu": squared_relu_gradient,
}
