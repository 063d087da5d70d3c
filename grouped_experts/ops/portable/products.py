"""The grouped products as functions of tensors: what each op of `grouped_experts.ops` launches on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from grouped_experts.activations import get_activation
from grouped_experts.ops.portable import activations, epilogues
from grouped_experts.ops.portable.elementwise import (
    scaled_activation_backward_kernel,
    scaled_activation_kernel,
    sum_partials_kernel,
)
from grouped_experts.ops.portable.k_grouped import k_grouped_kernel, k_grouped_sum_kernel
from grouped_experts.ops.portable.launch import (
    capability,
    descriptor,
    dot_precision,
    num_processors,
    on_device,
    suits_tma,
)
from grouped_experts.ops.portable.m_grouped import m_grouped_kernel
from grouped_experts.ops.portable.schedule import build_schedule, max_tiles
from grouped_experts.ops.portable.tiles import Tile, choose_tile, row_block

ROWS = 8  # rows of a program of the elementwise kernels


def tile_schedule(starts: Tensor, ends: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """On a CPU, where only the interpreter runs these kernels, empty as the reference's: products make their own."""
    return starts.new_empty(0, 4) if starts.device.type == "cpu" else given_or_made(None, starts, ends, num_rows)


def given_or_made(tiles: Tensor | None, starts: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    if tiles is not None and tiles.shape[0]:
        return tiles
    return build_schedule(starts, ends, num_rows, row_block(num_rows, starts.shape[0]))


def launch_m_grouped(
    x: Tensor,
    w: Tensor,
    tiles: Tensor,
    tile: Tile,
    columns: int,
    transpose_w: bool,
    epilogue: Any,
    *,
    y: Tensor | None = None,
    a: Tensor | None = None,
    h: Tensor | None = None,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    partials: Tensor | None = None,
    act: Any = None,
    gate_and_up: bool = False,
    gated_h: bool = False,
    gaps: bool = False,
) -> None:
    num_rows, depth = x.shape
    tma_x, tma_w = suits_tma(x), suits_tma(w)
    block_w = [1, tile.block_n, tile.block_k] if transpose_w else [1, tile.block_k, tile.block_n]
    stride_wn, stride_wk = (w.stride(1), w.stride(2)) if transpose_w else (w.stride(2), w.stride(1))
    block_y = [tile.block_m, tile.block_n // 2 if tile.halves else tile.block_n]  # halves are stored by themselves
    outputs = (y, a, h)
    tma_out = tile.tma_out and all(out is None or suits_tma(out) for out in outputs)
    tma_out = tma_out and (columns % tile.block_n == 0 or not gated_h)
    programs = min(
        tile.per_processor * num_processors(x.device), (tiles.shape[0] - 1) * triton.cdiv(columns, tile.block_n)
    )
    if programs == 0:
        return
    with on_device(x):
        m_grouped_kernel[(programs,)](
            descriptor(x, [tile.block_m, tile.block_k]) if tma_x else x,
            descriptor(w, block_w) if tma_w else w,
            tiles,
            *(descriptor(out, block_y) if out is not None and tma_out else None for out in outputs),
            y,
            a,
            h,
            bias,
            probs,
            partials,
            num_rows,
            columns,
            depth,
            x.stride(0),
            x.stride(1),
            w.stride(0),
            stride_wn,
            stride_wk,
            EPILOGUE=epilogue,
            ACT=act,
            GATED=gate_and_up,
            GATED_H=gated_h,
            HALVES=tile.halves,
            GAPS=int(gaps),
            TRANSPOSE_W=transpose_w,
            TMA_X=tma_x,
            TMA_W=tma_w,
            TMA_OUT=tma_out,
            PRECISION=dot_precision(x.dtype),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP_M=tile.group_m,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def m_grouped_gemm(
    x: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    transpose_w: bool,
    tiles: Tensor | None = None,
) -> Tensor:
    columns = w.shape[1 if transpose_w else 2]
    y = x.new_empty(x.shape[0], columns)
    if y.numel():
        tiles = given_or_made(tiles, starts, ends, x.shape[0])
        tile = choose_tile("product", x.dtype, capability(x.device), row_block(x.shape[0], w.shape[0]))
        launch_m_grouped(
            x,
            w,
            tiles,
            tile,
            columns,
            transpose_w,
            epilogues.store_product,
            y=y,
            bias=contiguous(bias),
            probs=contiguous(bias_scale),
            gaps=True,
        )
    return y


def fc1_activation(
    x: Tensor,
    fc1_weight: Tensor,
    starts: Tensor,
    ends: Tensor,
    fc1_bias: Tensor | None,
    probs: Tensor | None,
    activation: str,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    gate = get_activation(activation).gated
    width = fc1_weight.shape[1]
    columns = width // 2 if gate else width
    h, a = x.new_empty(x.shape[0], width), x.new_empty(x.shape[0], columns)
    if h.numel():
        tiles = given_or_made(tiles, starts, ends, x.shape[0])
        kind = "fc1" if gate else "product"
        tile = choose_tile(kind, x.dtype, capability(x.device), row_block(x.shape[0], fc1_weight.shape[0]))
        launch_m_grouped(
            x,
            fc1_weight,
            tiles,
            tile,
            columns,
            True,
            epilogues.activate,
            a=a,
            h=h,
            bias=contiguous(fc1_bias),
            probs=contiguous(probs),
            act=activations.VALUES[activation],
            gate_and_up=gate,
            gated_h=gate,
        )
    return h, a


def fc2_dgrad_activation(
    dy: Tensor,
    fc2_weight: Tensor,
    h: Tensor,
    starts: Tensor,
    ends: Tensor,
    probs: Tensor | None,
    fc2_bias: Tensor | None,
    activation: str,
    need_a: bool,
    need_dprobs: bool,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, columns = dy.shape[0], fc2_weight.shape[2]
    dh, a = h.new_empty(h.shape), h.new_empty(num_rows if need_a else 0, columns)
    dprobs = h.new_empty(num_rows if need_dprobs else 0, dtype=torch.float32)
    if num_rows == 0:
        return dh, a, dprobs
    tiles = given_or_made(tiles, starts, ends, num_rows)
    tile = choose_tile("dgrad", dy.dtype, capability(dy.device), row_block(num_rows, fc2_weight.shape[0]))
    column_tiles = triton.cdiv(columns, tile.block_n) * (2 if tile.halves else 1)
    partials = dprobs.new_empty(column_tiles, num_rows) if need_dprobs else None
    launch_m_grouped(
        dy,
        fc2_weight,
        tiles,
        tile,
        columns,
        False,
        epilogues.activate_backward,
        y=dh,
        a=a if need_a else None,
        h=h.contiguous(),
        probs=contiguous(probs),
        partials=partials,
        act=(activations.VALUES[activation], activations.GRADIENTS[activation]),
        gated_h=get_activation(activation).gated,
    )
    if need_dprobs:
        with on_device(dy):
            sum_partials_kernel[(max_tiles(num_rows, starts.shape[0], tile.block_m),)](
                partials,
                None if fc2_bias is None else dy,
                contiguous(fc2_bias),
                tiles,
                dprobs,
                num_rows,
                column_tiles,
                dy.shape[1],
                dy.stride(0),
                dy.stride(1),
                TILE=tile.block_m,
                BLOCK=32,
            )
    return dh, a, dprobs


def k_grouped_gemm(a: Tensor, b: Tensor, starts: Tensor, ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    c = a.new_empty(starts.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)
    launch_k_grouped(c, a, b, starts, ends, accumulate=False)
    return c


def k_grouped_gemm_accumulate(c: Tensor, a: Tensor, b: Tensor, starts: Tensor, ends: Tensor) -> None:
    launch_k_grouped(c, a, b, starts, ends, accumulate=True)


def launch_k_grouped(c: Tensor, a: Tensor, b: Tensor, starts: Tensor, ends: Tensor, accumulate: bool) -> None:
    num_experts, rows, columns = c.shape
    if c.numel() == 0:
        return
    tile = choose_tile("wgrad", a.dtype, capability(a.device))
    tma = suits_tma(a) and suits_tma(b)
    block_c = [tile.block_m, tile.block_n // 2 if tile.halves else tile.block_n]
    tma_c = tile.tma_out and suits_tma(c) and c.is_contiguous() and rows % tile.block_m == 0
    tiles = num_experts * triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n)
    programs = min(tile.per_processor * num_processors(a.device), tiles)
    with on_device(a):
        k_grouped_kernel[(programs,)](
            descriptor(a, [tile.block_k, tile.block_m]) if tma else a,
            descriptor(b, [tile.block_k, tile.block_n]) if tma else b,
            descriptor(c.view(-1, columns), block_c) if tma_c else None,
            a,
            b,
            c,
            starts,
            ends,
            a.shape[0],
            num_experts,
            rows,
            columns,
            *a.stride(),
            *b.stride(),
            *c.stride(),
            ACCUMULATE=accumulate,
            TMA=tma,
            TMA_C=tma_c,
            HALVES=tile.halves,
            PRECISION=dot_precision(a.dtype),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_T=tile.block_k,
            GROUP_M=tile.group_m,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def k_grouped_sum(a: Tensor, starts: Tensor, ends: Tensor, scale: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    num_experts, columns = starts.shape[0], a.shape[1]
    c = a.new_empty(num_experts, columns, dtype=out_dtype)
    if c.numel():
        with on_device(a):
            k_grouped_sum_kernel[(num_experts, triton.cdiv(columns, 64))](
                a,
                scale,
                c,
                starts,
                ends,
                a.shape[0],
                num_experts,
                columns,
                *a.stride(),
                0 if scale is None else scale.stride(0),
                BLOCK_T=32,
                BLOCK_N=64,
            )
    return c


def scaled_activation(
    h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str
) -> Tensor:
    gate = get_activation(activation).gated
    columns = h.shape[1] // 2 if gate else h.shape[1]
    a = h.new_empty(h.shape[0], columns)
    if a.numel():
        tiles, block_m, slots = elementwise_schedule(starts, ends, h)
        block = min(1024, triton.next_power_of_2(columns))
        with on_device(h):
            scaled_activation_kernel[(slots, triton.cdiv(columns, block))](
                h,
                contiguous(probs),
                tiles,
                a,
                columns,
                *h.stride(),
                ACT=activations.VALUES[activation],
                GATED=gate,
                TILE=block_m,
                ROWS=ROWS,
                BLOCK=block,
                num_warps=8,
            )
    return a


def scaled_activation_backward(
    da: Tensor, h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    dh, a, dprobs = h.new_empty(h.shape), da.new_empty(da.shape), h.new_empty(h.shape[0], dtype=torch.float32)
    if h.shape[0]:
        tiles, block_m, slots = elementwise_schedule(starts, ends, h)
        block = min(512, max(16, triton.next_power_of_2(da.shape[1])))
        with on_device(h):
            scaled_activation_backward_kernel[(slots,)](
                da,
                h,
                contiguous(probs),
                tiles,
                dh,
                a,
                dprobs,
                da.shape[1],
                *da.stride(),
                *h.stride(),
                ACT=(activations.VALUES[activation], activations.GRADIENTS[activation]),
                GATED=get_activation(activation).gated,
                TILE=block_m,
                ROWS=ROWS,
                BLOCK=block,
                num_warps=8,
            )
    return dh, a, dprobs


def elementwise_schedule(starts: Tensor | None, ends: Tensor | None, h: Tensor) -> tuple[Tensor, int, int]:
    """The schedule of the ranges, or of one range of all rows; rows of its tiles; programs that cover them all."""
    if starts is None or ends is None:
        starts = torch.zeros(1, dtype=torch.int32, device=h.device)
        ends = torch.full((1,), h.shape[0], dtype=torch.int32, device=h.device)
    block_m = row_block(h.shape[0], starts.shape[0])
    slots = max_tiles(h.shape[0], starts.shape[0], block_m) * (block_m // ROWS)
    return given_or_made(None, starts, ends, h.shape[0]), block_m, slots


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
