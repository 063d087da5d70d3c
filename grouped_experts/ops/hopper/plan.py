"""In which order a k-grouped kernel takes the experts, and whether its programs share the tiles out or claim them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grouped_experts.ops.portable.launch import kernel, next_power_of_2
from grouped_experts.ops.portable.schedule import load_range


@triton.jit
def plan_kernel(
    starts_ptr,  # (E,)
    ends_ptr,  # (E,)
    plan_ptr,  # (1 + E, 4)
    num_rows,
    num_experts,
    tiles,  # of each expert
    programs,
    BLOCK_E: tl.constexpr,
    LANES: tl.constexpr,  # 0: in the order that they have
):
    """Grid (1,). plan[0] = [0, for the tiles that are claimed; whether they are], plan[1:] = [expert, first row, rows].

    The experts with most rows come first, unless there are more than a thousand. Tiles are claimed one by one where one
    of the largest expert is more than a sixteenth of what a program has to do; otherwise every program takes as many.
    Ranges are clamped into the buffer.
    """
    e = tl.arange(0, BLOCK_E)
    start, end = load_range(starts_ptr, ends_ptr, e, num_rows, num_experts)
    rows = end - start
    before = e
    if LANES:
        before = tl.zeros((BLOCK_E,), tl.int32)
        for i in range(0, num_experts, LANES):
            other = i + tl.arange(0, LANES)
            their_start, their_end = load_range(starts_ptr, ends_ptr, other, num_rows, num_experts)
            theirs = their_end - their_start
            more = theirs[None, :] > rows[:, None]
            as_many = (theirs[None, :] == rows[:, None]) & (other[None, :] < e[:, None])
            before += tl.sum(((more | as_many) & (other < num_experts)[None, :]).to(tl.int32), 1)
    largest, all_rows = tl.max(rows).to(tl.int64), tl.sum(rows.to(tl.int64))
    tl.store(plan_ptr, 0)
    tl.store(plan_ptr + 1, (16 * programs * largest > tiles * all_rows).to(tl.int32))
    to = plan_ptr + 4 * (1 + before)
    tl.store(to, e, mask=e < num_experts)
    tl.store(to + 1, start, mask=e < num_experts)
    tl.store(to + 2, rows, mask=e < num_experts)


def make_plan(starts: Tensor, ends: Tensor, num_rows: int, tiles: int, programs: int) -> Tensor:
    """(1 + E, 4) int32, for as many tiles of each expert, and programs; good for one launch."""
    num_experts = starts.shape[0]
    plan = starts.new_empty(1 + num_experts, 4)
    block = next_power_of_2(num_experts)
    kernel(plan_kernel, BLOCK_E=block, LANES=min(32, 8192 // block) if block <= 1024 else 0).launch(
        (1,), starts.device, starts, ends, plan, num_rows, num_experts, tiles, programs
    )
    return plan
