"""The two products of the layer that are fused with the activation, in FP8 and Triton.

A product, and one elementwise kernel that casts what it makes while it has it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.activations import get_activation
from grouped_experts.ops.portable import activations
from grouped_experts.ops.portable.elementwise import rows_of_program, scaled_activation_backward
from grouped_experts.ops.portable.fp8 import absolute, fp8_or_bits, scale_of
from grouped_experts.ops.portable.launch import cdiv, contiguous, kernel
from grouped_experts.ops.portable.products import sum_partials
from grouped_experts.ops.portable.products_fp8 import m_grouped_gemm_fp8
from grouped_experts.ops.portable.quantize import (
    options,
    padded_range,
    quantize_columns,
    quantize_rows,
    quantize_rows_and_columns,
    store_columns,
    store_rows,
)
from grouped_experts.ops.portable.schedule import build_schedule, max_tiles, schedule_of
from grouped_experts.ops.portable.tiles import row_block
from grouped_experts.ops.reference.fused_fp8 import E4M3, dtype_of_da, empty_gradients
from grouped_experts.ops.reference.quantize import empty_rows
from grouped_experts.rows import FP8_BLOCK, padded_rows


@triton.jit
def scaled_activation_quantized_kernel(
    h_ptr,  # (T, 2 I), or (T, I) without a gate
    probs_ptr,  # (T,) or None
    tiles_ptr,  # (1 + tiles, 4)
    data_ptr,  # (T, I)
    scales_ptr,  # (T, I / 128), unit stride
    num_rows,
    I,
    stride_h,
    stride_hn,
    stride_sn,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,  # rows of a tile of the schedule
    ROWS: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tiles * TILE / ROWS, I / 128). a = p * act(h), rounded as h, then cast by rows, of experts' rows alone."""
    _expert, m0, _end, end = rows_of_program(tiles_ptr, num_rows, TILE, ROWS)
    if m0 < end:
        m = m0 + tl.arange(0, ROWS)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        owned = (m < end)[:, None] & (n < I)[None, :]
        at = h_ptr + m[:, None].to(tl.int64) * stride_h + n[None, :].to(tl.int64) * stride_hn
        gate = tl.load(at, mask=owned, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(at + tl.cast(I, tl.int64) * stride_hn, mask=owned, other=0.0).to(tl.float32)
        a = ACT(gate, up, h_ptr.dtype.element_ty == tl.float32)
        if probs_ptr is not None:
            a = tl.load(probs_ptr + m, mask=m < end, other=0.0).to(tl.float32)[:, None] * a
        a = a.to(h_ptr.dtype.element_ty).to(tl.float32)
        store_rows(a, m, n, end, data_ptr, scales_ptr, stride_sn, I, E5M2, POWER_OF_TWO, NATIVE, BLOCK)


@triton.jit
def scaled_activation_backward_quantized_kernel(
    da_ptr,  # (T, I)
    h_ptr,  # (T, 2 I), or (T, I) without a gate
    probs_ptr,  # (T,) or None
    tiles_ptr,  # (1 + tiles, 4), of BLOCK rows
    dh_ptr,  # the shape of h, or None
    dh_scales_ptr,  # (T, .. / 128), unit stride
    dh_columns_ptr,  # (2 I or I, P), or None
    dh_column_scales_ptr,  # (2 I or I, P / 128), unit stride
    a_ptr,  # (I, P), or None
    a_scales_ptr,  # (I, P / 128), unit stride
    partials_ptr,  # (I / 128, T), or None
    num_rows,
    I,
    P,
    stride_h,
    stride_hn,
    stride_dhs,
    stride_dhp,
    stride_ap,
    ACT: tl.constexpr,
    ACT_GRADIENT: tl.constexpr,
    GATED: tl.constexpr,  # then I is a multiple of 128
    ROWS: tl.constexpr,  # at a time: more than these the registers do not hold
    E5M2: tl.constexpr,  # dh; a is e4m3
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (P / 128, I / 128). Twice over the rows: casts by columns need the largest of all of them first."""
    block = tl.program_id(0)
    m0, end = padded_range(tiles_ptr, block)
    if m0 < end:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        width = 2 * I if GATED else I
        largest_a = tl.zeros((BLOCK,), tl.float32)
        largest_gate = tl.zeros((BLOCK,), tl.float32)
        largest_up = tl.zeros((BLOCK,), tl.float32)
        for i in range(0, tl.minimum(end - m0, BLOCK), ROWS):
            m = m0 + i + tl.arange(0, ROWS)
            dp, a, d_gate, d_up = activation_backward(
                da_ptr, h_ptr, probs_ptr, m, n, end, I, stride_h, stride_hn, ACT, ACT_GRADIENT, GATED
            )  # fmt: skip
            if partials_ptr is not None:
                tl.store(partials_ptr + tl.program_id(1).to(tl.int64) * num_rows + m, tl.sum(dp, 1), mask=m < end)
            if dh_ptr is not None:
                store_rows(
                    d_gate, m, n, end, dh_ptr, dh_scales_ptr, stride_dhs, width, E5M2, POWER_OF_TWO, NATIVE, BLOCK
                )  # fmt: skip
                if GATED:
                    store_rows(
                        d_up, m, I + n, end, dh_ptr, dh_scales_ptr, stride_dhs, width, E5M2, POWER_OF_TWO, NATIVE, BLOCK
                    )  # fmt: skip
            largest_a = tl.maximum(largest_a, tl.max(absolute(a), 0))
            largest_gate = tl.maximum(largest_gate, tl.max(absolute(d_gate), 0))
            largest_up = tl.maximum(largest_up, tl.max(absolute(d_up), 0))
        if dh_columns_ptr is not None or a_ptr is not None:
            a_scale = scale_of(largest_a, False, POWER_OF_TWO)
            gate_scale = scale_of(largest_gate, E5M2, POWER_OF_TWO)
            up_scale = scale_of(largest_up, E5M2, POWER_OF_TWO)
            first = block.to(tl.int64)
            if a_ptr is not None:
                tl.store(a_scales_ptr + first * stride_ap + n, a_scale, mask=n < I)
            if dh_columns_ptr is not None:
                tl.store(dh_column_scales_ptr + first * stride_dhp + n, gate_scale, mask=n < I)
                if GATED:
                    tl.store(dh_column_scales_ptr + first * stride_dhp + I + n, up_scale, mask=n < I)
            for i in range(0, BLOCK, ROWS):
                m = m0 + i + tl.arange(0, ROWS)
                row = first * BLOCK + i + tl.arange(0, ROWS)
                _dp, a, d_gate, d_up = activation_backward(
                    da_ptr, h_ptr, probs_ptr, m, n, end, I, stride_h, stride_hn, ACT, ACT_GRADIENT, GATED
                )  # fmt: skip
                if a_ptr is not None:
                    store_columns(a, a_scale, row, n, a_ptr, I, P, False, NATIVE)
                if dh_columns_ptr is not None:
                    store_columns(d_gate, gate_scale, row, n, dh_columns_ptr, width, P, E5M2, NATIVE)
                    if GATED:
                        store_columns(d_up, up_scale, row, I + n, dh_columns_ptr, width, P, E5M2, NATIVE)


@triton.jit
def activation_backward(
    da_ptr, h_ptr, probs_ptr, m, n, end, I, stride_h, stride_hn, ACT: tl.constexpr, ACT_GRADIENT: tl.constexpr,
    GATED: tl.constexpr
):  # fmt: skip
    """da * act(h), and a and both parts of dh, rounded as h; zero behind `end` and I."""
    owned = (m < end)[:, None] & (n < I)[None, :]
    at = h_ptr + m[:, None].to(tl.int64) * stride_h + n[None, :].to(tl.int64) * stride_hn
    gate = tl.load(at, mask=owned, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(at + tl.cast(I, tl.int64) * stride_hn, mask=owned, other=0.0).to(tl.float32)
    p = tl.full(m.shape, 1.0, tl.float32)
    if probs_ptr is not None:
        p = tl.load(probs_ptr + m, mask=m < end, other=0.0).to(tl.float32)
    da = tl.load(da_ptr + m[:, None].to(tl.int64) * I + n[None, :], mask=owned, other=0.0).to(tl.float32)
    PRECISE: tl.constexpr = h_ptr.dtype.element_ty == tl.float32
    s = ACT(gate, up, PRECISE)
    d_gate, d_up = ACT_GRADIENT(p[:, None] * da, gate, up, PRECISE)
    h_type = h_ptr.dtype.element_ty
    a = (p[:, None] * s).to(h_type).to(tl.float32)
    return da * s, a, d_gate.to(h_type).to(tl.float32), d_up.to(h_type).to(tl.float32)


def fc1_activation_fp8(
    x: Tensor,
    x_scales: Tensor,
    fc1_weight: Tensor,
    fc1_weight_scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    probs: Tensor | None,
    activation: str,
    h_dtype: torch.dtype,
    power_of_two: bool,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, experts = x.shape[0], starts.shape[0]
    tiles = schedule_of(tiles, starts, ends, rows, expected_rows)
    h = m_grouped_gemm_fp8(
        x, x_scales, fc1_weight, fc1_weight_scales, starts, ends, h_dtype, tiles, expected_rows, gaps=False
    )  # fmt: skip
    tile = row_block(rows, experts, expected_rows)
    return h, *scaled_activation_quantized(h, probs, tiles, tile, experts, activation, power_of_two)


def scaled_activation_quantized(
    h: Tensor, probs: Tensor | None, tiles: Tensor, tile: int, num_experts: int, activation: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """a = p * act(h), rounded as h and cast to e4m3 by rows; tiles: a schedule of `tile` rows each."""
    gated = get_activation(activation).gated
    columns = h.shape[1] // 2 if gated else h.shape[1]
    data, scales = empty_rows(h[:, :columns], E4M3)
    if data.numel():
        rows, at_a_time = h.shape[0], 16
        kernel(
            scaled_activation_quantized_kernel,
            ACT=activations.VALUES[activation],
            GATED=gated,
            TILE=tile,
            ROWS=at_a_time,
            **options(data, power_of_two),
        ).launch(
            (max_tiles(rows, num_experts, tile) * (tile // at_a_time), scales.shape[1]),
            h.device,
            h,
            contiguous(probs),
            tiles,
            fp8_or_bits(data),
            scales,
            rows,
            columns,
            *h.stride(),
            scales.stride(1),
        )
    return data, scales


def fc2_dgrad_activation_fp8(
    dy: Tensor,
    dy_scales: Tensor,
    fc2_weight: Tensor,
    fc2_weight_scales: Tensor,
    h: Tensor,
    starts: Tensor,
    ends: Tensor,
    probs: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    power_of_two: bool,
    need_rows: bool,
    need_columns: bool,
    need_a: bool,
    need_dprobs: bool,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, ...]:
    tiles = schedule_of(tiles, starts, ends, dy.shape[0], expected_rows)
    da = m_grouped_gemm_fp8(
        dy, dy_scales, fc2_weight, fc2_weight_scales, starts, ends, dtype_of_da(h), tiles, expected_rows, gaps=False
    )  # fmt: skip
    tile = row_block(dy.shape[0], starts.shape[0], expected_rows)
    return quantized_gradients(
        da, h, starts, ends, probs, activation, dtype, power_of_two, need_rows, need_columns, need_a, need_dprobs,
        tiles, tile
    )  # fmt: skip


def quantized_gradients(
    da: Tensor,
    h: Tensor,
    starts: Tensor,
    ends: Tensor,
    probs: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    power_of_two: bool,
    need_rows: bool,
    need_columns: bool,
    need_a: bool,
    need_dprobs: bool,
    tiles: Tensor,
    tile: int,
) -> tuple[Tensor, ...]:
    """What becomes of da (T, I): all results of `fc2_dgrad_activation_fp8`. tiles: of `tile` rows each."""
    (rows, columns), experts = da.shape, starts.shape[0]
    needed = need_rows, need_columns, need_a, need_dprobs
    made = empty_gradients(h, columns, experts, dtype, *needed)
    if not rows or not columns:
        return *made[:6], made[6].zero_()
    gated = get_activation(activation).gated
    if gated and columns % FP8_BLOCK:
        return _with_blocks_of_both_parts(da, h, probs, starts, ends, activation, dtype, power_of_two, made, *needed)
    blocks = cdiv(columns, FP8_BLOCK)
    partials = h.new_empty(blocks, rows, dtype=torch.float32) if need_dprobs else None
    dh, dh_scales, dh_columns, dh_column_scales, a, a_scales, _ = made
    kernel(
        scaled_activation_backward_quantized_kernel,
        num_warps=16 if gated else 8,
        ACT=activations.VALUES[activation],
        ACT_GRADIENT=activations.GRADIENTS[activation],
        GATED=gated,
        ROWS=16,
        **options(dh, power_of_two),
    ).launch(
        (padded_rows(rows, experts) // FP8_BLOCK, blocks),
        h.device,
        da,
        h,
        contiguous(probs),
        tiles if tile == FP8_BLOCK else build_schedule(starts, ends, rows, FP8_BLOCK),
        fp8_or_bits(dh) if need_rows else None,
        dh_scales if need_rows else None,
        fp8_or_bits(dh_columns) if need_columns else None,
        dh_column_scales if need_columns else None,
        fp8_or_bits(a) if need_a else None,
        a_scales if need_a else None,
        partials,
        rows,
        columns,
        padded_rows(rows, experts),
        *h.stride(),
        dh_scales.stride(1),
        dh_column_scales.stride(1),
        a_scales.stride(1),
    )
    return *made[:6], sum_partials(partials, da, None, tiles, tile, experts)


def _with_blocks_of_both_parts(
    da: Tensor,
    h: Tensor,
    probs: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    activation: str,
    dtype: torch.dtype,
    power_of_two: bool,
    made: tuple[Tensor, ...],
    need_rows: bool,
    need_columns: bool,
    need_a: bool,
    need_dprobs: bool,
) -> tuple[Tensor, ...]:
    """One step after the other: a block of dh has columns of the gate and of up, which lie apart in h."""
    dh, a, dprobs = scaled_activation_backward(da, h, probs, starts, ends, activation)
    of_rows, of_columns, of_a = made[0:2], made[2:4], made[4:6]
    if need_rows and need_columns:
        both = quantize_rows_and_columns(dh, starts, ends, dtype, power_of_two)
        of_rows, of_columns = both[:2], both[2:]
    elif need_rows:
        of_rows = quantize_rows(dh, dtype, power_of_two)
    elif need_columns:
        of_columns = quantize_columns(dh, starts, ends, dtype, power_of_two)
    if need_a:
        of_a = quantize_columns(a.to(h.dtype), starts, ends, E4M3, power_of_two)
    return *of_rows, *of_columns, *of_a, dprobs if need_dprobs else made[6]
