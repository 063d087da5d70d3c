"""What becomes of a finished tile: a plain store, fc1's activation, or the activation's backward behind fc2's dgrad.

Each takes the same arguments and uses what it needs: acc (and acc_up) (BLOCK_M, BLOCK_N) fp32, the tile's expert (-1:
rows of no expert), rows m0 : end, columns n0.. of N, i_n (which block of columns), and pointers to contiguous tensors.
ahead: what `load_h` gave before it was needed. y, a and h come twice, as descriptor and as pointer: with TMA, a tile
full of rows goes through the descriptor. A tensor with a gate has its parts side by side, (T, 2 N); with TMA, N is a
multiple of the tile, so that no tile of the gate runs into the up projection.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_product(
    acc,
    acc_up,
    ahead,
    expert,
    m0,
    end,
    n0,
    i_n,
    y,
    a,
    h,
    y_ptr,  # (T, N)
    a_ptr,
    h_ptr,
    bias_ptr,  # (E, N) or None
    probs_ptr,  # (T,) or None: scale of the bias
    partials_ptr,
    num_rows,
    N,
    ACT: tl.constexpr,
    ACT_GRADIENT: tl.constexpr,
    GATED_H: tl.constexpr,
    EVEN_N: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y = acc + scale * bias. In rows of no expert acc is zero, and bias and scale are not read."""
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, expert, n, 0, N, N)
        if probs_ptr is not None:
            owned_end = tl.where(expert < 0, m0, end)
            scale = tl.load(probs_ptr + m, mask=m < owned_end, other=0.0).to(tl.float32)
            acc += scale[:, None] * bias[None, :]
        else:
            acc += bias[None, :]
    store_rows(y, y_ptr, acc, m0, end, n0, N, 0, 1, TMA, BLOCK_M, BLOCK_N)


@triton.jit
def activate(
    acc,
    acc_up,
    ahead,
    expert,
    m0,
    end,
    n0,
    i_n,
    y,
    a,
    h,
    y_ptr,
    a_ptr,  # (T, N)
    h_ptr,  # (T, 2 N), or (T, N) without a gate
    bias_ptr,  # (E, 2 N), (E, N) or None
    probs_ptr,  # (T,) or None
    partials_ptr,
    num_rows,
    N,
    ACT: tl.constexpr,
    ACT_GRADIENT: tl.constexpr,
    GATED_H: tl.constexpr,
    EVEN_N: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """h = acc + bias, rounded; a = p * act(h) of the rounded h."""
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    PARTS: tl.constexpr = 2 if GATED_H else 1
    if bias_ptr is not None:
        acc += load_bias(bias_ptr, expert, n, 0, N, PARTS * N)[None, :]
        if GATED_H:
            acc_up += load_bias(bias_ptr, expert, n, N, N, PARTS * N)[None, :]
    gate = acc.to(h_ptr.dtype.element_ty)
    store_rows(h, h_ptr, gate, m0, end, n0, N, 0, PARTS, TMA, BLOCK_M, BLOCK_N)
    up = gate
    if GATED_H:
        up = acc_up.to(h_ptr.dtype.element_ty)
        store_rows(h, h_ptr, up, m0, end, n0, N, 1, PARTS, TMA, BLOCK_M, BLOCK_N)
    s = ACT(gate.to(tl.float32), up.to(tl.float32), h_ptr.dtype.element_ty == tl.float32)
    if probs_ptr is not None:
        s = tl.load(probs_ptr + m, mask=m < end, other=0.0).to(tl.float32)[:, None] * s
    store_rows(a, a_ptr, s, m0, end, n0, N, 0, 1, TMA, BLOCK_M, BLOCK_N)


@triton.jit
def activate_backward(
    acc,  # da
    acc_up,
    ahead,  # gate and up of h
    expert,
    m0,
    end,
    n0,
    i_n,
    y,
    a,
    h,
    y_ptr,  # dh: (T, 2 N), or (T, N) without a gate
    a_ptr,  # (T, N) or None
    h_ptr,  # the shape of dh
    bias_ptr,
    probs_ptr,  # (T,) or None
    partials_ptr,  # (column tiles, T) or None
    num_rows,
    N,
    ACT: tl.constexpr,
    ACT_GRADIENT: tl.constexpr,
    GATED_H: tl.constexpr,
    EVEN_N: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dh = act'(h) (p * da), a = p * act(h), partials = sum of da * act(h) over the tile's columns.

    dh comes first: the other order needs more registers.
    """
    m = m0 + tl.arange(0, BLOCK_M)
    PARTS: tl.constexpr = 2 if GATED_H else 1
    PRECISE: tl.constexpr = h_ptr.dtype.element_ty == tl.float32
    gate = ahead[0].to(tl.float32)
    up = ahead[1].to(tl.float32)
    p = tl.full((BLOCK_M,), 1.0, tl.float32)
    if probs_ptr is not None:
        p = tl.load(probs_ptr + m, mask=m < end, other=0.0).to(tl.float32)
    d_gate, d_up = ACT_GRADIENT(p[:, None] * acc, gate, up, PRECISE)
    store_rows(y, y_ptr, d_gate, m0, end, n0, N, 0, PARTS, TMA, BLOCK_M, BLOCK_N)
    if GATED_H:
        store_rows(y, y_ptr, d_up, m0, end, n0, N, 1, PARTS, TMA, BLOCK_M, BLOCK_N)
    if a_ptr is not None or partials_ptr is not None:
        s = ACT(gate, up, PRECISE)
        if partials_ptr is not None:
            total = acc * s
            if not EVEN_N:  # behind column N stands 0 * dy, which is NaN for a dy of Inf
                total = tl.where((n0 + tl.arange(0, BLOCK_N) < N)[None, :], total, 0.0)
            partial = tl.sum(total, 1)
            tl.store(partials_ptr + tl.cast(i_n, tl.int64) * num_rows + m, partial, mask=m < end)
        if a_ptr is not None:
            store_rows(a, a_ptr, p[:, None] * s, m0, end, n0, N, 0, 1, TMA, BLOCK_M, BLOCK_N)


@triton.jit
def load_h(
    h, h_ptr, m0, end, n0, N, GATED_H: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Gate and up of a tile of h, as they are stored; without a gate the same block twice."""
    PARTS: tl.constexpr = 2 if GATED_H else 1
    gate = load_part(h, h_ptr, m0, end, n0, N, 0, PARTS, TMA, BLOCK_M, BLOCK_N)
    up = gate
    if GATED_H:
        up = load_part(h, h_ptr, m0, end, n0, N, 1, PARTS, TMA, BLOCK_M, BLOCK_N)
    return gate, up


@triton.jit
def store_rows(
    desc,  # (T, PARTS * N)
    ptr,
    block,
    m0,
    end,
    n0,
    N,
    part,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows m0 : end, columns n0.. of one part, rounded to the tensor's dtype."""
    rounded = block.to(ptr.dtype.element_ty)
    if TMA:
        if end - m0 >= BLOCK_M:
            desc.store([m0, part * N + n0], rounded)
        else:
            store_masked(ptr, rounded, m0, end, n0, N, part, PARTS, BLOCK_M, BLOCK_N)
    else:
        store_masked(ptr, rounded, m0, end, n0, N, part, PARTS, BLOCK_M, BLOCK_N)


@triton.jit
def store_masked(ptr, block, m0, end, n0, N, part, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    at = ptr + m[:, None].to(tl.int64) * (PARTS * N) + part * N + n[None, :]
    tl.store(at, block, mask=(m < end)[:, None] & (n < N)[None, :])


@triton.jit
def load_part(
    desc,  # (T, PARTS * N)
    ptr,
    m0,
    end,
    n0,
    N,
    part,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One part of h; through TMA the rows behind `end` are another expert's."""
    if TMA:
        return desc.load([m0, part * N + n0])
    else:
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        at = ptr + m[:, None].to(tl.int64) * (PARTS * N) + part * N + n[None, :]
        return tl.load(at, mask=(m < end)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def load_bias(bias_ptr, expert, n, offset, N, width):
    """Columns offset + n of an expert's bias; zero for rows of no expert."""
    at = bias_ptr + expert.to(tl.int64) * width + offset + n
    return tl.load(at, mask=n < tl.where(expert < 0, 0, N), other=0.0).to(tl.float32)
