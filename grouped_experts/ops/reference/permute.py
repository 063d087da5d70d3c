"""Slots sorted by expert, and rows from tokens and back."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.reference.products import accumulation_dtype


def route(top_k_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, the row of every slot and the slot of every row, rows sorted by expert and stably by slot within one.

    A slot is a position in top_k_ids (T, k) read row by row. A slot whose id is no expert has row -1; the rows behind
    the last expert's have slot -1.
    """
    ids = top_k_ids.reshape(-1).to(torch.int64)
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    slots = torch.arange(ids.shape[0], device=ids.device)
    sorted_ids, row_to_slot = ids.sort(stable=True)
    slot_to_row = torch.empty_like(slots).scatter_(0, row_to_slot, slots)
    slot_to_row = torch.where(ids == num_experts, -1, slot_to_row)
    row_to_slot = torch.where(sorted_ids == num_experts, -1, row_to_slot)
    edges = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=ids.device))
    counts = edges.diff()
    return (
        counts.to(torch.int32),
        slot_to_row.to(torch.int32).view(top_k_ids.shape),
        row_to_slot.to(torch.int32),
    )


def permute(x: Tensor, slot_to_row: Tensor, row_to_slot: Tensor) -> Tensor:
    """y[r] = x[row_to_slot[r] // k]; zero where the row has no slot."""
    token = torch.div(row_to_slot.clamp(min=0), max(1, slot_to_row.shape[1]), rounding_mode="floor")
    y = x.index_select(0, token) if x.shape[0] else x.new_zeros(row_to_slot.shape[0], x.shape[1])
    y[row_to_slot < 0] = 0
    return y


def unpermute(y: Tensor, slot_to_row: Tensor, row_to_slot: Tensor) -> Tensor:
    """x[t] = sum over j of y[slot_to_row[t, j]], in fp32, j ascending; a slot without a row adds nothing."""
    x = y.new_zeros(slot_to_row.shape[0], y.shape[1], dtype=accumulation_dtype(y.dtype))
    if y.shape[0]:
        for row in slot_to_row.unbind(1):
            part = y.index_select(0, row.clamp(min=0))
            part[row < 0] = 0
            x += part
    return x.to(y.dtype)


def unpermute_with_values(
    y: Tensor, row_values: Tensor, slot_to_row: Tensor, row_to_slot: Tensor
) -> tuple[Tensor, Tensor]:
    """`unpermute`, and values[t, j] = row_values[slot_to_row[t, j]], zero for a slot without a row."""
    values = row_values.new_zeros(slot_to_row.shape)
    if row_values.shape[0]:
        values = torch.where(slot_to_row < 0, 0, row_values[slot_to_row.clamp(min=0)])
    return unpermute(y, slot_to_row, row_to_slot), values
