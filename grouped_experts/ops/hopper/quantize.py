"""Casts by columns, and by rows and by columns from one read, in Gluon for sm_90."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from grouped_experts.ops import portable
from grouped_experts.ops.hopper.casts import (
    COLUMNS_OF_FOUR,
    ROWS_OF_FOUR,
    TRANSPOSED,
    WARPS,
    barriers,
    block_at,
    cast_columns,
    cast_rows,
)
from grouped_experts.ops.hopper.compat import async_load, barrier
from grouped_experts.ops.hopper.descriptors import ragged_descriptor, rows_at
from grouped_experts.ops.hopper.dispatch import suits_casts
from grouped_experts.ops.hopper.pipeline import advance
from grouped_experts.ops.portable.launch import cdiv, kernel, num_processors
from grouped_experts.ops.portable.schedule import build_schedule
from grouped_experts.ops.reference.quantize import empty_columns, empty_rows
from grouped_experts.rows import FP8_BLOCK

PROGRAMS = 2  # of a processor
STAGES = 2


@gluon.jit
def fetch(t, total, x_desc, tiles_ptr, blocks_across, smem, full, stage):
    """Block t of x, where there is one."""
    BLOCK: gl.constexpr = x_desc.block_type.shape[2]
    if t < total:
        _block, m0, end, k0 = block_at(t, tiles_ptr, blocks_across, BLOCK)
        wrap, until, row = rows_at(m0, end)
        mbarrier.expect(full.index(stage), x_desc.block_type.nbytes)
        async_load(x_desc, [wrap, until, row, k0], full.index(stage), smem.index(stage))


@gluon.jit
def quantize_columns_kernel(
    x_desc,  # ragged (T, K), block (128, 128)
    tiles_ptr,  # (1 + tiles, 4), of 128 rows
    data_ptr,  # (K, P)
    scales_ptr,  # (K, P / 128), unit stride
    row_data_ptr,  # (T, K), as `quantize_rows`, or None
    row_scales_ptr,  # (T, K / 128), unit stride
    K,
    P,
    stride_sp,
    stride_rs,
    E5M2: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (programs,), persistent."""
    BLOCK: gl.constexpr = x_desc.block_type.shape[2]
    smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    transposed = gl.allocate_shared_memory(gl.uint8, [BLOCK, BLOCK], TRANSPOSED)
    full = barriers(STAGES)
    fence_async_shared()
    blocks_across = gl.cdiv(K, BLOCK)
    total = gl.load(tiles_ptr) * blocks_across
    programs = gl.num_programs(0)
    for i in gl.static_range(STAGES):
        fetch(gl.program_id(0) + i * programs, total, x_desc, tiles_ptr, blocks_across, smem, full, i)
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), total, programs):
        block, m0, end, k0 = block_at(t, tiles_ptr, blocks_across, BLOCK)
        mbarrier.wait(full.index(stage), phase)
        here = smem.index(stage).reshape([BLOCK, BLOCK])
        if row_data_ptr is not None:
            x = here.load(ROWS_OF_FOUR).to(gl.float32)
            cast_rows(x, m0, end, k0, row_data_ptr, row_scales_ptr, stride_rs, K, E5M2, POWER_OF_TWO)
        x = here.load(COLUMNS_OF_FOUR).to(gl.float32)  # once more: registers for two programs
        barrier()
        fetch(t + STAGES * programs, total, x_desc, tiles_ptr, blocks_across, smem, full, stage)
        cast_columns(x, block, k0, data_ptr, scales_ptr, stride_sp, K, P, transposed, E5M2, POWER_OF_TWO)
        stage, phase = advance(stage, phase, STAGES)


def quantize_columns(
    x: Tensor, starts: Tensor, ends: Tensor, dtype: torch.dtype, power_of_two: bool, x_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if x_scales is not None or not suits_casts("quantize_columns", x):
        return portable.quantize_columns(x, starts, ends, dtype, power_of_two, x_scales)
    outputs = empty_columns(x, starts.shape[0], dtype)
    launch_columns(x, starts, ends, power_of_two, *outputs, None, None)
    return outputs


def quantize_rows_and_columns(
    x: Tensor, starts: Tensor, ends: Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not suits_casts("quantize_rows_and_columns", x):
        return portable.quantize_rows_and_columns(x, starts, ends, dtype, power_of_two)
    rows, columns = empty_rows(x, dtype), empty_columns(x, starts.shape[0], dtype)
    launch_columns(x, starts, ends, power_of_two, *columns, *rows)
    return *rows, *columns


def launch_columns(
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    power_of_two: bool,
    data: Tensor,
    scales: Tensor,
    row_data: Tensor | None,
    row_scales: Tensor | None,
) -> None:
    columns, padded = data.shape
    blocks = padded // FP8_BLOCK * cdiv(columns, FP8_BLOCK)
    if not blocks:  # few rows, of no expert
        return
    kernel(
        quantize_columns_kernel,
        num_warps=WARPS.value,
        max_registers=128,  # for so many programs
        E5M2=data.dtype == torch.float8_e5m2,
        POWER_OF_TWO=power_of_two,
        STAGES=STAGES,
    ).launch(
        (min(PROGRAMS * num_processors(x.device), blocks),),
        x.device,
        ragged_descriptor(x, (columns,), x.stride(), (FP8_BLOCK, FP8_BLOCK)),
        build_schedule(starts, ends, x.shape[0], FP8_BLOCK),
        data,
        scales,
        row_data,
        row_scales,
        columns,
        padded,
        scales.stride(1),
        0 if row_scales is None else row_scales.stride(1),
    )
