"""The scaled activation on its own, forward and backward, and the sum of the dprobs partials."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.activations import get_activation
from grouped_experts.ops.portable import activations
from grouped_experts.ops.portable.launch import cdiv, contiguous, even_block, kernel
from grouped_experts.ops.portable.m_grouped import source_rows
from grouped_experts.ops.portable.schedule import max_tiles, schedule_of
from grouped_experts.ops.portable.tiles import row_block


@triton.jit
def rows_of_program(tiles_ptr, num_rows, TILE: tl.constexpr, ROWS: tl.constexpr):
    """The expert (-1: none), the rows m0 : end and how far an expert owns them: of a schedule's tiles of TILE rows,
    ROWS to a program, or without a schedule of all rows; no rows for a program too many.
    """
    if tiles_ptr is None:
        m0 = tl.program_id(0) * ROWS
        return 0, m0, num_rows, num_rows
    else:
        slot = tl.program_id(0) // (TILE // ROWS)
        known = slot < tl.load(tiles_ptr + 1)
        tile = tiles_ptr + 4 * (1 + slot)
        expert = tl.load(tile, mask=known, other=-1)
        m0 = tl.load(tile + 1, mask=known, other=0) + tl.program_id(0) % (TILE // ROWS) * ROWS
        end = tl.load(tile + 2, mask=known, other=0)
        return expert, m0, end, tl.where(expert < 0, 0, end)


@triton.jit
def scaled_activation_kernel(
    h_ptr,  # (T, 2 I), or (T, I) without a gate
    probs_ptr,  # (T,) or None
    tiles_ptr,  # (1 + tiles, 4), or None: every row is owned
    a_ptr,  # (T, I)
    num_rows,
    I,
    stride_h,
    stride_hn,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,  # rows of a tile of the schedule
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tiles * TILE / ROWS, column blocks). a = p * act(h); zero in rows of no expert."""
    _expert, m0, end, owned_end = rows_of_program(tiles_ptr, num_rows, TILE, ROWS)
    if m0 < end:
        m = m0 + tl.arange(0, ROWS)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = (m < end)[:, None] & (n < I)[None, :]
        owned = (m < owned_end)[:, None] & (n < I)[None, :]
        at = h_ptr + m[:, None].to(tl.int64) * stride_h + n[None, :].to(tl.int64) * stride_hn
        gate = tl.load(at, mask=owned, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(at + tl.cast(I, tl.int64) * stride_hn, mask=owned, other=0.0).to(tl.float32)
        a = ACT(gate, up, h_ptr.dtype.element_ty == tl.float32)
        if probs_ptr is not None:
            a = tl.load(probs_ptr + m, mask=m < owned_end, other=0.0).to(tl.float32)[:, None] * a
        tl.store(a_ptr + m[:, None].to(tl.int64) * I + n[None, :], a.to(a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scaled_activation_backward_kernel(
    da_ptr,  # (T, I)
    h_ptr,  # (T, 2 I), or (T, I) without a gate
    probs_ptr,  # (T,) or None
    tiles_ptr,  # (1 + tiles, 4), or None: every row is owned
    dh_ptr,  # the shape of h
    a_ptr,  # (T, I)
    dprobs_ptr,  # (T,)
    num_rows,
    I,
    stride_da,
    stride_dan,
    stride_h,
    stride_hn,
    ACT: tl.constexpr,
    ACT_GRADIENT: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tiles * TILE / ROWS,). A program has whole rows, so that dprobs is summed in one order."""
    _expert, m0, end, owned_end = rows_of_program(tiles_ptr, num_rows, TILE, ROWS)
    if m0 < end:
        m = m0 + tl.arange(0, ROWS)
        width = 2 * I if GATED else I
        PRECISE: tl.constexpr = h_ptr.dtype.element_ty == tl.float32
        p = tl.full((ROWS,), 1.0, tl.float32)
        if probs_ptr is not None:
            p = tl.load(probs_ptr + m, mask=m < owned_end, other=0.0).to(tl.float32)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for n0 in range(0, I, BLOCK):
            n = n0 + tl.arange(0, BLOCK)
            inside = (m < end)[:, None] & (n < I)[None, :]
            owned = (m < owned_end)[:, None] & (n < I)[None, :]
            at = h_ptr + m[:, None].to(tl.int64) * stride_h + n[None, :].to(tl.int64) * stride_hn
            gate = tl.load(at, mask=owned, other=0.0).to(tl.float32)
            up = gate
            if GATED:
                up = tl.load(at + tl.cast(I, tl.int64) * stride_hn, mask=owned, other=0.0).to(tl.float32)
            at_da = da_ptr + m[:, None].to(tl.int64) * stride_da + n[None, :].to(tl.int64) * stride_dan
            da = tl.load(at_da, mask=owned, other=0.0).to(tl.float32)
            s = ACT(gate, up, PRECISE)
            total += tl.where(owned, da * s, 0.0)
            at_a = a_ptr + m[:, None].to(tl.int64) * I + n[None, :]
            tl.store(at_a, (p[:, None] * s).to(a_ptr.dtype.element_ty), mask=inside)
            d_gate, d_up = ACT_GRADIENT(p[:, None] * da, gate, up, PRECISE)
            at_dh = dh_ptr + m[:, None].to(tl.int64) * width + n[None, :]
            tl.store(at_dh, d_gate.to(dh_ptr.dtype.element_ty), mask=inside)
            if GATED:
                tl.store(at_dh + I, d_up.to(dh_ptr.dtype.element_ty), mask=inside)
        tl.store(dprobs_ptr + m, tl.sum(total, 1), mask=m < end)


@triton.jit
def sum_partials_kernel(
    partials_ptr,  # (column tiles, T)
    dy_ptr,  # (T, H) or None
    bias_ptr,  # (E, H): read only with dy
    index_ptr,  # (R,): rows of dy, or None
    tiles_ptr,
    dprobs_ptr,  # (R,)
    num_rows,
    num_source,  # rows of dy
    num_columns,
    H,
    stride_dy,
    stride_dyn,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tiles,). dprobs = sum of the partials, in ascending order, + dy . b2_e; zero in rows of no expert."""
    expert, m0, end, owned_end = rows_of_program(tiles_ptr, num_rows, TILE, TILE)
    if m0 < end:
        m = m0 + tl.arange(0, TILE)
        owned = m < owned_end
        total = tl.zeros((TILE,), tl.float32)
        partial = partials_ptr + m
        for _ in range(0, num_columns):
            total += tl.load(partial, mask=owned, other=0.0)
            partial += num_rows
        if dy_ptr is not None:
            e = tl.maximum(expert, 0).to(tl.int64)
            source = source_rows(index_ptr, m, owned_end, num_source)
            for n0 in range(0, H, BLOCK):
                n = n0 + tl.arange(0, BLOCK)
                at = dy_ptr + source[:, None].to(tl.int64) * stride_dy + n[None, :].to(tl.int64) * stride_dyn
                dy = tl.load(at, mask=owned[:, None] & (n < H)[None, :], other=0.0).to(tl.float32)
                bias = tl.load(bias_ptr + e * H + n, mask=n < tl.where(expert < 0, 0, H), other=0.0).to(tl.float32)
                total += tl.sum(tl.where(owned[:, None], dy * bias[None, :], 0.0), 1)
        tl.store(dprobs_ptr + m, total, mask=m < end)


def scaled_activation(
    h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str
) -> Tensor:
    gate = get_activation(activation).gated
    columns = h.shape[1] // 2 if gate else h.shape[1]
    a = h.new_empty(h.shape[0], columns)
    if a.numel():
        block = even_block(columns, 256)
        tiles, tile_rows, rows, programs = programs_for(h, starts, ends, 16)
        kernel(
            scaled_activation_kernel,
            ACT=activations.VALUES[activation],
            GATED=gate,
            TILE=tile_rows,
            ROWS=rows,
            BLOCK=block,
        ).launch(
            (programs, cdiv(columns, block)), h.device, h, contiguous(probs), tiles, a, h.shape[0], columns, *h.stride()
        )
    return a


def scaled_activation_backward(
    da: Tensor, h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    dh, a, dprobs = h.new_empty(h.shape), da.new_empty(da.shape), h.new_empty(h.shape[0], dtype=torch.float32)
    if h.shape[0]:
        tiles, tile_rows, rows, programs = programs_for(h, starts, ends, 8)
        kernel(
            scaled_activation_backward_kernel,
            ACT=activations.VALUES[activation],
            ACT_GRADIENT=activations.GRADIENTS[activation],
            GATED=get_activation(activation).gated,
            TILE=tile_rows,
            ROWS=rows,
            BLOCK=max(16, even_block(da.shape[1], 128)),
        ).launch(
            (programs,),
            h.device,
            da,
            h,
            contiguous(probs),
            tiles,
            dh,
            a,
            dprobs,
            h.shape[0],
            da.shape[1],
            *da.stride(),
            *h.stride(),
        )
    return dh, a, dprobs


def programs_for(
    h: Tensor, starts: Tensor | None, ends: Tensor | None, rows: int
) -> tuple[Tensor | None, int, int, int]:
    """The schedule of the ranges, rows of its tiles, rows of a program, and programs; without ranges, of all rows."""
    if starts is None or ends is None:
        return None, rows, rows, cdiv(h.shape[0], rows)
    tile_rows = row_block(h.shape[0], starts.shape[0])
    programs = max_tiles(h.shape[0], starts.shape[0], tile_rows) * (tile_rows // rows)
    return schedule_of(None, starts, ends, h.shape[0]), tile_rows, rows, programs
