"""Rows from tokens and back: a gather each way, no atomics."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.ops.portable.launch import cdiv, even_block, kernel, next_power_of_2


@triton.jit
def permute_kernel(
    x_ptr,  # (T, H)
    row_to_slot_ptr,  # (T * k,)
    y_ptr,  # (T * k, H)
    num_rows,
    num_tokens,
    H,
    choices,
    stride_x,
    stride_xh,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (row blocks, column blocks). y[r] = x[slot // k]; zero where the row has no slot, or one beyond x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(row_to_slot_ptr + row, mask=row < num_rows, other=-1)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.maximum(slot, 0) // choices
    known = (slot >= 0) & (token < num_tokens)
    at = x_ptr + token.to(tl.int64)[:, None] * stride_x + n.to(tl.int64)[None, :] * stride_xh
    x = tl.load(at, mask=known[:, None] & (n < H)[None, :], other=0.0)
    to = y_ptr + row.to(tl.int64)[:, None] * H + n[None, :]
    # Streamed, so that the columns of x that all programs are at stay in the L2 cache.
    tl.store(to, x, mask=(row < num_rows)[:, None] & (n < H)[None, :], cache_modifier=".cs")


@triton.jit
def unpermute_kernel(
    y_ptr,  # (T * k, H)
    slot_to_row_ptr,  # (T, k)
    x_ptr,  # (T, H)
    row_values_ptr,  # (T * k,) or None
    values_ptr,  # (T, k) or None
    H,
    choices,
    stride_y,
    stride_yh,
    CHOICES: tl.constexpr,  # values at a time
    BLOCK: tl.constexpr,
):
    """Grid (T * column blocks,). x[t] = sum over j of y[slot_to_row[t, j]], in fp32, j ascending.

    values[t, j] = row_values[slot_to_row[t, j]], zero for a slot without a row.
    """
    blocks = tl.maximum(1, tl.cdiv(H, BLOCK))  # without columns for the values
    token = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    first_slot = token.to(tl.int64) * choices
    if values_ptr is not None:
        slot = first_slot + tl.arange(0, CHOICES)
        mine = tl.arange(0, CHOICES) < tl.where(block == 0, choices, 0)
        rows = tl.load(slot_to_row_ptr + slot, mask=mine, other=-1)
        value = tl.load(row_values_ptr + rows, mask=rows >= 0, other=0.0)
    n = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.range(0, choices, loop_unroll_factor=8):  # the rows' loads run ahead of the sums
        row = tl.load(slot_to_row_ptr + first_slot + j)
        at = y_ptr + row.to(tl.int64) * stride_y + n.to(tl.int64) * stride_yh
        total += tl.load(at, mask=n < tl.where(row < 0, 0, H), other=0.0).to(tl.float32)
    tl.store(x_ptr + token.to(tl.int64) * H + n, total.to(x_ptr.dtype.element_ty), mask=n < H)
    if values_ptr is not None:  # behind the loop: no load passes a store
        tl.store(values_ptr + slot, value, mask=mine)
        for j in range(CHOICES, choices, CHOICES):
            mine = j + tl.arange(0, CHOICES) < tl.where(block == 0, choices, 0)
            rows = tl.load(slot_to_row_ptr + slot + j, mask=mine, other=-1)
            value = tl.load(row_values_ptr + rows, mask=rows >= 0, other=0.0)
            tl.store(values_ptr + slot + j, value, mask=mine)


def permute(x: Tensor, slot_to_row: Tensor, row_to_slot: Tensor) -> Tensor:
    y = x.new_empty(row_to_slot.shape[0], x.shape[1])
    if y.numel():
        block = even_block(x.shape[1], 256)
        rows = max(8, 1024 // block)
        kernel(permute_kernel, ROWS=rows, BLOCK=block).launch(
            (cdiv(y.shape[0], rows), cdiv(x.shape[1], block)),
            x.device,
            x,
            row_to_slot,
            y,
            y.shape[0],
            x.shape[0],
            x.shape[1],
            slot_to_row.shape[1],
            *x.stride(),
        )
    return y


def gather_rows(x: Tensor, row_index: Tensor | None) -> Tensor:
    """x[row_index[r]] as row r, zero for an index below zero; x itself without an index."""
    return x if row_index is None else permute(x, row_index[:, None], row_index)


def unpermute(y: Tensor, slot_to_row: Tensor, row_to_slot: Tensor) -> Tensor:
    x = y.new_empty(slot_to_row.shape[0], y.shape[1])
    launch_unpermute(y, slot_to_row, x, None, None)
    return x


def unpermute_with_values(
    y: Tensor, row_values: Tensor, slot_to_row: Tensor, row_to_slot: Tensor
) -> tuple[Tensor, Tensor]:
    x, values = y.new_empty(slot_to_row.shape[0], y.shape[1]), row_values.new_empty(slot_to_row.shape)
    launch_unpermute(y, slot_to_row, x, row_values.contiguous(), values)
    return x, values


def launch_unpermute(
    y: Tensor, slot_to_row: Tensor, x: Tensor, row_values: Tensor | None, values: Tensor | None
) -> None:
    choices, width = slot_to_row.shape[1], y.shape[1]
    if x.shape[0] and (width or values is not None):
        # Of few tokens every program has few columns, so that there are enough of them.
        block = 256 if x.shape[0] <= 128 or width <= 256 else 512
        at_a_time = 1 if values is None else min(64, next_power_of_2(choices))
        kernel(unpermute_kernel, num_warps=block // 256, CHOICES=at_a_time, BLOCK=block).launch(
            (x.shape[0] * max(1, cdiv(width, block)),),
            y.device,
            y,
            slot_to_row,
            x,
            row_values,
            values,
            width,
            choices,
            *y.stride(),
        )
