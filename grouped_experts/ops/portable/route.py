"""Slots sorted by expert: a counting sort in one kernel for few slots and in three for many.

T tokens, k choices, E experts, T * k slots; a slot is a position in the ids (T, k) read row by row. Few slots are all
compared with all. Many are counted by chunk and expert, the counts are summed over the chunks, and a slot's row is

    start of its expert + slots of its expert in the chunks before + those before it in its own chunk

These are sums of integers, so the result does not depend on the order in which programs run. From Hopper on the second
and the third are launched while the one before runs (programmatic dependent launch), and then wait for it. The first is
launched behind all that came before, so that nothing the others write is read by then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from grouped_experts.ops.portable.launch import cdiv, contiguous, has_dependent_launch, kernel, next_power_of_2
from grouped_experts.ops.portable.schedule import ceil_div, empty_schedule, scheduled_ranges, write_schedule
from grouped_experts.ops.portable.tiles import row_block

# The most slots that are all compared with all: beyond, comparing takes longer than two launches more.
FEW_SLOTS = 4096
FEW_SCHEDULED = 1024  # of which one program also writes the tiles
MOST_SCHEDULED_EXPERTS = 255  # whose tiles programs of one warp write, 256 ranges at a time, beside those of the slots
FEW_EXPERTS = 2**31 // FEW_SLOTS - 1  # the keys that are compared are int32
# Chunks of many slots. The more there are, the more programs; but summing over the most takes a program 8 steps, and
# their counts take up to 4 MiB, or 1 KiB an expert.
CHUNK = 128  # the fewest slots of one
FEWEST_CHUNKS, MOST_CHUNKS, MOST_COUNTS = 256, 8192, 2**20


@triton.jit
def load_experts(ids_ptr, slot, known, num_experts, choices, stride_t, stride_k):
    """int32; num_experts for an id that is no expert and for a slot that is not known."""
    token = slot // choices
    choice = slot - token * choices
    at = ids_ptr + token.to(tl.int64) * stride_t + choice.to(tl.int64) * stride_k
    expert = tl.load(at, mask=known, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)


@triton.jit
def count_slots(
    ids_ptr,
    first_slot,
    num_slots,
    first_expert,
    num_experts,
    choices,
    stride_t,
    stride_k,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Slots first_slot .. first_slot + num_slots - 1 of the experts first_expert .. first_expert + BINS - 1."""
    counts = tl.zeros((BINS,), tl.int32)
    for i in range(0, num_slots, BLOCK):
        offset = i + tl.arange(0, BLOCK)
        known = offset < num_slots
        expert = load_experts(ids_ptr, first_slot + offset, known, num_experts, choices, stride_t, stride_k)
        column = expert - first_expert
        counts += tl.histogram(column, BINS, mask=(expert < num_experts) & (column >= 0) & (column < BINS))
    return counts


@triton.jit
def route_few_kernel(
    ids_ptr,  # (T, k)
    counts_ptr,  # (E,)
    slot_to_row_ptr,  # (T, k)
    row_to_slot_ptr,  # (T * k,)
    row_to_token_ptr,  # (T * k,), or None, as all that follows
    probs_ptr,  # (T, k)
    row_probs_ptr,  # (T * k,)
    starts_ptr,  # (E,)
    ends_ptr,  # (E,)
    tiles_ptr,  # (1 + max_tiles, 4)
    num_slots,  # at most LIMIT
    num_experts,  # with tiles at most BINS
    choices,
    stride_t,
    stride_k,
    LIMIT: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,  # rows
):
    """Grid (slot blocks + expert blocks,): the rows of SLOTS slots each, then the counts of BINS experts each.

    The row of a slot is how many slots have a smaller (expert, slot). Those of no expert take the rows behind the last.
    With tiles, who counts the experts also writes their ranges and the schedule (`portable/schedule.py`).
    """
    program = tl.program_id(0)
    slot_blocks = tl.cdiv(num_slots, SLOTS)
    if program < slot_blocks:
        slot = program * SLOTS + tl.arange(0, SLOTS)
        known = slot < num_slots
        expert = load_experts(ids_ptr, slot, known, num_experts, choices, stride_t, stride_k)
        key = expert * LIMIT + slot
        row = tl.zeros((SLOTS,), tl.int32)
        for i in range(0, num_slots, COLUMNS):
            # What is behind num_slots has the key of no expert's slot there, above all others.
            other = i + tl.arange(0, COLUMNS)
            of = load_experts(ids_ptr, other, other < num_slots, num_experts, choices, stride_t, stride_k)
            other_key = of * LIMIT + other
            # Summed over dim 0, so that a thread has few columns and most of their sums to itself.
            row += tl.sum((other_key[:, None] < key[None, :]).to(tl.int32), 0)
        here = expert < num_experts
        tl.store(slot_to_row_ptr + slot, tl.where(here, row, -1), mask=known)
        tl.store(row_to_slot_ptr + row, tl.where(here, slot, -1), mask=known)
        if row_to_token_ptr is not None:
            tl.store(row_to_token_ptr + row, tl.where(here, slot // choices, -1), mask=known)
        if probs_ptr is not None:
            tl.store(row_probs_ptr + row, tl.load(probs_ptr + slot, mask=here, other=0.0), mask=known)
    else:
        first = (program - slot_blocks) * BINS
        counts = count_slots(ids_ptr, 0, num_slots, first, num_experts, choices, stride_t, stride_k, COLUMNS, BINS)
        e = first + tl.arange(0, BINS)
        tl.store(counts_ptr + e, counts, mask=e < num_experts)
        if tiles_ptr is not None:
            ends = tl.cumsum(counts, 0)
            tl.store(starts_ptr + e, ends - counts, mask=e < num_experts)
            tl.store(ends_ptr + e, ends, mask=e < num_experts)
            schedule_experts(tiles_ptr, e, counts, ends, num_slots, TILE)


@triton.jit
def schedule_experts(tiles_ptr, e, counts, ends, num_rows, TILE: tl.constexpr):
    """The tiles of contiguous ranges and of the rows behind them, by one program."""
    tiles = tl.cdiv(counts, TILE)
    behind = tl.cumsum(tiles, 0)
    owned = tl.sum(tiles)
    owned_rows = tl.sum(counts)
    for i in range(tl.max(tiles)):
        to = tiles_ptr + 4 * (1 + behind - tiles + i)
        row = ends - counts + i * TILE
        tl.store(to, e, mask=i < tiles)
        tl.store(to + 1, row, mask=i < tiles)
        tl.store(to + 2, tl.minimum(row + TILE, ends), mask=i < tiles)
    gaps = tl.cdiv(num_rows - owned_rows, TILE)
    for i in range(0, gaps, 32):
        tile = i + tl.arange(0, 32)
        to = tiles_ptr + 4 * (1 + owned + tile)
        row = owned_rows + tile * TILE
        tl.store(to, tl.full((32,), -1, tl.int32), mask=tile < gaps)
        tl.store(to + 1, row, mask=tile < gaps)
        tl.store(to + 2, tl.minimum(row + TILE, num_rows), mask=tile < gaps)
    tl.store(tiles_ptr, owned)
    tl.store(tiles_ptr + 1, owned + gaps)


@triton.jit
def count_chunks_kernel(
    ids_ptr,  # (T, k)
    matrix_ptr,  # (chunks, E)
    num_slots,
    num_experts,
    choices,
    stride_t,
    stride_k,
    chunk_size,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    OVERLAP: tl.constexpr,  # with the next kernel
):
    """Grid (chunks, expert blocks). matrix[c, e] = slots of expert e in chunk c."""
    if OVERLAP:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    start = chunk * chunk_size
    length = tl.minimum(chunk_size, num_slots - start)
    first = tl.program_id(1) * BINS
    counts = count_slots(ids_ptr, start, length, first, num_experts, choices, stride_t, stride_k, BLOCK, BINS)
    e = first + tl.arange(0, BINS)
    tl.store(matrix_ptr + chunk.to(tl.int64) * num_experts + e, counts, mask=e < num_experts)


@triton.jit
def sum_chunks_kernel(
    matrix_ptr,  # (chunks, E)
    counts_ptr,  # (E,)
    num_chunks,
    num_experts,
    CHUNKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAP: tl.constexpr,  # with the kernels before and behind
):
    """Grid (expert blocks,). matrix[c, e] becomes the sum of those of the chunks before c; counts[e], that of all."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for i in range(0, num_chunks, CHUNKS):
        chunk = i + tl.arange(0, CHUNKS)
        at = matrix_ptr + chunk.to(tl.int64)[:, None] * num_experts + e[None, :]
        known = (chunk < num_chunks)[:, None] & (e < num_experts)[None, :]
        counts = tl.load(at, mask=known, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=known)
        total += tl.sum(counts, 0)
    tl.store(counts_ptr + e, total, mask=e < num_experts)


@triton.jit
def place_kernel(
    ids_ptr,  # (T, k)
    counts_ptr,  # (E,)
    matrix_ptr,  # (chunks, E)
    slot_to_row_ptr,  # (T, k)
    row_to_slot_ptr,  # (T * k,)
    row_to_token_ptr,  # (T * k,), or None, as all that follows
    probs_ptr,  # (T, k)
    row_probs_ptr,  # (T * k,)
    starts_ptr,  # (E,)
    ends_ptr,  # (E,)
    tiles_ptr,  # (1 + max_tiles, 4)
    num_slots,
    num_experts,
    choices,
    stride_t,
    stride_k,
    chunk_size,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,  # rows
    BLOCK_E: tl.constexpr,  # with tiles at least E + 1
    OVERLAP: tl.constexpr,  # with the kernel before
):
    """Grid (chunks,): the rows of their slots; with tiles E + 1 programs more, for the ranges and the schedule."""
    program = tl.program_id(0)
    chunks = ceil_div(num_slots, chunk_size)
    if OVERLAP:
        gdc_wait()
    if program < chunks:
        place_chunk(
            program, ids_ptr, counts_ptr, matrix_ptr, slot_to_row_ptr, row_to_slot_ptr, row_to_token_ptr, probs_ptr,
            row_probs_ptr, num_slots, num_experts, choices, stride_t, stride_k, chunk_size, BLOCK, BINS
        )  # fmt: skip
    elif tiles_ptr is not None:
        write_schedule(
            program - chunks, counts_ptr, starts_ptr, ends_ptr, tiles_ptr, num_slots, num_experts, 1, 0, False, TILE,
            BLOCK_E, 32
        )  # fmt: skip


@triton.jit
def place_chunk(
    chunk, ids_ptr, counts_ptr, matrix_ptr, slot_to_row_ptr, row_to_slot_ptr, row_to_token_ptr, probs_ptr,
    row_probs_ptr, num_slots, num_experts, choices, stride_t, stride_k, chunk_size,
    BLOCK: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """The chunk's row of the matrix is its program's own: it becomes each expert's next row, block by block."""
    start = chunk * chunk_size
    length = tl.minimum(chunk_size, num_slots - start)
    position = tl.arange(0, BLOCK)
    expert = load_experts(ids_ptr, start + position, position < length, num_experts, choices, stride_t, stride_k)
    next_row_ptr = matrix_ptr + chunk.to(tl.int64) * num_experts
    num_rows = add_starts(next_row_ptr, counts_ptr, num_experts, BINS)
    for i in range(0, length, BLOCK):
        tl.debug_barrier()  # what other threads stored in next_row is seen
        known = i + position < length
        slot = start + (i + position)
        here = expert < num_experts
        # Summed over dim 0, so that a thread has a column and the sum to itself.
        same = expert[:, None] == expert[None, :]
        before = tl.sum((same & (position[:, None] < position[None, :])).to(tl.int32), 0)
        row = tl.load(next_row_ptr + expert, mask=here, other=0) + before
        tl.store(slot_to_row_ptr + slot, tl.where(here, row, -1), mask=known)
        behind = known & (slot >= num_rows)  # a row as well, of no slot
        nothing = tl.full((BLOCK,), -1, tl.int32)
        tl.store(row_to_slot_ptr + row, slot, mask=here)
        tl.store(row_to_slot_ptr + slot, nothing, mask=behind)
        if row_to_token_ptr is not None:
            tl.store(row_to_token_ptr + row, slot // choices, mask=here)
            tl.store(row_to_token_ptr + slot, nothing, mask=behind)
        if probs_ptr is not None:
            tl.store(row_probs_ptr + row, tl.load(probs_ptr + slot, mask=here, other=0.0), mask=here)
            tl.store(row_probs_ptr + slot, tl.zeros((BLOCK,), row_probs_ptr.dtype.element_ty), mask=behind)
        is_last = tl.sum((same & (position[:, None] > position[None, :])).to(tl.int32), 0) == 0
        later = i + BLOCK + position
        later_expert = load_experts(ids_ptr, start + later, later < length, num_experts, choices, stride_t, stride_k)
        tl.debug_barrier()  # all threads have loaded from next_row
        tl.store(next_row_ptr + expert, row + 1, mask=here & is_last)
        expert = later_expert


@triton.jit
def add_starts(next_row_ptr, counts_ptr, num_experts, BINS: tl.constexpr):
    """next_row[e] += the first row of expert e. Returns the number of rows of all experts."""
    num_rows = 0
    for i in range(0, num_experts, BINS):
        e = i + tl.arange(0, BINS)
        counts = tl.load(counts_ptr + e, mask=e < num_experts, other=0)
        before = tl.load(next_row_ptr + e, mask=e < num_experts, other=0)
        tl.store(next_row_ptr + e, before + num_rows + tl.cumsum(counts, 0) - counts, mask=e < num_experts)
        num_rows += tl.sum(counts)
    return num_rows


class OfRows(NamedTuple):
    """What of the rows is wanted beside their slots: tokens (T * k,), and probs (T * k,) from those of the slots."""

    tokens: Tensor | None = None
    slot_probs: Tensor | None = None
    probs: Tensor | None = None


class Schedule(NamedTuple):
    """starts (E,), ends (E,) and tiles, where they are wanted."""

    starts: Tensor | None = None
    ends: Tensor | None = None
    tiles: Tensor | None = None


SLOTS_ALONE = OfRows()
UNSCHEDULED = Schedule()


def route(top_k_ids: Tensor, num_experts: int, rows: OfRows = SLOTS_ALONE) -> tuple[Tensor, Tensor, Tensor]:
    num_slots = top_k_ids.numel()
    if num_slots == 0:
        outputs = empty_outputs(top_k_ids, num_experts)
        outputs[0].zero_()
        return outputs
    few = num_slots <= FEW_SLOTS and num_experts <= FEW_EXPERTS
    return (route_few if few else route_many)(top_k_ids, num_experts, rows)


def route_few(top_k_ids: Tensor, num_experts: int, rows: OfRows = SLOTS_ALONE) -> tuple[Tensor, Tensor, Tensor]:
    """Of 1 to FEW_SLOTS slots and up to FEW_EXPERTS experts."""
    outputs = empty_outputs(top_k_ids, num_experts)
    launch_route_few(top_k_ids, num_experts, expert_block(num_experts, 256), *outputs, *rows, *UNSCHEDULED)
    return outputs


def launch_route_few(top_k_ids: Tensor, num_experts: int, bins: int, *outputs: Tensor | None) -> None:
    num_slots, slots = top_k_ids.numel(), 16
    columns = min(1024, max(128, next_power_of_2(num_slots)))
    tile = row_block(num_slots, num_experts)
    kernel(route_few_kernel, LIMIT=FEW_SLOTS, SLOTS=slots, COLUMNS=columns, BINS=bins, TILE=tile).launch(
        (cdiv(num_slots, slots) + cdiv(num_experts, bins),),
        top_k_ids.device,
        top_k_ids,
        *outputs,
        num_slots,
        num_experts,
        top_k_ids.shape[1],
        *top_k_ids.stride(),
    )


def route_rows(
    top_k_ids: Tensor, num_experts: int, dtype: torch.dtype, top_k_probs: Tensor | None
) -> tuple[Tensor, ...]:
    """What `route` gives, the rows' tokens and probs, and their starts, ends and tiles: in as many kernels."""
    num_slots = top_k_ids.numel()
    tokens = top_k_ids.new_empty(num_slots, dtype=torch.int32)
    row_probs = tokens.new_empty(0) if top_k_probs is None else top_k_probs.new_empty(num_slots)
    rows = OfRows(tokens, contiguous(top_k_probs), row_probs)
    if 0 < num_slots <= FEW_SCHEDULED and num_experts <= 1024:
        outputs, schedule = (
            empty_outputs(top_k_ids, num_experts),
            empty_schedule(top_k_ids.device, num_experts, num_slots),
        )
        launch_route_few(top_k_ids, num_experts, expert_block(num_experts, 1024), *outputs, *rows, *schedule)
    elif num_slots > FEW_SLOTS and num_experts <= MOST_SCHEDULED_EXPERTS:
        schedule = empty_schedule(top_k_ids.device, num_experts, num_slots)
        outputs = route_many(top_k_ids, num_experts, rows, Schedule(*schedule))
    else:
        outputs = route(top_k_ids, num_experts, rows)
        schedule = scheduled_ranges(outputs[0], 0, num_slots, dtype)
    return *outputs, tokens, row_probs, *schedule


def route_many(
    top_k_ids: Tensor, num_experts: int, rows: OfRows = SLOTS_ALONE, schedule: Schedule = UNSCHEDULED
) -> tuple[Tensor, Tensor, Tensor]:
    """Of 1 to 2^31 - 1 slots, with a schedule of up to MOST_SCHEDULED_EXPERTS experts."""
    outputs = counts, slot_to_row, row_to_slot = empty_outputs(top_k_ids, num_experts)
    device, num_slots = top_k_ids.device, top_k_ids.numel()
    size, overlap = chunk_size(num_slots, num_experts), has_dependent_launch(device)
    matrix = counts.new_empty(cdiv(num_slots, size), num_experts)
    num_chunks = matrix.shape[0]
    slots = num_slots, num_experts, top_k_ids.shape[1], *top_k_ids.stride(), size

    bins = expert_block(num_experts, 256)
    kernel(count_chunks_kernel, BLOCK=min(size, 1024), BINS=bins, OVERLAP=overlap).launch(
        (num_chunks, cdiv(num_experts, bins)), device, top_k_ids, matrix, *slots
    )
    # Of each chunk a program loads 16 bytes: with fewer experts it would move as many sectors of the L2 cache.
    kernel(sum_chunks_kernel, num_warps=8, launch_pdl=overlap, CHUNKS=1024, EXPERTS=4, OVERLAP=overlap).launch(
        (cdiv(num_experts, 4),), device, matrix, counts, num_chunks, num_experts
    )
    bins, tile = expert_block(num_experts, 1024), row_block(num_slots, num_experts)
    # A warp compares 32 slots with one another at a time: of 64, each would be compared twice as often.
    block_e = 1 if schedule.tiles is None else next_power_of_2(num_experts + 1)
    kernel(
        place_kernel,
        num_warps=1,
        launch_pdl=overlap,
        BLOCK=32,
        BINS=bins,
        TILE=tile,
        BLOCK_E=block_e,
        OVERLAP=overlap,
    ).launch(
        (num_chunks + (0 if schedule.tiles is None else num_experts + 1),),
        device,
        top_k_ids,
        counts,
        matrix,
        slot_to_row,
        row_to_slot,
        *rows,
        *schedule,
        *slots,
    )
    return outputs


def empty_outputs(top_k_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """counts (E,), slot_to_row (T, k), row_to_slot (T * k,)."""
    counts = top_k_ids.new_empty(num_experts, dtype=torch.int32)
    return counts, counts.new_empty(top_k_ids.shape), counts.new_empty(top_k_ids.numel())


def chunk_size(num_slots: int, num_experts: int) -> int:
    """A power of two, at least CHUNK; the number of chunks is bounded, and so is the matrix."""
    most = min(MOST_CHUNKS, max(FEWEST_CHUNKS, MOST_COUNTS // num_experts))
    return max(CHUNK, next_power_of_2(cdiv(num_slots, most)))


def expert_block(num_experts: int, most: int) -> int:
    return min(most, max(32, next_power_of_2(num_experts)))
