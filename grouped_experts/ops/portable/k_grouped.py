"""k-grouped GEMM in Triton: one persistent kernel over the tiles of every expert's weight, contracting its rows."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.ops.portable.launch import (
    Kernel,
    capability,
    cdiv,
    descriptor,
    dot_precision,
    kernel,
    num_processors,
    suits_tma,
)
from grouped_experts.ops.portable.m_grouped import add_product, halves, source_rows, tile_position
from grouped_experts.ops.portable.schedule import load_range
from grouped_experts.ops.portable.tiles import Tile, choose_tile, contraction, row_block
from grouped_experts.rows import num_rows


@triton.jit
def load_block(
    x, index_ptr, num_source, t0, end, n0, N, stride_t, stride_n, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Rows t0 : end, columns n0.., zero behind both: a product with what lies there must not even be 0 * NaN.

    index_ptr: which rows of x they are (`source_rows`), or None.
    """
    t = t0 + tl.arange(0, BLOCK_T)
    n = n0 + tl.arange(0, BLOCK_N)
    source = source_rows(index_ptr, t, end, num_source)
    at = x + source[:, None].to(tl.int64) * stride_t + n[None, :].to(tl.int64) * stride_n
    return tl.load(at, mask=(t < end)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def k_grouped_kernel(
    a_desc,  # (T, M) descriptor, or the pointer again
    b_desc,  # (T, N)
    c_desc,  # (E * M, N), M a multiple of BLOCK_M, or None
    a_ptr,
    b_ptr,
    c_ptr,  # (E, M, N)
    a_index_ptr,  # (R,) int32: rows of a, or None
    b_index_ptr,
    starts_ptr,  # (E,)
    ends_ptr,  # (E,)
    num_rows,  # that are contracted
    rows_of_a,
    rows_of_b,
    num_experts,
    M,
    N,
    stride_at,
    stride_am,
    stride_bt,
    stride_bn,
    stride_ce,
    stride_cm,
    stride_cn,
    ACCUMULATE: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    TMA_C: tl.constexpr,
    HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Grid (programs,), persistent. c[e] = a[r].T @ b[r], or c[e] += with ACCUMULATE; zero for no rows."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_experts * num_m * num_n, tl.num_programs(0)):
        e = tile // (num_m * num_n)
        i_m, i_n = tile_position(tile % (num_m * num_n), num_m, num_n, GROUP_M)
        m0 = i_m * BLOCK_M
        n0 = i_n * BLOCK_N
        start, end = load_range(starts_ptr, ends_ptr, e, num_rows, num_experts)
        full = (end - start) // BLOCK_T
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(0, full):
            t0 = start + i * BLOCK_T
            if TMA_A:
                a = a_desc.load([t0, m0])
            else:
                a = load_block(
                    a_ptr, a_index_ptr, rows_of_a, t0, end, m0, M, stride_at, stride_am, BLOCK_T, BLOCK_M
                )  # fmt: skip
            if TMA_B:
                b = b_desc.load([t0, n0])
            else:
                b = load_block(
                    b_ptr, b_index_ptr, rows_of_b, t0, end, n0, N, stride_bt, stride_bn, BLOCK_T, BLOCK_N
                )  # fmt: skip
            acc = add_product(acc, a.T, b, i, PRECISION)
        rest = start + full * BLOCK_T
        if rest < end:
            a = load_block(a_ptr, a_index_ptr, rows_of_a, rest, end, m0, M, stride_at, stride_am, BLOCK_T, BLOCK_M)
            b = load_block(b_ptr, b_index_ptr, rows_of_b, rest, end, n0, N, stride_bt, stride_bn, BLOCK_T, BLOCK_N)
            acc = add_product(acc, a.T, b, 0, PRECISION)
        if HALVES:
            left, right = halves(acc)
            store_tile(c_desc, c_ptr, left, e, m0, M, n0, N, stride_ce, stride_cm, stride_cn, ACCUMULATE, TMA_C)
            n1 = n0 + BLOCK_N // 2
            store_tile(c_desc, c_ptr, right, e, m0, M, n1, N, stride_ce, stride_cm, stride_cn, ACCUMULATE, TMA_C)
        else:
            store_tile(c_desc, c_ptr, acc, e, m0, M, n0, N, stride_ce, stride_cm, stride_cn, ACCUMULATE, TMA_C)


@triton.jit
def store_tile(
    desc,
    ptr,
    acc,
    e,
    m0,
    M,
    n0,
    N,
    stride_e,
    stride_m,
    stride_n,
    ACCUMULATE: tl.constexpr,
    TMA: tl.constexpr,
):
    m = m0 + tl.arange(0, acc.shape[0])
    n = n0 + tl.arange(0, acc.shape[1])
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = ptr + tl.cast(e, tl.int64) * stride_e
    at += m[:, None].to(tl.int64) * stride_m + n[None, :].to(tl.int64) * stride_n
    if ACCUMULATE:
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    rounded = acc.to(ptr.dtype.element_ty)
    if TMA:
        desc.store([e * M + m0, n0], rounded)
    else:
        tl.store(at, rounded, mask=inside)


@triton.jit
def k_grouped_sum_kernel(
    a_ptr,  # (T, N)
    index_ptr,  # (R,) int32: rows of a, or None
    scale_ptr,  # (R,) or None
    c_ptr,  # (E, N)
    starts_ptr,
    ends_ptr,
    num_rows,
    num_source,  # rows of a
    num_experts,
    N,
    stride_at,
    stride_an,
    stride_scale,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (E, column blocks). c[e] = sum of scale[r] * a[r], rows in ascending order."""
    e = tl.program_id(0)
    n0 = tl.program_id(1) * BLOCK_N
    start, end = load_range(starts_ptr, ends_ptr, e, num_rows, num_experts)
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for t0 in range(start, end, BLOCK_T):
        a = load_block(a_ptr, index_ptr, num_source, t0, end, n0, N, stride_at, stride_an, BLOCK_T, BLOCK_N)
        a = a.to(tl.float32)
        if scale_ptr is not None:
            t = t0 + tl.arange(0, BLOCK_T)
            scale = tl.load(scale_ptr + t.to(tl.int64) * stride_scale, mask=t < end, other=0.0).to(tl.float32)
            a = a * scale[:, None]
        total += a
    n = n0 + tl.arange(0, BLOCK_N)
    at = c_ptr + e.to(tl.int64) * N + n
    tl.store(at, tl.sum(total, 0).to(c_ptr.dtype.element_ty), mask=n < N)


def k_grouped_gemm(
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> Tensor:
    c = a.new_empty(starts.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)
    launch_k_grouped(c, a, b, starts, ends, a_index, b_index, accumulate=False)
    return c


def k_grouped_gemm_accumulate(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> None:
    launch_k_grouped(c, a, b, starts, ends, a_index, b_index, accumulate=True)


def launch_k_grouped(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    a_index: Tensor | None,
    b_index: Tensor | None,
    accumulate: bool,
) -> None:
    num_experts, rows, columns = c.shape
    if c.numel() == 0:
        return
    contracted = num_rows(a, a_index)
    block, depth = row_block(contracted, num_experts), contraction(contracted // num_experts)
    tile = choose_tile("wgrad", a.dtype, capability(a.device), block, depth)
    tma = tile.tma_rows and suits_tma(a) and suits_tma(b)
    tma_a, tma_b = tma and a_index is None, tma and b_index is None
    assert tile.split <= 2, tile
    block_c = [tile.block_m, tile.block_n // tile.split]  # each half is stored by itself
    tma_c = tile.tma_out and suits_tma(c) and c.is_contiguous() and rows % tile.block_m == 0
    tiles = num_experts * cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    programs = min(tile.per_processor * num_processors(a.device), tiles)
    k_grouped(tile, accumulate, tma_a, tma_b, tma_c, dot_precision(a.dtype)).launch(
        (programs,),
        a.device,
        descriptor(a, [tile.block_k, tile.block_m]) if tma_a else a,
        descriptor(b, [tile.block_k, tile.block_n]) if tma_b else b,
        descriptor(c.view(-1, columns), block_c) if tma_c else None,
        a,
        b,
        c,
        a_index,
        b_index,
        starts,
        ends,
        contracted,
        a.shape[0],
        b.shape[0],
        num_experts,
        rows,
        columns,
        *a.stride(),
        *b.stride(),
        *c.stride(),
    )


@functools.cache
def k_grouped(tile: Tile, accumulate: bool, tma_a: bool, tma_b: bool, tma_c: bool, precision: str) -> Kernel:
    return kernel(
        k_grouped_kernel,
        ACCUMULATE=accumulate,
        TMA_A=tma_a,
        TMA_B=tma_b,
        TMA_C=tma_c,
        HALVES=tile.split == 2,
        PRECISION=precision,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_T=tile.block_k,
        GROUP_M=tile.group_m,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def k_grouped_sum(
    a: Tensor,
    starts: Tensor,
    ends: Tensor,
    scale: Tensor | None,
    out_dtype: torch.dtype,
    row_index: Tensor | None = None,
) -> Tensor:
    num_experts, columns = starts.shape[0], a.shape[1]
    c = a.new_empty(num_experts, columns, dtype=out_dtype)
    if c.numel():
        kernel(k_grouped_sum_kernel, BLOCK_T=32, BLOCK_N=64).launch(
            (num_experts, cdiv(columns, 64)),
            a.device,
            a,
            row_index,
            scale,
            c,
            starts,
            ends,
            num_rows(a, row_index),
            a.shape[0],
            num_experts,
            columns,
            *a.stride(),
            0 if scale is None else scale.stride(0),
        )
    return c
