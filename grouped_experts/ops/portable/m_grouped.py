"""m-grouped GEMM in Triton: one persistent kernel; what happens to a finished tile is a function handed to it.

The tile's rows come from the schedule, so that no expert's size is known to the host. Operands come through the tensor
memory accelerator where their strides and the GPU allow, through pointers otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_position(t, num_m, num_n, GROUP_M: tl.constexpr):
    """Tiles in groups of GROUP_M rows of tiles, column by column, so that both operands stay in the L2 cache."""
    group = t // (GROUP_M * num_n)
    first = group * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    within = t - group * GROUP_M * num_n
    return first + within % size, within // size


@triton.jit
def source_rows(index_ptr, row, end, num_source):
    """Which rows of an operand the rows `row` before `end` are: themselves, or where the index says, clamped."""
    if index_ptr is None:
        return row
    else:
        index = tl.load(index_ptr + row, mask=row < end, other=0)
        return tl.maximum(tl.minimum(index, num_source - 1), 0)


@triton.jit
def load_rows(
    x, source, m0, end, k0, K, stride_m, stride_k, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Rows m0 : end, columns from k0, as (BLOCK_M, BLOCK_K); through TMA the rows behind `end` are not masked.

    source: their places in x (`source_rows`).
    """
    if TMA:
        return x.load([m0, k0])
    else:
        m = m0 + tl.arange(0, BLOCK_M)
        k = k0 + tl.arange(0, BLOCK_K)
        at = x + source[:, None].to(tl.int64) * stride_m + k[None, :].to(tl.int64) * stride_k
        return tl.load(at, mask=(m < end)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def load_weight(
    w,
    e,
    n0,
    N,
    k0,
    K,
    stride_e,
    stride_n,
    stride_k,
    TMA: tl.constexpr,
    TRANSPOSE_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The block of expert e's weight that multiplies columns n0.. of the output, as (BLOCK_K, BLOCK_N)."""
    if TMA:
        if TRANSPOSE_W:
            return w.load([e, n0, k0]).reshape(BLOCK_N, BLOCK_K).T
        else:
            return w.load([e, k0, n0]).reshape(BLOCK_K, BLOCK_N)
    else:
        n = n0 + tl.arange(0, BLOCK_N)
        k = k0 + tl.arange(0, BLOCK_K)
        at = w + e.to(tl.int64) * stride_e + n[None, :].to(tl.int64) * stride_n + k[:, None].to(tl.int64) * stride_k
        return tl.load(at, mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)


@triton.jit
def add_product(acc, left, right, step, PRECISION: tl.constexpr):
    """acc + left @ right. True fp32 sums every step by itself: one long chain of additions is less accurate."""
    if PRECISION == "ieee" and left.dtype == tl.float32:
        nothing = tl.zeros_like(acc) + tl.where(step < 0, 1.0, 0.0)  # or the compiler makes one chain of it again
        return acc + tl.dot(left, right, nothing, input_precision=PRECISION)
    else:
        return tl.dot(left, right, acc, input_precision=PRECISION)


@triton.jit
def m_grouped_kernel(
    x,  # (T, K), descriptor or pointer
    w,  # (E, N, K), or (E, K, N) without TRANSPOSE_W; with a gate (E, 2 N, K)
    tiles_ptr,  # (1 + tiles, 4) int32
    y,  # the epilogue's, from here to partials_ptr: see there
    a,
    h,
    y_ptr,
    a_ptr,
    h_ptr,
    bias_ptr,
    probs_ptr,
    partials_ptr,
    index_ptr,  # (R,) int32: rows of x, or None
    num_rows,
    num_source,  # rows of x
    N,
    K,
    stride_xm,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    EPILOGUE: tl.constexpr,
    AHEAD: tl.constexpr,  # what the epilogue reads, loaded before it is needed, or None
    ACT: tl.constexpr,
    ACT_GRADIENT: tl.constexpr,
    TWO_PRODUCTS: tl.constexpr,  # the products with rows n and N + n of the weight side by side
    GATED_H: tl.constexpr,
    EVEN_N: tl.constexpr,  # N is a multiple of BLOCK_N
    SPLIT: tl.constexpr,  # 1, 2 or 4: parts of the columns that the epilogue takes, each by itself
    GAPS: tl.constexpr,  # 1: rows of no expert are tiles as well, with a product of zero
    TRANSPOSE_W: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    TMA_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Grid (programs,), persistent."""
    num_m = tl.load(tiles_ptr + GAPS)
    num_n = tl.cdiv(N, BLOCK_N)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        i_m, i_n = tile_position(t, num_m, num_n, GROUP_M)
        tile = tiles_ptr + 4 * (1 + i_m)
        expert = tl.load(tile)
        m0 = tl.load(tile + 1)
        end = tl.load(tile + 2)
        n0 = i_n * BLOCK_N
        e = tl.maximum(expert, 0)
        steps = tl.where(expert < 0, 0, tl.cdiv(K, BLOCK_K))
        WIDTH: tl.constexpr = BLOCK_N // SPLIT
        ahead = None
        if AHEAD is not None:
            ahead = AHEAD(h, h_ptr, m0, end, n0, N, GATED_H, TMA_OUT, BLOCK_M, WIDTH)
        source = source_rows(index_ptr, m0 + tl.arange(0, BLOCK_M), end, num_source)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(0, steps):
            k0 = i * BLOCK_K
            rows = load_rows(x, source, m0, end, k0, K, stride_xm, stride_xk, TMA_X, BLOCK_M, BLOCK_K)
            if TWO_PRODUCTS:
                weight = load_weight(
                    w, e, n0, N, k0, K, stride_we, stride_wn, stride_wk, TMA_W, TRANSPOSE_W, BLOCK_N, BLOCK_K
                )
                weight_up = load_weight(
                    w, e, N + n0, 2 * N, k0, K, stride_we, stride_wn, stride_wk, TMA_W, TRANSPOSE_W, BLOCK_N, BLOCK_K
                )
                acc = add_product(acc, rows, weight, i, PRECISION)
                acc_up = add_product(acc_up, rows, weight_up, i, PRECISION)
            else:
                weight = load_weight(
                    w, e, n0, N, k0, K, stride_we, stride_wn, stride_wk, TMA_W, TRANSPOSE_W, BLOCK_N, BLOCK_K
                )
                acc = add_product(acc, rows, weight, i, PRECISION)
        if SPLIT == 1:
            EPILOGUE(
                acc, acc_up, ahead, expert, m0, end, n0, i_n, y, a, h, y_ptr, a_ptr, h_ptr, bias_ptr, probs_ptr,
                partials_ptr, num_rows, N, ACT, ACT_GRADIENT, GATED_H, EVEN_N, TMA_OUT, BLOCK_M, BLOCK_N
            )  # fmt: skip
        else:
            # One part of the columns after the other, for epilogues that need more registers than a whole tile leaves.
            left, right = halves(acc)
            parts = (left, right)
            if SPLIT == 4:
                parts = halves(left) + halves(right)
            for i in tl.static_range(SPLIT):
                part = parts[i]
                following = ahead
                if AHEAD is not None and i + 1 < SPLIT:
                    following = AHEAD(h, h_ptr, m0, end, n0 + (i + 1) * WIDTH, N, GATED_H, TMA_OUT, BLOCK_M, WIDTH)
                EPILOGUE(
                    part, part, ahead, expert, m0, end, n0 + i * WIDTH, SPLIT * i_n + i, y, a, h, y_ptr, a_ptr, h_ptr,
                    bias_ptr, probs_ptr, partials_ptr, num_rows, N, ACT, ACT_GRADIENT, GATED_H, EVEN_N, TMA_OUT,
                    BLOCK_M, WIDTH
                )  # fmt: skip
                ahead = following


@triton.jit
def halves(block):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(block, (block.shape[0], 2, block.shape[1] // 2)), (0, 2, 1)))
