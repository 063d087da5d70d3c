"""FP8 numbers in kernels, and their scales.

Triton's interpreter rounds to FP8 wrongly: there kernels see their bits, uint8, and make and read them themselves. On a
GPU they come with sm_89; below, the families send FP8 to the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def is_native(data: Tensor) -> bool:
    return data.device.type == "cuda"


def fp8_or_bits(data: Tensor) -> Tensor:
    """What a kernel gets of FP8 data."""
    return data if is_native(data) else data.view(torch.uint8)


@triton.jit
def absolute(x):
    """|x|, with NaN as infinity, which `tl.max` keeps."""
    return tl.where(x != x, float("inf"), tl.abs(x))


@triton.jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(largest, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Of a block whose largest |number| that is."""
    scale = tl.div_rn(largest, 57344.0 if E5M2 else 448.0)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(scale, 1.1754943508222875e-38)  # 2^-126


@triton.jit
def reciprocal(scale):
    return tl.div_rn(1.0, scale)


@triton.jit
def to_fp8(v, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """The nearest FP8 number, ties to even, or its bits; |v| is at most the largest one's, give or take a rounding."""
    if NATIVE:
        return v.to(tl.float8e5 if E5M2 else tl.float8e4nv)
    else:
        BIAS: tl.constexpr = 15 if E5M2 else 7
        SHIFT: tl.constexpr = 21 if E5M2 else 20  # bits of fp32's mantissa that are dropped
        bits = v.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT
        normal -= (127 - BIAS) << (23 - SHIFT)
        # Below the normal numbers: added to a number whose last bit is worth the smallest one, it is rounded to that.
        ONE: tl.constexpr = 128.0 if E5M2 else 16384.0
        sum_bits = (magnitude.to(tl.float32, bitcast=True) + ONE).to(tl.int32, bitcast=True)
        subnormal = sum_bits - tl.full(v.shape, ONE, tl.float32).to(tl.int32, bitcast=True)
        code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_fp8(data, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """What a product takes: bits as fp16, which holds all of these numbers."""
    if NATIVE:
        return data
    elif E5M2:
        return (data.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    else:
        bits = data.to(tl.int16)
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
