"""Grouped products of FP8 rows with FP4 weights in Triton: weights become bf16 in registers, which holds them exactly.

Every 128 steps of a contraction are a product of their own; times the rows' scales, it is added to an fp32 sum. The
scales of a weight are in its numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.ops.portable.fp8 import fp8_or_bits, from_fp8, is_native
from grouped_experts.ops.portable.launch import cdiv, kernel, num_processors
from grouped_experts.ops.portable.m_grouped import tile_position
from grouped_experts.ops.portable.products_fp8 import clear_gaps
from grouped_experts.ops.portable.schedule import schedule_of
from grouped_experts.ops.portable.tiles import row_block
from grouped_experts.rows import FP4_BLOCK, FP8_BLOCK

COLUMNS = {16: 128, 32: 128, 64: 64, 128: 64}  # of a tile, by its rows: a sum and a product are what registers hold
WARPS = {16: 4, 32: 8, 64: 4, 128: 8}


@triton.jit
def m_grouped_fp8_fp4_kernel(
    x_ptr,  # (T, K)
    x_scales_ptr,  # (T, K / 128)
    w_ptr,  # (E, N, K / 2)
    w_scales_ptr,  # (E, N, K / 32)
    tiles_ptr,  # (1 + tiles, 4) int32
    y_ptr,  # (T, N)
    N,
    HALF,  # K / 2, at least 1
    stride_xm,
    stride_xk,
    stride_xs,
    stride_xsk,
    stride_we,
    stride_wn,
    stride_wk,
    stride_wse,
    stride_wsn,
    stride_wsk,
    X_E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of a scale of x
    FEW: tl.constexpr,  # of a scale of w
    GROUP_M: tl.constexpr,
):
    """Grid (programs,), persistent."""
    num_m = tl.load(tiles_ptr)
    num_n = tl.cdiv(N, BLOCK_N)
    K = 2 * HALF
    BYTES: tl.constexpr = BLOCK_K // 2
    SCALES: tl.constexpr = BLOCK_K // FEW
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        i_m, i_n = tile_position(t, num_m, num_n, GROUP_M)
        tile = tiles_ptr + 4 * (1 + i_m)
        expert = tl.load(tile).to(tl.int64)
        m = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
        n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        byte = tl.arange(0, BYTES)
        s = tl.arange(0, SCALES)
        known, exists = m < tl.load(tile + 2), n < N
        x_at = x_ptr + m.to(tl.int64)[:, None] * stride_xm + k.to(tl.int64)[None, :] * stride_xk
        x_scale_at = x_scales_ptr + m.to(tl.int64) * stride_xs
        w_at = w_ptr + expert * stride_we + n.to(tl.int64)[:, None] * stride_wn + byte.to(tl.int64)[None, :] * stride_wk
        w_scale_at = w_scales_ptr + expert * stride_wse
        w_scale_at += n.to(tl.int64)[:, None] * stride_wsn + s.to(tl.int64)[None, :] * stride_wsk
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # Scales of a block are on their way while the one before is multiplied: Triton does not see to that.
        x_scale_next = tl.load(x_scale_at, mask=known, other=0.0)
        w_scale_next = tl.load(w_scale_at, mask=exists[:, None] & (s * FEW < K)[None, :], other=0)
        for i in range(0, tl.cdiv(K, BLOCK_K)):
            step = tl.cast(i, tl.int64)
            x_inside, w_inside = i * BLOCK_K + k < K, i * BYTES + byte < HALF
            x = tl.load(x_at + step * BLOCK_K * stride_xk, mask=known[:, None] & x_inside[None, :], other=0.0)
            w = tl.load(w_at + step * BYTES * stride_wk, mask=exists[:, None] & w_inside[None, :], other=0)
            x_scale, w_scale = x_scale_next, w_scale_next
            following = tl.minimum(step + 1, (K - 1) // BLOCK_K)
            x_scale_next = tl.load(x_scale_at + following * stride_xsk, mask=known, other=0.0)
            s_inside = (following * SCALES + s) * FEW < K
            w_scale_next = tl.load(
                w_scale_at + following * SCALES * stride_wsk, mask=exists[:, None] & s_inside[None, :], other=0
            )
            weight = from_fp4(w, NATIVE).reshape(BLOCK_N, SCALES, FEW) * from_ue8m0(w_scale, NATIVE)[:, :, None]
            product = tl.dot(widened(x, X_E5M2, NATIVE), weight.reshape(BLOCK_N, BLOCK_K).T)
            acc += product * x_scale[:, None]
        y = acc.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y, mask=known[:, None] & exists[None, :])
    clear_gaps(y_ptr, tiles_ptr, N, BLOCK_M)


@triton.jit
def widened(data, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """FP8 numbers in the dtype of the product: bf16, or fp32 where the interpreter's dot is wrong in bf16.

    By way of fp16, whose infinities and NaN are theirs: straight from e5m2 Triton makes numbers of them.
    """
    return from_fp8(data, E5M2, NATIVE).to(tl.float16).to(tl.bfloat16 if NATIVE else tl.float32)


@triton.jit
def from_fp4(packed, NATIVE: tl.constexpr):
    """The e2m1 numbers (R, 2 B) of bytes (R, B), in the dtype of the product."""
    # The exponent's lowest bits and the mantissa's highest: the number times 2^-126, as a subnormal one has no exponent
    # here or there.
    if NATIVE:
        bits = packed.to(tl.int16)
        low, high = ((bits & 8) << 12) | ((bits & 7) << 6), ((bits & 128) << 8) | ((bits & 112) << 2)
        number = tl.join(low, high).to(tl.bfloat16, bitcast=True)
    else:
        bits = packed.to(tl.int32)
        low, high = ((bits & 8) << 28) | ((bits & 7) << 22), ((bits & 128) << 24) | ((bits & 112) << 18)
        number = tl.join(low, high).to(tl.float32, bitcast=True)
    number = number.reshape(packed.shape[0], 2 * packed.shape[1])
    return number * tl.full((), 8.507059173023462e37, number.dtype)  # 2^126


@triton.jit
def from_ue8m0(byte, NATIVE: tl.constexpr):
    """2^(byte - 127), NaN for 255, in the dtype of the product; 2^-127 is a subnormal number there."""
    MANTISSA: tl.constexpr = 7 if NATIVE else 23
    bits = byte.to(tl.int16 if NATIVE else tl.int32)
    bits = tl.where(bits == 0, 1 << (MANTISSA - 1), tl.where(bits == 255, 511 << (MANTISSA - 1), bits << MANTISSA))
    return bits.to(tl.int16 if NATIVE else tl.int32).to(tl.bfloat16 if NATIVE else tl.float32, bitcast=True)


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
    num_rows, (experts, columns, half) = x.shape[0], w.shape
    y = x.new_empty(num_rows, columns, dtype=out_dtype)
    if not half:
        return y.zero_()
    tiles = schedule_of(tiles, starts, ends, num_rows, expected_rows)
    block_m = row_block(num_rows, experts, expected_rows)
    block_n = COLUMNS[block_m]
    programs = min(2 * num_processors(x.device), (tiles.shape[0] - 1) * cdiv(columns, block_n))
    if not y.numel() or not programs:
        return y
    kernel(
        m_grouped_fp8_fp4_kernel,
        num_warps=WARPS[block_m],
        X_E5M2=x.dtype == torch.float8_e5m2,
        NATIVE=is_native(x),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=FP8_BLOCK,
        FEW=FP4_BLOCK,
        GROUP_M=4,
    ).launch(
        (programs,),
        x.device,
        fp8_or_bits(x),
        x_scales,
        w,
        w_scales,
        tiles,
        y,
        columns,
        half,
        *x.stride(),
        *x_scales.stride(),
        *w.stride(),
        *w_scales.stride(),
    )
    return y
