"""The m-grouped products as functions of tensors: one Gluon kernel, launched with an epilogue for each op."""

from __future__ import annotations

import functools

from torch import Tensor

from grouped_experts.activations import ACTIVATIONS
from grouped_experts.ops import portable
from grouped_experts.ops.hopper import epilogues
from grouped_experts.ops.hopper.descriptors import operand_descriptors, ragged_descriptor
from grouped_experts.ops.hopper.dispatch import is_fast
from grouped_experts.ops.hopper.m_grouped import m_grouped_kernel
from grouped_experts.ops.hopper.tiles import BLOCK_M, Tile, choose_tile
from grouped_experts.ops.portable.activations import VALUES
from grouped_experts.ops.portable.launch import Kernel, cdiv, contiguous, kernel, num_processors
from grouped_experts.ops.portable.permute import gather_rows
from grouped_experts.ops.portable.schedule import schedule_of
from grouped_experts.rows import num_rows


def launch_m_grouped(
    x: Tensor,
    w: Tensor,
    tiles: Tensor,
    tile: Tile,
    columns: int,
    made: Kernel,
    *,
    transpose_w: bool = True,
    parts: int = 1,
    y: Tensor | None = None,
    a: Tensor | None = None,
    h: Tensor | None = None,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    row_index: Tensor | None = None,
) -> None:
    """parts: 2 for gate and up side by side, `columns` of each; h has as many."""
    gathered = row_index is not None
    # Of an accumulator with an activation each half leaves by itself: gate and up, or left and right.
    block = (BLOCK_M // 2, 1, tile.block_n if h is None else tile.block_n * parts // 2)
    row, row_strides = (1, columns), (columns, columns, 1)
    made.launch(
        (min(num_processors(x.device), (tiles.shape[0] - 1) * cdiv(columns, tile.block_n)),),
        x.device,
        *operand_descriptors(x, w, columns, tile, transpose_w, parts),
        None if y is None else ragged_descriptor(y, row, row_strides, block),
        None if a is None else ragged_descriptor(a, row, row_strides, block),
        None if h is None else ragged_descriptor(h, (parts, columns), (parts * columns, columns, 1), block),
        bias,
        probs,
        tiles,
        x if gathered else None,
        row_index,
        x.shape[0] if gathered else 0,
        x.stride(0) // 8 if gathered else 0,
        columns,
        x.shape[1] // 8 if gathered else x.shape[1],
    )


@functools.cache
def m_grouped(tile: Tile, transpose_w: bool, activation: str | None, zero_gaps: bool) -> Kernel:
    """With a plain store or the activation; with the tiles of all rows, or of those that experts own."""
    return kernel(
        m_grouped_kernel,
        EPILOGUE=epilogues.store_product if activation is None else epilogues.activate,
        ACT=None if activation is None else VALUES[activation],
        GATED=activation is not None and ACTIVATIONS[activation].gated,
        BUFFERS=1 if activation is None else 2,
        GAPS=int(zero_gaps),
        TRANSPOSE_W=transpose_w,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        STAGES=tile.stages,
        num_warps=4,
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
    columns, rows = w.shape[1 if transpose_w else 2], num_rows(x, row_index)
    if not is_fast(
        "m_grouped_gemm", rows, w.shape[0], columns, x, w, indexed=(row_index,), expected_rows=expected_rows
    ):
        return portable.m_grouped_gemm(
            x, w, starts, ends, bias, bias_scale, transpose_w, tiles, row_index, zero_gaps, expected_rows
        )
    y = x.new_empty(rows, columns)
    tile = choose_tile("product", columns)
    launch_m_grouped(
        x,
        w,
        schedule_of(tiles, starts, ends, rows, expected_rows),
        tile,
        columns,
        m_grouped(tile, transpose_w, None, zero_gaps),
        transpose_w=transpose_w,
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
    parts = 2 if ACTIVATIONS[activation].gated else 1
    columns = fc1_weight.shape[1] // parts
    rows = num_rows(x, row_index)
    experts, indexed = fc1_weight.shape[0], (row_index,)
    if not is_fast(
        "fc1_activation", rows, experts, columns, x, fc1_weight, indexed=indexed, expected_rows=expected_rows
    ):
        return portable.fc1_activation(
            x, fc1_weight, starts, ends, fc1_bias, probs, activation, tiles, row_index, expected_rows
        )
    if fc1_bias is not None:  # with its registers, some activations would spill
        x, row_index = gather_rows(x, row_index), None
    h, a = x.new_empty(rows, fc1_weight.shape[1]), x.new_empty(rows, columns)
    tile = choose_tile("gated" if parts == 2 else "ungated", columns)
    made = m_grouped(tile, True, activation, zero_gaps=False)
    schedule = schedule_of(tiles, starts, ends, rows, expected_rows)
    launch_m_grouped(
        x,
        fc1_weight,
        schedule,
        tile,
        columns,
        made,
        parts=parts,
        a=a,
        h=h,
        bias=contiguous(fc1_bias),
        probs=contiguous(probs),
        row_index=row_index,
    )
    return h, a
