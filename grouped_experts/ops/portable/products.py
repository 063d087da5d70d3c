"""The m-grouped products as functions of tensors: one kernel, launched with an epilogue for each op."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouped_experts.activations import ACTIVATIONS
from grouped_experts.ops.portable import activations, epilogues
from grouped_experts.ops.portable.elementwise import sum_partials_kernel
from grouped_experts.ops.portable.launch import (
    Kernel,
    capability,
    cdiv,
    contiguous,
    descriptor,
    dot_precision,
    kernel,
    num_processors,
    suits_tma,
)
from grouped_experts.ops.portable.m_grouped import m_grouped_kernel
from grouped_experts.ops.portable.permute import gather_rows
from grouped_experts.ops.portable.schedule import max_tiles, schedule_of
from grouped_experts.ops.portable.tiles import ROW_BLOCKS, Tile, choose_tile, contraction, row_block
from grouped_experts.rows import num_rows


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What one op adds to the skeleton, apart from tensors."""

    function: Any  # of `epilogues`
    ahead: Any = None  # of `epilogues`: what the function reads
    act: Any = None  # of `activations`; apart, since of a tuple Triton does not notice when a function changes
    act_gradient: Any = None
    two_products: bool = False  # gate and up side by side
    gated_h: bool = False
    gaps: bool = False  # rows of no expert are tiles as well


STORE = Epilogue(epilogues.store_product, gaps=True)
STORE_OWNED = Epilogue(epilogues.store_product)
ACTIVATE = {
    name: Epilogue(epilogues.activate, act=activations.VALUES[name], two_products=act.gated, gated_h=act.gated)
    for name, act in ACTIVATIONS.items()
}
ACTIVATE_BACKWARD = {
    name: Epilogue(
        epilogues.activate_backward,
        epilogues.load_h,
        activations.VALUES[name],
        activations.GRADIENTS[name],
        gated_h=act.gated,
    )
    for name, act in ACTIVATIONS.items()
}


def launch_m_grouped(
    epilogue: Epilogue,
    x: Tensor,
    w: Tensor,
    tiles: Tensor,
    tile: Tile,
    columns: int,
    transpose_w: bool,
    *,
    y: Tensor | None = None,
    a: Tensor | None = None,
    h: Tensor | None = None,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    partials: Tensor | None = None,
    row_index: Tensor | None = None,
) -> None:
    depth = x.shape[1]
    programs = min(tile.per_processor * num_processors(x.device), (tiles.shape[0] - 1) * cdiv(columns, tile.block_n))
    if programs == 0:
        return
    tma_x, tma_w = tile.tma_rows and suits_tma(x) and row_index is None, suits_tma(w)
    block_w = [1, tile.block_n, tile.block_k] if transpose_w else [1, tile.block_k, tile.block_n]
    stride_wn, stride_wk = (w.stride(1), w.stride(2)) if transpose_w else (w.stride(2), w.stride(1))
    outputs: tuple[Any, ...] = (None, None, None)
    if tile.tma_out and (columns % tile.block_n == 0 or not epilogue.gated_h):
        given = [out for out in (y, a, h) if out is not None]
        if all(map(suits_tma, given)):
            block_y = [tile.block_m, tile.block_n // tile.split]  # each part by itself
            outputs = tuple(None if out is None else descriptor(out, block_y) for out in (y, a, h))
    even, tma_out = columns % tile.block_n == 0, outputs != (None, None, None)
    m_grouped(epilogue, tile, transpose_w, even, tma_x, tma_w, tma_out, dot_precision(x.dtype)).launch(
        (programs,),
        x.device,
        descriptor(x, [tile.block_m, tile.block_k]) if tma_x else x,
        descriptor(w, block_w) if tma_w else w,
        tiles,
        *outputs,
        y,
        a,
        h,
        bias,
        probs,
        partials,
        row_index,
        num_rows(x, row_index),
        x.shape[0],
        columns,
        depth,
        x.stride(0),
        x.stride(1),
        w.stride(0),
        stride_wn,
        stride_wk,
    )


@functools.cache
def m_grouped(
    epilogue: Epilogue,
    tile: Tile,
    transpose_w: bool,
    even: bool,
    tma_x: bool,
    tma_w: bool,
    tma_out: bool,
    precision: str,
) -> Kernel:
    return kernel(
        m_grouped_kernel,
        EPILOGUE=epilogue.function,
        AHEAD=epilogue.ahead,
        ACT=epilogue.act,
        ACT_GRADIENT=epilogue.act_gradient,
        TWO_PRODUCTS=epilogue.two_products,
        GATED_H=epilogue.gated_h,
        EVEN_N=even,
        SPLIT=tile.split,
        GAPS=int(epilogue.gaps),
        TRANSPOSE_W=transpose_w,
        TMA_X=tma_x,
        TMA_W=tma_w,
        TMA_OUT=tma_out,
        PRECISION=precision,
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
    row_index: Tensor | None = None,
    zero_gaps: bool = True,
    expected_rows: int = 0,
) -> Tensor:
    columns = w.shape[1 if transpose_w else 2]
    y = x.new_empty(num_rows(x, row_index), columns)
    if y.numel():
        tiles = schedule_of(tiles, starts, ends, y.shape[0], expected_rows)
        block = row_block(y.shape[0], w.shape[0], expected_rows)
        launch_m_grouped(
            STORE if zero_gaps else STORE_OWNED,
            x,
            w,
            tiles,
            choose_tile("product", x.dtype, capability(x.device), block, contraction(x.shape[1])),
            columns,
            transpose_w,
            y=y,
            bias=contiguous(bias),
            probs=contiguous(bias_scale),
            row_index=row_index,
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
    row_index: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    gate = ACTIVATIONS[activation].gated
    width = fc1_weight.shape[1]
    columns = width // 2 if gate else width
    rows = num_rows(x, row_index)
    h, a = x.new_empty(rows, width), x.new_empty(rows, columns)
    if h.numel():
        tiles = schedule_of(tiles, starts, ends, rows, expected_rows)
        kind = "fc1" if gate else "product"
        block = row_block(rows, fc1_weight.shape[0], expected_rows)
        if block == ROW_BLOCKS[-1] and suits_tma(x):  # TMA needs no addresses, with which gate and up would spill
            x, row_index = gather_rows(x, row_index), None
        tile = choose_tile(kind, x.dtype, capability(x.device), block)
        launch_m_grouped(
            ACTIVATE[activation],
            x,
            fc1_weight,
            tiles,
            tile,
            columns,
            True,
            a=a,
            h=h,
            bias=contiguous(fc1_bias),
            probs=contiguous(probs),
            row_index=row_index,
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
    row_index: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = h.shape[0], fc2_weight.shape[2]
    dh, a = h.new_empty(h.shape), h.new_empty(rows if need_a else 0, columns)
    if rows == 0:
        return dh, a, h.new_empty(0, dtype=torch.float32)
    tiles = schedule_of(tiles, starts, ends, rows, expected_rows)
    block = row_block(rows, fc2_weight.shape[0], expected_rows)
    if block == ROW_BLOCKS[-1]:  # with the addresses of so many rows, the activation's backward would spill
        dy, row_index = gather_rows(dy, row_index), None
    tile = choose_tile("dgrad", dy.dtype, capability(dy.device), block)
    column_tiles = cdiv(columns, tile.block_n) * tile.split
    partials = h.new_empty(column_tiles, rows, dtype=torch.float32) if need_dprobs else None
    launch_m_grouped(
        ACTIVATE_BACKWARD[activation],
        dy,
        fc2_weight,
        tiles,
        tile,
        columns,
        False,
        y=dh,
        a=a if need_a else None,
        h=h.contiguous(),
        probs=contiguous(probs),
        partials=partials,
        row_index=row_index,
    )
    return dh, a, sum_partials(partials, dy, fc2_bias, tiles, tile.block_m, starts.shape[0], row_index)


def sum_partials(
    partials: Tensor | None,
    dy: Tensor,
    fc2_bias: Tensor | None,
    tiles: Tensor,
    block_m: int,
    num_experts: int,
    row_index: Tensor | None = None,
) -> Tensor:
    """dprobs (T,): the sums of every tile of columns (column tiles, T), and with a bias dy . b2_e; (0,) of None."""
    rows = num_rows(dy, row_index)
    dprobs = dy.new_empty(rows if partials is not None else 0, dtype=torch.float32)
    if partials is not None:
        kernel(sum_partials_kernel, TILE=block_m, BLOCK=32).launch(
            (max_tiles(rows, num_experts, block_m),),
            dy.device,
            partials,
            None if fc2_bias is None else dy,
            contiguous(fc2_bias),
            row_index,
            tiles,
            dprobs,
            rows,
            dy.shape[0],
            partials.shape[0],
            dy.shape[1],
            dy.stride(0),
            dy.stride(1),
        )
    return dprobs
