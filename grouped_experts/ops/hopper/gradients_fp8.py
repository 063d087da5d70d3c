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
    COLUMNS_OF_FOUR,
    ROWS_OF_FOUR,
    TRANSPOSED,
    WARPS,
    block_at,
    cast_columns,
    cast_rows,
)
from grouped_experts.ops.hopper.compat import async_load, barrier, reinterpret
from grouped_experts.ops.hopper.descriptors import ragged_descriptor, rows_at
from grouped_experts.ops.hopper.dispatch import suits_casts
from grouped_experts.ops.portable.activations import GRADIENTS, VALUES
from grouped_experts.ops.portable.fused_fp8 import quantized_gradients as portable_gradients
from grouped_experts.ops.portable.launch import Kernel, contiguous, kernel, num_processors
from grouped_experts.ops.portable.products import sum_partials
from grouped_experts.ops.portable.schedule import build_schedule
from grouped_experts.ops.reference.fused_fp8 import empty_gradients
from grouped_experts.rows import FP8_BLOCK, padded_rows

PROGRAMS = 2  # of a processor, 96 KiB each
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # for the activation


@gluon.jit
def fetch_gate(m0, end, n0, h_desc, smem, full):
    wrap, until, row = rows_at(m0, end)
    mbarrier.expect(full, h_desc.block_type.nbytes)
    async_load(h_desc, [wrap, until, row, 0, n0], full, smem.index(1))


@gluon.jit
def fetch_others(m0, end, n0, da_desc, h_desc, smem, full):
    """da, and the up projection."""
    wrap, until, row = rows_at(m0, end)
    mbarrier.expect(full, da_desc.block_type.nbytes + h_desc.block_type.nbytes)
    async_load(da_desc, [wrap, until, row, 0, n0], full, smem.index(0))
    async_load(h_desc, [wrap, until, row, 1, n0], full, smem.index(2))


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
    ROWS: gl.constexpr,  # at a time through the activation: more than these the registers do not hold
):
    """Grid (programs,), persistent. I is a multiple of 128."""
    BLOCK: gl.constexpr = da_desc.block_type.shape[2]
    smem = gl.allocate_shared_memory(h_desc.dtype, [3] + h_desc.block_type.shape, h_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=2)
    fence_async_shared()
    blocks_across = I // BLOCK
    total = gl.load(tiles_ptr) * blocks_across
    programs = gl.num_programs(0)
    if gl.program_id(0) < total:
        _block, m0, end, n0 = block_at(gl.program_id(0), tiles_ptr, blocks_across, BLOCK)
        fetch_gate(m0, end, n0, h_desc, smem, full)
        fetch_others(m0, end, n0, da_desc, h_desc, smem, full)
    phase = 0
    for t in range(gl.program_id(0), total, programs):
        block, m0, end, n0 = block_at(t, tiles_ptr, blocks_across, BLOCK)
        more = t + programs < total
        probs = load_probs(probs_ptr, m0, end, BLOCK, ROWS)  # while the block is on its way
        mbarrier.wait(full, phase)
        da_smem = smem.index(0).reshape([BLOCK, BLOCK])
        gate_smem = smem.index(1).reshape([BLOCK, BLOCK])
        up_smem = smem.index(2).reshape([BLOCK, BLOCK])
        for i in gl.static_range(BLOCK // ROWS):
            differentiate(
                da_smem.slice(i * ROWS, ROWS), gate_smem.slice(i * ROWS, ROWS), up_smem.slice(i * ROWS, ROWS),
                m0 + i * ROWS, end, n0, probs[i], partials_ptr, num_rows, ACT, ACT_GRADIENT
            )  # fmt: skip
            barrier()  # or the compiler would mix them
        # Behind a, whose place is free once it is in registers, the others are transposed there.
        transposed = reinterpret(da_smem, gl.uint8, [BLOCK, BLOCK], TRANSPOSED)
        if a_ptr is not None:
            a = da_smem.load(COLUMNS_OF_FOUR).to(gl.float32)
            barrier()
            cast_columns(a, block, n0, a_ptr, a_scales_ptr, stride_ap, I, P, transposed, False, POWER_OF_TWO)
        for part in range(2):
            _block, m0_next, end_next, n0_next = block_at(
                gl.where(more, t + programs, t), tiles_ptr, blocks_across, BLOCK
            )  # fmt: skip
            cast_both_ways(
                smem.index(1 + part).reshape([BLOCK, BLOCK]), block, m0, end, part * I + n0, dh_ptr, dh_scales_ptr,
                stride_dhs, dh_columns_ptr, dh_column_scales_ptr, stride_dhp, 2 * I, P, transposed, E5M2, POWER_OF_TWO
            )  # fmt: skip
            fence_async_shared()
            barrier()
            if more & (part == 0):  # it comes while the other part is cast
                fetch_gate(m0_next, end_next, n0_next, h_desc, smem, full)
            if more & (part == 1):
                fetch_others(m0_next, end_next, n0_next, da_desc, h_desc, smem, full)
        phase ^= 1


@gluon.jit
def load_probs(probs_ptr, m0, end, BLOCK: gl.constexpr, ROWS: gl.constexpr):
    """Those of a block, ROWS at a time; ones if there are none."""
    probs = ()
    for i in gl.static_range(BLOCK // ROWS):
        m = m0 + i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        if probs_ptr is not None:
            probs = probs + (gl.load(probs_ptr + m, mask=m < end, other=0.0).to(gl.float32),)  # type: ignore[assignment]
        else:
            probs = probs + (gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, BY_ROWS)),)  # type: ignore[assignment]
    return probs


@gluon.jit
def differentiate(
    da_smem, gate_smem, up_smem, m0, end, n0, p, partials_ptr, num_rows, ACT: gl.constexpr,
    ACT_GRADIENT: gl.constexpr
):  # fmt: skip
    """a = p * act(h) to the place of da, both parts of dh to those of h, rounded as h; and the sums of da * act(h).

    p: of these rows.
    """
    ROWS: gl.constexpr = da_smem.shape[0]
    COLUMNS: gl.constexpr = da_smem.shape[1]
    m = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
    da = da_smem.load(BY_ROWS).to(gl.float32)
    gate, up = gate_smem.load(BY_ROWS).to(gl.float32), up_smem.load(BY_ROWS).to(gl.float32)
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
        x = x_smem.load(COLUMNS_OF_FOUR).to(gl.float32)
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
        ROWS=32,
    )
