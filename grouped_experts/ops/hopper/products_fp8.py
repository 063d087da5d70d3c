"""The m-grouped products of FP8 operands as functions of tensors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from grouped_experts.activations import ACTIVATIONS
from grouped_experts.ops import portable
from grouped_experts.ops.hopper import epilogues_fp8
from grouped_experts.ops.hopper.descriptors import operand_descriptors, ragged_descriptor
from grouped_experts.ops.hopper.dispatch import is_fast
from grouped_experts.ops.hopper.gradients_fp8 import quantized_gradients
from grouped_experts.ops.hopper.m_grouped_fp8 import m_grouped_fp8_kernel
from grouped_experts.ops.hopper.tiles import BLOCK_M, Tile, choose_tile
from grouped_experts.ops.portable.activations import VALUES
from grouped_experts.ops.portable.fused_fp8 import scaled_activation_quantized
from grouped_experts.ops.portable.launch import Kernel, cdiv, contiguous, kernel, num_processors
from grouped_experts.ops.portable.schedule import schedule_of
from grouped_experts.ops.portable.tiles import row_block
from grouped_experts.ops.reference.fused_fp8 import dtype_of_da
from grouped_experts.ops.reference.quantize import empty_rows
from grouped_experts.rows import FP8_BLOCK


def launch_m_grouped_fp8(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    tiles: Tensor,
    tile: Tile,
    columns: int,
    made: Kernel,
    *,
    parts: int = 1,
    y: Tensor | None = None,
    h: Tensor | None = None,
    a: Tensor | None = None,
    a_scales: Tensor | None = None,
    probs: Tensor | None = None,
) -> None:
    """parts: 2 for gate and up side by side, `columns` of each."""
    x_desc, w_desc = operand_descriptors(x, w, columns, tile, True, parts)
    block = (BLOCK_M // 2, 1, FP8_BLOCK)
    row, row_strides = (1, columns), (columns, columns, 1)
    made.launch(
        (min(num_processors(x.device), (tiles.shape[0] - 1) * cdiv(columns, tile.block_n)),),
        x.device,
        x_desc,
        x_scales,
        w_desc,
        w_scales,
        None if y is None else ragged_descriptor(y, row, row_strides, block),
        None if a is None else ragged_descriptor(a, row, row_strides, block),
        None if h is None else ragged_descriptor(h, (parts, columns), (parts * columns, columns, 1), block),
        a_scales,
        probs,
        tiles,
        0 if a_scales is None else a_scales.stride(1),
        columns,
        x.shape[1],
        *x_scales.stride(),
        *w_scales.stride(),
    )


@functools.cache
def m_grouped_fp8(tile: Tile, out_dtype: torch.dtype, gaps: bool) -> Kernel:
    return kernel(
        m_grouped_fp8_kernel,
        EPILOGUE=epilogues_fp8.store_product,
        ACT=None,
        POWER_OF_TWO=False,
        BUFFERS=1 if out_dtype == torch.float32 else 2,
        GAPS=int(gaps),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        STAGES=tile.stages,
        num_warps=4,
    )


@functools.cache
def fc1_fp8(tile: Tile, activation: str, power_of_two: bool) -> Kernel:
    return kernel(
        m_grouped_fp8_kernel,
        EPILOGUE=epilogues_fp8.activate,
        ACT=VALUES[activation],
        POWER_OF_TWO=power_of_two,
        BUFFERS=2,
        GAPS=0,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        STAGES=tile.stages,
        num_warps=4,
    )


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
    """As `portable.products_fp8.m_grouped_gemm_fp8`."""
    (rows, _), (experts, columns) = x.shape, w.shape[:2]
    if not is_fast("m_grouped_gemm_fp8", rows, experts, columns, x, w, expected_rows=expected_rows):
        return portable.m_grouped_gemm_fp8(
            x, x_scales, w, w_scales, starts, ends, out_dtype, tiles, expected_rows, gaps
        )  # fmt: skip
    y = x.new_empty(rows, columns, dtype=out_dtype)
    tile = choose_tile("fp8 product", columns)
    tiles = schedule_of(tiles, starts, ends, rows, expected_rows)
    launch_m_grouped_fp8(x, x_scales, w, w_scales, tiles, tile, columns, m_grouped_fp8(tile, out_dtype, gaps), y=y)
    return y


def fc1_activation_fp8(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    probs: Tensor | None,
    activation: str,
    h_dtype: torch.dtype,
    power_of_two: bool,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, _), (experts, width) = x.shape, w.shape[:2]
    columns = width // 2
    but = None
    gated = ACTIVATIONS[activation].gated
    if not gated:
        but = f"{activation} has no gate"
    elif columns % FP8_BLOCK:
        but = f"{columns} columns are no multiple of {FP8_BLOCK}"
    elif h_dtype == torch.float32:
        but = "h is in float32"
    tiles = schedule_of(tiles, starts, ends, rows, expected_rows)
    if not is_fast("fc1_activation_fp8", rows, experts, columns, x, w, expected_rows=expected_rows, but=but):
        h = m_grouped_gemm_fp8(x, x_scales, w, w_scales, starts, ends, h_dtype, tiles, expected_rows, False)
        block = row_block(rows, experts, expected_rows)
        return h, *scaled_activation_quantized(h, probs, tiles, block, experts, activation, power_of_two)
    h = x.new_empty(rows, width, dtype=h_dtype)
    a, a_scales = empty_rows(h[:, :columns], torch.float8_e4m3fn)
    tile = choose_tile("fp8 gated", columns)
    launch_m_grouped_fp8(
        x,
        x_scales,
        w,
        w_scales,
        tiles,
        tile,
        columns,
        fc1_fp8(tile, activation, power_of_two),
        parts=2,
        h=h,
        a=a,
        a_scales=a_scales,
        probs=contiguous(probs),
    )
    return h, a, a_scales


def fc2_dgrad_activation_fp8(
    dy: Tensor,
    dy_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
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
    da = m_grouped_gemm_fp8(dy, dy_scales, w, w_scales, starts, ends, dtype_of_da(h), tiles, expected_rows, False)
    block = row_block(dy.shape[0], starts.shape[0], expected_rows)
    return quantized_gradients(
        da, h, starts, ends, probs, activation, dtype, power_of_two, need_rows, need_columns, need_a, need_dprobs,
        tiles, block
    )  # fmt: skip
