"""Grouped products of FP8 numbers with blockwise scales in Triton.

Every 128 steps of a contraction are a product of their own in the tensor cores, whose sums are short of fp32's bits;
scaled, it is added to an fp32 sum outside of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.ops.portable.fp8 import fp8_or_bits, from_fp8, is_native
from grouped_experts.ops.portable.launch import (
    capability,
    cdiv,
    descriptor,
    kernel,
    next_power_of_2,
    num_processors,
    suits_tma,
)
from grouped_experts.ops.portable.m_grouped import load_weight, tile_position
from grouped_experts.ops.portable.schedule import schedule_of
from grouped_experts.ops.portable.tiles import choose_tile, row_block
from grouped_experts.rows import FP8_BLOCK

NARROW = 64  # columns of a k-grouped tile, of 128 rows: its sum and its product are as much as the registers hold


@triton.jit
def m_grouped_fp8_kernel(
    x_ptr,  # (T, K)
    x_scales_ptr,  # (T, K / 128)
    w,  # (E, N, K), descriptor or pointer
    w_scales_ptr,  # (E, N / 128, K / 128)
    tiles_ptr,  # (1 + tiles, 4) int32
    y_ptr,  # (T, N)
    N,
    K,  # at least 1
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
    W_E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    TMA_W: tl.constexpr,
    UNROLL: tl.constexpr,  # blocks of the contraction that are loaded together
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # at most a scale's
    BLOCK_K: tl.constexpr,  # a scale's
    GROUP_M: tl.constexpr,
    GAPS: tl.constexpr,  # rows of no expert become zero
):
    """Grid (programs,), persistent."""
    num_m = tl.load(tiles_ptr)
    num_n = tl.cdiv(N, BLOCK_N)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        i_m, i_n = tile_position(t, num_m, num_n, GROUP_M)
        tile = tiles_ptr + 4 * (1 + i_m)
        expert = tl.load(tile)
        m = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
        known = m < tl.load(tile + 2)
        n0 = i_n * BLOCK_N
        n = n0 + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_at = x_ptr + m.to(tl.int64)[:, None] * stride_xm + k.to(tl.int64)[None, :] * stride_xk
        x_scale_at = x_scales_ptr + m.to(tl.int64) * stride_xs
        w_scale_at = w_scales_ptr + expert.to(tl.int64) * stride_wse + (n0 // BLOCK_K).to(tl.int64) * stride_wsn
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        x_scale_next = tl.load(x_scale_at, mask=known, other=0.0)
        w_scale_next = tl.load(w_scale_at)
        for i in tl.range(0, tl.cdiv(K, BLOCK_K), loop_unroll_factor=UNROLL):
            inside = i * BLOCK_K + k < K
            step = tl.cast(i, tl.int64)
            x = tl.load(x_at + step * BLOCK_K * stride_xk, mask=known[:, None] & inside[None, :], other=0.0)
            weight = load_weight(
                w, expert, n0, N, i * BLOCK_K, K, stride_we, stride_wn, stride_wk, TMA_W, True, BLOCK_N, BLOCK_K
            )  # fmt: skip
            # Those of the next block are on their way while this one is multiplied: Triton does not see to that.
            x_scale, w_scale = x_scale_next, w_scale_next
            following = tl.minimum(step + 1, (K - 1) // BLOCK_K)
            x_scale_next = tl.load(x_scale_at + following * stride_xsk, mask=known, other=0.0)
            w_scale_next = tl.load(w_scale_at + following * stride_wsk)
            product = tl.dot(from_fp8(x, X_E5M2, NATIVE), from_fp8(weight, W_E5M2, NATIVE))
            acc += product * x_scale[:, None] * w_scale  # one by one: their product could be too small for fp32
        y = acc.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y, mask=known[:, None] & (n < N)[None, :])
    if GAPS:
        clear_gaps(y_ptr, tiles_ptr, N, BLOCK_M)


@triton.jit
def clear_gaps(y_ptr, tiles_ptr, N, BLOCK_M: tl.constexpr):
    """y (T, N) = 0 in rows of no expert, by all programs, some columns of a tile of the schedule at a time."""
    WIDTH: tl.constexpr = 8192 // BLOCK_M
    num_owned = tl.load(tiles_ptr)
    num_gaps = tl.load(tiles_ptr + 1) - num_owned
    num_n = tl.cdiv(N, WIDTH)
    for t in tl.range(tl.program_id(0), num_gaps * num_n, tl.num_programs(0)):
        tile = tiles_ptr + 4 * (1 + num_owned + t // num_n)
        m = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
        n = t % num_n * WIDTH + tl.arange(0, WIDTH)
        inside = (m < tl.load(tile + 2))[:, None] & (n < N)[None, :]
        zeros = tl.zeros((BLOCK_M, WIDTH), y_ptr.dtype.element_ty)
        tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], zeros, mask=inside)


@triton.jit
def k_grouped_fp8_kernel(
    a_ptr,  # (M, P)
    a_scales_ptr,  # (M, P / 128)
    b_ptr,  # (N, P)
    b_scales_ptr,  # (N, P / 128)
    starts_ptr,  # (E,)
    ends_ptr,  # (E,)
    c_ptr,  # (E, M, N)
    num_experts,
    num_blocks,  # P / 128
    M,
    N,
    stride_am,
    stride_ap,
    stride_as,
    stride_asp,
    stride_bn,
    stride_bp,
    stride_bs,
    stride_bsp,
    stride_ce,
    stride_cm,
    stride_cn,
    ACCUMULATE: tl.constexpr,
    EXPERTS: tl.constexpr,  # at least E
    A_E5M2: tl.constexpr,
    B_E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a scale's
):
    """Grid (tiles of c, E)."""
    expert = tl.program_id(1)
    num_n = tl.cdiv(N, BLOCK_N)
    m = tl.program_id(0) // num_n * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first, behind = expert_blocks(starts_ptr, ends_ptr, expert, num_experts, BLOCK_K, EXPERTS)
    a_at = a_ptr + m.to(tl.int64)[:, None] * stride_am + k.to(tl.int64)[None, :] * stride_ap
    b_at = b_ptr + n.to(tl.int64)[None, :] * stride_bn + k.to(tl.int64)[:, None] * stride_bp
    a_scale_at = a_scales_ptr + m.to(tl.int64) * stride_as
    b_scale_at = b_scales_ptr + n.to(tl.int64) * stride_bs
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(first, tl.minimum(behind, num_blocks)):
        i = tl.cast(block, tl.int64)
        a = tl.load(a_at + i * BLOCK_K * stride_ap, mask=(m < M)[:, None], other=0.0)
        b = tl.load(b_at + i * BLOCK_K * stride_bp, mask=(n < N)[None, :], other=0.0)
        a_scale = tl.load(a_scale_at + i * stride_asp, mask=m < M, other=0.0)
        b_scale = tl.load(b_scale_at + i * stride_bsp, mask=n < N, other=0.0)
        product = tl.dot(from_fp8(a, A_E5M2, NATIVE), from_fp8(b, B_E5M2, NATIVE))
        acc += product * a_scale[:, None] * b_scale[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    to = c_ptr + expert.to(tl.int64) * stride_ce
    to += m.to(tl.int64)[:, None] * stride_cm + n.to(tl.int64)[None, :] * stride_cn
    if ACCUMULATE:
        acc += tl.load(to, mask=inside, other=0.0)
    tl.store(to, acc.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def expert_blocks(starts_ptr, ends_ptr, expert, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """The first of its padded blocks, and the one behind the last."""
    e = tl.arange(0, EXPERTS)
    start = tl.load(starts_ptr + e, mask=e < num_experts, other=0)
    end = tl.load(ends_ptr + e, mask=e < num_experts, other=0)
    blocks = tl.cdiv(tl.maximum(end - start, 0), BLOCK)
    first = tl.sum(tl.where(e < expert, blocks, 0))
    return first, first + tl.sum(tl.where(e == expert, blocks, 0))


def m_grouped_gemm_fp8(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
    gaps: bool = True,
) -> Tensor:
    """gaps: whether rows of no expert become zero; else they are undefined."""
    (num_rows, depth), (experts, columns) = x.shape, w.shape[:2]
    y = x.new_empty(num_rows, columns, dtype=out_dtype)
    if not depth:
        return y.zero_()
    tiles = schedule_of(tiles, starts, ends, num_rows, expected_rows)
    tma_w = is_native(w) and suits_tma(w)
    rows = row_block(num_rows, experts, expected_rows)
    tile = choose_tile("product", x.dtype, capability(x.device), rows, "" if tma_w else "by pointer")
    programs = min(
        tile.per_processor * num_processors(x.device), (tiles.shape[0] - 1) * cdiv(columns, tile.block_n)
    )  # fmt: skip
    if not y.numel() or not programs:
        return y
    kernel(
        m_grouped_fp8_kernel,
        num_warps=tile.warps,
        num_stages=tile.stages,
        X_E5M2=x.dtype == torch.float8_e5m2,
        W_E5M2=w.dtype == torch.float8_e5m2,
        NATIVE=is_native(x),
        TMA_W=tma_w,
        UNROLL=tile.block_k // FP8_BLOCK,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=FP8_BLOCK,
        GROUP_M=tile.group_m,
        GAPS=gaps,
    ).launch(
        (programs,),
        x.device,
        fp8_or_bits(x),
        x_scales,
        descriptor(w, [1, tile.block_n, FP8_BLOCK]) if tma_w else fp8_or_bits(w),
        w_scales,
        tiles,
        y,
        columns,
        depth,
        *x.stride(),
        *x_scales.stride(),
        *w.stride(),
        *w_scales.stride(),
    )
    return y


def k_grouped_gemm_fp8(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, starts: Tensor, ends: Tensor, out_dtype: torch.dtype
) -> Tensor:
    c = a.new_empty(starts.shape[0], a.shape[0], b.shape[0], dtype=out_dtype)
    launch_k_grouped(c, a, a_scales, b, b_scales, starts, ends, accumulate=False)
    return c


def k_grouped_gemm_fp8_accumulate(
    c: Tensor, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, starts: Tensor, ends: Tensor
) -> None:
    launch_k_grouped(c, a, a_scales, b, b_scales, starts, ends, accumulate=True)


def launch_k_grouped(
    c: Tensor,
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    accumulate: bool,
) -> None:
    if not c.numel():
        return
    experts, rows, columns = c.shape
    kernel(
        k_grouped_fp8_kernel,
        num_warps=8,
        ACCUMULATE=accumulate,
        EXPERTS=next_power_of_2(experts),
        A_E5M2=a.dtype == torch.float8_e5m2,
        B_E5M2=b.dtype == torch.float8_e5m2,
        NATIVE=is_native(a),
        BLOCK_M=128,
        BLOCK_N=NARROW,
        BLOCK_K=FP8_BLOCK,
    ).launch(
        (cdiv(rows, 128) * cdiv(columns, NARROW), experts),
        a.device,
        fp8_or_bits(a),
        a_scales,
        fp8_or_bits(b),
        b_scales,
        starts,
        ends,
        c,
        experts,
        a_scales.shape[1],
        rows,
        columns,
        *a.stride(),
        *a_scales.stride(),
        *b.stride(),
        *b_scales.stride(),
        *c.stride(),
    )
