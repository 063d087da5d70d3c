"""Blockwise casts to FP8 in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.ops.portable.elementwise import rows_of_program
from grouped_experts.ops.portable.fp8 import absolute, fp8_or_bits, from_fp8, is_native, reciprocal, scale_of, to_fp8
from grouped_experts.ops.portable.launch import cdiv, kernel
from grouped_experts.ops.portable.schedule import build_schedule, max_tiles, schedule_of
from grouped_experts.ops.portable.tiles import row_block
from grouped_experts.ops.reference.quantize import empty_blocks, empty_columns, empty_rows
from grouped_experts.rows import FP8_BLOCK


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # (R, K)
    tiles_ptr,  # (1 + tiles, 4), or None: of all rows
    data_ptr,  # (R, K)
    scales_ptr,  # (R, K / 128), unit stride
    num_rows,
    K,
    stride_xm,
    stride_xk,
    stride_sk,
    TILE: tl.constexpr,  # rows of a tile of the schedule
    ROWS: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (row blocks, K / 128)."""
    _expert, m0, _end, end = rows_of_program(tiles_ptr, num_rows, TILE, ROWS)
    if m0 < end:
        m = m0 + tl.arange(0, ROWS)
        k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = (m < end)[:, None] & (k < K)[None, :]
        at = x_ptr + m.to(tl.int64)[:, None] * stride_xm + k.to(tl.int64)[None, :] * stride_xk
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        store_rows(x, m, k, end, data_ptr, scales_ptr, stride_sk, K, E5M2, POWER_OF_TWO, NATIVE, BLOCK)


@triton.jit
def store_rows(
    x, m, k, end, data_ptr, scales_ptr, stride_sk, K, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x (rows m before `end`, 128 columns k) with a scale a row."""
    scale = scale_of(tl.max(absolute(x), 1), E5M2, POWER_OF_TWO)
    data = to_fp8(x * reciprocal(scale)[:, None], E5M2, NATIVE)
    tl.store(data_ptr + m.to(tl.int64)[:, None] * K + k[None, :], data, mask=(m < end)[:, None] & (k < K)[None, :])
    tl.store(scales_ptr + (tl.min(k) // BLOCK).to(tl.int64) * stride_sk + m, scale, mask=m < end)


@triton.jit
def store_columns(x, scale, row, k, data_ptr, K, P, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """x (rows `row` of the padded ones, columns k), transposed, with a scale a column."""
    data = to_fp8(x * reciprocal(scale)[None, :], E5M2, NATIVE)
    tl.store(data_ptr + k.to(tl.int64)[:, None] * P + row[None, :], tl.trans(data), mask=(k < K)[:, None])


@triton.jit
def quantize_blocks_kernel(
    w_ptr,  # (E, N, K)
    data_ptr,  # (E, N, K), or (E, K, N) with TRANSPOSE
    scales_ptr,  # (E, N / 128, K / 128), or (E, K / 128, N / 128)
    N,
    K,
    stride_we,
    stride_wn,
    stride_wk,
    TRANSPOSE: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (E * N / 128, K / 128)."""
    blocks_n, blocks_k = tl.cdiv(N, BLOCK), tl.cdiv(K, BLOCK)
    expert = (tl.program_id(0) // blocks_n).to(tl.int64)
    i_n, i_k = tl.program_id(0) % blocks_n, tl.program_id(1)
    n, k = i_n * BLOCK + tl.arange(0, BLOCK), i_k * BLOCK + tl.arange(0, BLOCK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    at = w_ptr + expert * stride_we + n.to(tl.int64)[:, None] * stride_wn + k.to(tl.int64)[None, :] * stride_wk
    w = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.max(absolute(w), 1, keep_dims=True), 0, keep_dims=True), E5M2, POWER_OF_TWO)
    data = to_fp8(w * reciprocal(scale), E5M2, NATIVE)
    to = data_ptr + expert * N * K
    if TRANSPOSE:
        to += k.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, tl.trans(data), mask=(k < K)[:, None] & (n < N)[None, :])
        block = i_k * blocks_n + i_n
    else:
        tl.store(to + n.to(tl.int64)[:, None] * K + k[None, :], data, mask=inside)
        block = i_n * blocks_k + i_k
    tl.store(scales_ptr + expert * blocks_n * blocks_k + block, tl.max(scale))


@triton.jit
def padded_range(tiles_ptr, block):
    """The rows of which the padded block is: the first one, the one behind the last; none behind the last block.

    tiles_ptr: a schedule of tiles of as many rows, of which padded blocks are those that experts own, in that order.
    """
    tile = tiles_ptr + 4 * (1 + block)  # which a schedule has room for; its number of tiles need not be known first
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    known = block < tl.load(tiles_ptr)
    return tl.where(known, first, 0), tl.where(known, end, 0)


@triton.jit
def quantize_columns_kernel(
    x_ptr,  # (R, K)
    x_scales_ptr,  # (R, K / 128) of a cast by rows, or None
    tiles_ptr,  # (1 + tiles, 4), of BLOCK rows
    data_ptr,  # (K, P)
    scales_ptr,  # (K, P / 128), unit stride
    row_data_ptr,  # (R, K), as `quantize_rows`, or None
    row_scales_ptr,  # (R, K / 128), unit stride
    K,
    P,
    stride_xm,
    stride_xk,
    stride_xs,
    stride_xsk,
    stride_sp,
    stride_rs,
    X_E5M2: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a program: BLOCK with row_data
):
    """Grid (P / 128, K / WIDTH)."""
    block = tl.program_id(0)
    m0, end = padded_range(tiles_ptr, block)
    if m0 < end:
        m = m0 + tl.arange(0, BLOCK)
        k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = (m < end)[:, None] & (k < K)[None, :]
        at = x_ptr + m.to(tl.int64)[:, None] * stride_xm + k.to(tl.int64)[None, :] * stride_xk
        x = tl.load(at, mask=inside, other=0.0)
        if x_scales_ptr is not None:
            x_scale_at = x_scales_ptr + m.to(tl.int64) * stride_xs + (tl.min(k) // BLOCK).to(tl.int64) * stride_xsk
            x = from_fp8(x, X_E5M2, NATIVE).to(tl.float32) * tl.load(x_scale_at, mask=m < end, other=0.0)[:, None]
        x = x.to(tl.float32)
        scale = scale_of(tl.max(absolute(x), 0), E5M2, POWER_OF_TWO)
        tl.store(scales_ptr + block.to(tl.int64) * stride_sp + k, scale, mask=k < K)
        row = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        store_columns(x, scale, row, k, data_ptr, K, P, E5M2, NATIVE)
        if row_data_ptr is not None:
            store_rows(
                x, m, k, end, row_data_ptr, row_scales_ptr, stride_rs, K, E5M2, POWER_OF_TWO, NATIVE, BLOCK
            )  # fmt: skip


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    data, scales = empty_rows(x, dtype)
    if data.numel():
        tile = rows = 32
        programs = cdiv(x.shape[0], rows)
        if starts is not None and ends is not None:
            tile = row_block(x.shape[0], starts.shape[0], expected_rows)
            rows = min(tile, rows)
            tiles = schedule_of(tiles, starts, ends, x.shape[0], expected_rows)
            programs = max_tiles(x.shape[0], starts.shape[0], tile) * (tile // rows)
        kernel(quantize_rows_kernel, TILE=tile, ROWS=rows, **options(data, power_of_two)).launch(
            (programs, scales.shape[1]),
            x.device,
            x,
            tiles,
            fp8_or_bits(data),
            scales,
            *x.shape,
            *x.stride(),
            scales.stride(1),
        )
    return data, scales


def quantize_blocks(w: Tensor, dtype: torch.dtype, power_of_two: bool, transpose: bool) -> tuple[Tensor, Tensor]:
    data, scales = empty_blocks(w, dtype, transpose)
    if data.numel():
        experts, rows, columns = w.shape
        kernel(quantize_blocks_kernel, num_warps=8, TRANSPOSE=transpose, **options(data, power_of_two)).launch(
            (experts * cdiv(rows, FP8_BLOCK), cdiv(columns, FP8_BLOCK)),
            w.device,
            w,
            fp8_or_bits(data),
            scales,
            rows,
            columns,
            *w.stride(),
        )
    return data, scales


def quantize_columns(
    x: Tensor, starts: Tensor, ends: Tensor, dtype: torch.dtype, power_of_two: bool, x_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    outputs = empty_columns(x, starts.shape[0], dtype)
    launch_columns(x, x_scales, starts, ends, power_of_two, *outputs, None, None)
    return outputs


def quantize_rows_and_columns(
    x: Tensor, starts: Tensor, ends: Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = empty_rows(x, dtype), empty_columns(x, starts.shape[0], dtype)
    launch_columns(x, None, starts, ends, power_of_two, *columns, *rows)
    return *rows, *columns


def launch_columns(
    x: Tensor,
    x_scales: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    power_of_two: bool,
    data: Tensor,
    scales: Tensor,
    row_data: Tensor | None,
    row_scales: Tensor | None,
) -> None:
    if not x.numel() or not data.numel():
        return
    columns, padded = data.shape
    width = 64 if row_data is None else FP8_BLOCK
    kernel(
        quantize_columns_kernel,
        num_warps=8,
        X_E5M2=x.dtype == torch.float8_e5m2,
        **options(data, power_of_two),
        WIDTH=width,
    ).launch(
        (padded // FP8_BLOCK, cdiv(columns, width)),
        x.device,
        x if x_scales is None else fp8_or_bits(x),
        x_scales,
        build_schedule(starts, ends, x.shape[0], FP8_BLOCK),
        fp8_or_bits(data),
        scales,
        None if row_data is None else fp8_or_bits(row_data),
        row_scales,
        columns,
        padded,
        *x.stride(),
        *((None, None) if x_scales is None else x_scales.stride()),
        scales.stride(1),
        None if row_scales is None else row_scales.stride(1),
    )


def options(data: Tensor, power_of_two: bool) -> dict[str, bool | int]:
    return {
        "E5M2": data.dtype == torch.float8_e5m2,
        "POWER_OF_TWO": power_of_two,
        "NATIVE": is_native(data),
        "BLOCK": FP8_BLOCK,
    }
