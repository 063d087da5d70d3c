"""k-grouped GEMM in Triton: one persistent kernel over the tiles of every expert's weight, contracting its rows."""

from __future__ import annotations

import triton
import triton.language as tl

from grouped_experts.ops.portable.m_grouped import tile_position
from grouped_experts.ops.portable.schedule import load_range


@triton.jit
def load_block(x, t0, end, n0, N, stride_t, stride_n, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows t0 : end, columns n0.., zero behind both: a product with what lies there must not even be 0 * NaN."""
    t = t0 + tl.arange(0, BLOCK_T)
    n = n0 + tl.arange(0, BLOCK_N)
    at = x + t[:, None].to(tl.int64) * stride_t + n[None, :].to(tl.int64) * stride_n
    return tl.load(at, mask=(t < end)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def k_grouped_kernel(
    a_desc,  # (T, M) descriptor, or the pointer again
    b_desc,  # (T, N)
    c_desc,  # (E * M, N), M a multiple of BLOCK_M, or None
    a_ptr,
    b_ptr,
    c_ptr,  # (E, M, N)
    starts_ptr,  # (E,)
    ends_ptr,  # (E,)
    num_rows,
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
    TMA: tl.constexpr,
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
            if TMA:
                a = a_desc.load([t0, m0])
                b = b_desc.load([t0, n0])
            else:
                a = load_block(a_ptr, t0, end, m0, M, stride_at, stride_am, BLOCK_T, BLOCK_M)
                b = load_block(b_ptr, t0, end, n0, N, stride_bt, stride_bn, BLOCK_T, BLOCK_N)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        rest = start + full * BLOCK_T
        if rest < end:
            a = load_block(a_ptr, rest, end, m0, M, stride_at, stride_am, BLOCK_T, BLOCK_M)
            b = load_block(b_ptr, rest, end, n0, N, stride_bt, stride_bn, BLOCK_T, BLOCK_N)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
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
    scale_ptr,  # (T,) or None
    c_ptr,  # (E, N)
    starts_ptr,
    ends_ptr,
    num_rows,
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
        a = load_block(a_ptr, t0, end, n0, N, stride_at, stride_an, BLOCK_T, BLOCK_N).to(tl.float32)
        if scale_ptr is not None:
            t = t0 + tl.arange(0, BLOCK_T)
            scale = tl.load(scale_ptr + t.to(tl.int64) * stride_scale, mask=t < end, other=0.0).to(tl.float32)
            a = a * scale[:, None]
        total += a
    n = n0 + tl.arange(0, BLOCK_N)
    at = c_ptr + e.to(tl.int64) * N + n
    tl.store(at, tl.sum(total, 0).to(c_ptr.dtype.element_ty), mask=n < N)
