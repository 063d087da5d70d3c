"""FP4 weights: the cast to e2m1 with a scale for every 32 numbers, back, and the products with FP8 rows, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.host_ranges import host_ranges
from grouped_experts.ops.reference.products import row_product
from grouped_experts.ops.reference.quantize import dequantize_rows
from grouped_experts.rows import FP4_BLOCK as BLOCK

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the eight e2m1 numbers without a sign
TO_THE_LOWER = (0.25, 1.25, 2.5, 5.0)  # ties between two of them: the one with an even mantissa has it
TO_THE_HIGHER = (0.75, 1.75, 3.5)
SIGN = 8
BIAS = 127
NAN = 255  # what a UE8M0 scale is then


def quantize_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """(E, N, K / 2) and scales (E, N, K / 32) of w (E, N, K), expert by expert: a cast takes room for one in fp32."""
    experts, rows, columns = w.shape
    data = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(experts, rows, columns // BLOCK, dtype=torch.uint8, device=w.device)
    for expert, its_data, its_scales in zip(w.unbind(), data.unbind(), scales.unbind(), strict=True):
        blocks = expert.float().unflatten(1, (columns // BLOCK, BLOCK))
        exponents = _exponents(blocks.abs().amax(2))
        finite = exponents != NAN
        inverse = torch.where(finite, (2 * BIAS - exponents) << 23, 0).view(torch.float32)  # of the scale: exact
        codes = _codes(torch.where(finite[:, :, None], blocks, 0) * inverse[:, :, None]).flatten(1)
        its_data.copy_(codes[:, ::2] | codes[:, 1::2] << 4)
        its_scales.copy_(exponents)
    return data, scales


def _exponents(largest: Tensor) -> Tensor:
    """127 + k, int32, of the least k from -126 on with largest <= 6 * 2^k; 255 for one that is not finite."""
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, and 6 = 0.75 * 2^3
    biased = torch.where(largest < 2.0**-124, 1, BIAS + exponent - 3 + (mantissa > 0.75))
    return torch.where(largest.isfinite(), biased, NAN)


def _codes(numbers: Tensor) -> Tensor:
    """The nearest e2m1 number's bits, uint8: a sign, two of exponent, one of mantissa."""
    magnitude = numbers.abs()
    code = torch.where(numbers.signbit(), SIGN, 0).byte()
    for tie in TO_THE_LOWER:
        code += magnitude > tie
    for tie in TO_THE_HIGHER:
        code += magnitude >= tie
    return code


def dequantize_fp4(data: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(E, N, K) in fp32 or fp64: number times scale."""
    table = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)], dtype=dtype, device=data.device)
    numbers = table[torch.stack((data & 15, data >> 4), 3).int()].flatten(2)
    return numbers * _powers(scales).to(dtype).repeat_interleave(BLOCK, 2)


def _powers(scales: Tensor) -> Tensor:
    """2^(byte - 127) in fp32, NaN for 255."""
    bits = torch.where(scales == 0, 1 << 22, scales.int() << 23)  # 2^-127 is no normal number
    return torch.where(scales == NAN, torch.nan, bits.view(torch.float32))


def m_grouped_gemm_fp8_fp4(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
) -> Tensor:
    """y[r] = x[r] @ w[e].T for the rows r of expert e; zero for rows of none."""
    x, w = dequantize_rows(x, x_scales), dequantize_fp4(w, w_scales)
    return row_product(x, w.transpose(1, 2), host_ranges(starts, ends, x.shape[0]), torch.float32).to(out_dtype)
