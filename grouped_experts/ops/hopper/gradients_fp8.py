"""What becomes of da in FP8, in Gluon for sm_90: the activation's backward, with the casts of what it makes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from grouped_experts.activations import get_activation
from grouped_experts.ops.hopper.casts import (
    ROWS_OF_FOUR,
    TRANSPOSED,
    WARPS,
    barriers,
    block_at,
    cast_columns,
    cast_rows,
)
from grouped_experts.ops.hopper.compat import async_load, barrier, reinterpret
from grouped_experts.ops.hopper.descriptors import ragged_descriptor, rows_at
from grouped_experts.ops.hopper.dispatch import suits_casts
from grouped_experts.ops.hopper.pipeline import advance
from grouped_experts.ops.portable.activations import GRADIENTS, VALUES
from grouped_experts.ops.portable.fused_fp8 import quantized_gradients as portable_gradients
from grouped_experts.ops.portable.launch import Kernel, contiguous, kernel, num_processors
from grouped_experts.ops.portable.products import sum_partials
from grouped_experts.ops.portable.schedule import build_schedule
from grouped_experts.ops.reference.fused_fp8 import empty_gradients
from grouped_experts.rows import FP8_BLOCK, padded_rows

PROGRAMS = 2  # of a processor
STAGES = 1  # of 96 KiB


@gluon.jit
def fetch(t, total, da_desc, h_desc, tiles_ptr, blocks_across, smem, full, stage):
    """Block t of da, of the gate and of up, where there is one."""
    BLOCK: gl.constexpr = da_desc.block_type.shape[2]
    if t < total:
        _block, m0, end, n0 = block_at(t, tiles_ptr, blocks_across, BLOCK)
        wrap, until, row = rows_at(m0, end)
        bar = full.index(stage)
        mbarrier.expect(bar, da_desc.block_type.nbytes + 2 * h_desc.block_type.nbytes)
        async_load(da_desc, [wrap, until, row, 0, n0], bar, smem.index(3 * stage))
        async_load(h_desc, [wrap, until, row, 0, n0], bar, smem.index(3 * stage + 1))
        async_load(h_desc, [wrap, until, row, 1, n0], bar, smem.index(3 * stage + 2))


@gluon.jit
def gradients_kernel(
    da_desc,  # ragged (T, 1, I), block (128, 1, 128)
    h_desc,  # ragged (T, 2, I), block (128, 1, 128)
    probs_ptr,  # (T,) or None
    tiles_ptr,  # (1 + tiles, 4), of 128 rows
    dh_ptr,  # (T, 2 I), or None
    dh_scales_ptr,  # (T, 2 I / 128), unit stride
    dh_columns_ptr,  # (2 I, P), or None
    dh_column_scales_ptr,  # (2 I, P / 128), unit stride
    a_ptr,  # (I, P), or None
    a_scales_ptr,  # (I, P / 128), unit stride
    partials_ptr,  # (I / 128, T), or None
    num_rows,
    I,
    P,
    stride_dhs,
    stride_dhp,
    stride_ap,
    ACT: gl.constexpr,
    ACT_GRADIENT: gl.constexpr,
    E5M2: gl.constexpr,  # dh; a is e4m3
    POWER_OF_TWO: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,  # at a time through the activation: more than these the registers do not hold
):
    """Grid (programs,), persistent. I is a multiple of 128."""
    BLOCK: gl.constexpr = da_desc.block_type.shape[2]
    smem = gl.allocate_shared_memory(h_desc.dtype, [3 * STAGES] + h_desc.block_type.shape, h_desc.layout)
    full = barriers(STAGES)
    fence_async_shared()
    blocks_across = I // BLOCK
    total = gl.load(tiles_ptr) * blocks_across
    programs = gl.num_programs(0)
    for i in gl.static_range(STAGES):
        fetch(gl.program_id(0) + i * programs, total, da_desc, h_desc, tiles_ptr, blocks_across, smem, full, i)
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), total, programs):
        block, m0, end, n0 = block_at(t, tiles_ptr, blocks_across, BLOCK)
        mbarrier.wait(full.index(stage), phase)
        da_smem = smem.index(3 * stage).reshape([BLOCK, BLOCK])
        gate_smem = smem.index(3 * stage + 1).reshape([BLOCK, BLOCK])
        up_smem = smem.index(3 * stage + 2).reshape([BLOCK, BLOCK])
        for i in gl.static_range(BLOCK // ROWS):
            differentiate(
                da_smem.slice(i * ROWS, ROWS), gate_smem.slice(i * ROWS, ROWS), up_smem.slice(i * ROWS, ROWS),
                m0 + i * ROWS, end, n0, probs_ptr, partials_ptr, num_rows, ACT, ACT_GRADIENT
            )  # fmt: skip
            barrier()  # or the compiler would mix them
        # Behind a, whose place is free once it is in registers, the others are transposed there.
        transposed = reinterpret(da_smem, gl.uint8, [BLOCK, BLOCK], TRANSPOSED)
        if a_ptr is not None:
            a = da_smem.load(ROWS_OF_FOUR).to(gl.float32)
            barrier()
            cast_columns(a, block, n0, a_ptr, a_scales_ptr, stride_ap, I, P, transposed, False, POWER_OF_TWO)
        for part in range(2):
            cast_both_ways(
                smem.index(3 * stage + 1 + part).reshape([BLOCK, BLOCK]), block, m0, end, part * I + n0, dh_ptr,
                dh_scales_ptr, stride_dhs, dh_columns_ptr, dh_column_scales_ptr, stride_dhp, 2 * I, P, transposed,
                E5M2, POWER_OF_TWO
            )  # fmt: skip
        fence_async_shared()
        barrier()
        fetch(t + STAGES * programs, total, da_desc, h_desc, tiles_ptr, blocks_across, smem, full, stage)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def differentiate(
    da_smem, gate_smem, up_smem, m0, end, n0, probs_ptr, partials_ptr, num_rows, ACT: gl.constexpr,
    ACT_GRADIENT: gl.constexpr
):  # fmt: skip
    """a = p * act(h) to the place of da, both parts of dh to those of h, rounded as h; and the sums of da * act(h)."""
    ROWS: gl.constexpr = da_smem.shape[0]
    COLUMNS: gl.constexpr = da_smem.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    m = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    if probs_ptr is not None:
        p = gl.load(probs_ptr + m, mask=m < end, other=0.0).to(gl.float32)
    else:
        p = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    da = da_smem.load(LAYOUT).to(gl.float32)
    gate, up = gate_smem.load(LAYOUT).to(gl.float32), up_smem.load(LAYOUT).to(gl.float32)
    s = ACT(gate, up, False)
    d_gate, d_up = ACT_GRADIENT(p[:, None] * da, gate, up, False)
    da_smem.store((p[:, None] * s).to(da_smem.dtype))
    gate_smem.store(d_gate.to(da_smem.dtype))
    up_smem.store(d_up.to(da_smem.dtype))
    if partials_ptr is not None:
        dp = gl.sum(da * s, 1)
        gl.store(partials_ptr + (n0 // COLUMNS).to(gl.int64) * num_rows + m, dp, mask=m < end)


@gluon.jit
def cast_both_ways(
    x_smem, block, m0, end, k0, data_ptr, scales_ptr, stride_s, columns_ptr, column_scales_ptr, stride_cs, K, P,
    transposed, E5M2: gl.constexpr, POWER_OF_TWO: gl.constexpr
):  # fmt: skip
    """By rows, by columns, or both: what has room."""
    if columns_ptr is not None:
        x = x_smem.load(ROWS_OF_FOUR).to(gl.float32)
        cast_columns(
            x, block, k0, columns_ptr, column_scales_ptr, stride_cs, K, P, transposed, E5M2, POWER_OF_TWO
        )  # fmt: skip
    if data_ptr is not None:
        x = x_smem.load(ROWS_OF_FOUR).to(gl.float32)
        cast_rows(x, m0, end, k0, data_ptr, scales_ptr, stride_s, K, E5M2, POWER_OF_TWO)


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
    """As `portable.fused_fp8.quantized_gradients`."""
    (rows, columns), experts = da.shape, starts.shape[0]
    needed = need_rows, need_columns, need_a, need_dprobs
    but = None
    if not experts:
        but = "there are no experts"
    elif not get_activation(activation).gated:
        but = f"{activation} has no gate"
    elif columns % FP8_BLOCK:
        but = f"{columns} columns are no multiple of {FP8_BLOCK}"
    if not suits_casts("quantized_gradients", da, h, but=but):
        return portable_gradients(da, h, starts, ends, probs, activation, dtype, power_of_two, *needed, tiles, tile)
    made = empty_gradients(h, columns, experts, dtype, *needed)
    partials = h.new_empty(columns // FP8_BLOCK, rows, dtype=torch.float32) if need_dprobs else None
    dh, dh_scales, dh_columns, dh_column_scales, a, a_scales, _ = made
    padded, block = padded_rows(rows, experts), (FP8_BLOCK, 1, FP8_BLOCK)
    gradients(activation, dtype == torch.float8_e5m2, power_of_two).launch(
        (min(PROGRAMS * num_processors(h.device), padded // FP8_BLOCK * (columns // FP8_BLOCK)),),
        h.device,
        ragged_descriptor(da, (1, columns), (columns, columns, 1), block),
        ragged_descriptor(h, (2, columns), (h.stride(0), columns, 1), block),
        contiguous(probs),
        tiles if tile == FP8_BLOCK else build_schedule(starts, ends, rows, FP8_BLOCK),
        dh if need_rows else None,
        dh_scales if need_rows else None,
        dh_columns if need_columns else None,
        dh_column_scales if need_columns else None,
        a if need_a else None,
        a_scales if need_a else None,
        partials,
        rows,
        columns,
        padded,
        dh_scales.stride(1),
        dh_column_scales.stride(1),
        a_scales.stride(1),
    )
    return *made[:6], sum_partials(partials, da, None, tiles, tile, experts)


@functools.cache
def gradients(activation: str, e5m2: bool, power_of_two: bool) -> Kernel:
    return kernel(
        gradients_kernel,
        num_warps=WARPS.value,
        max_registers=128,  # for so many programs
        ACT=VALUES[activation],
        ACT_GRADIENT=GRADIENTS[activation],
        E5M2=e5m2,
        POWER_OF_TWO=power_of_two,
        STAGES=STAGES,
        ROWS=32,
    )
