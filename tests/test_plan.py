"""What the k-grouped Hopper kernel contracts, in which order; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from grouped_experts.ops.hopper.plan import FEWEST_ROWS, MOST_PIECES, entries_of_pieces, make_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plan_of(ranges: list[tuple[int, int]], num_rows: int, tiles: int, programs: int) -> list[list[int]]:
    """The head, and an entry for each expert."""
    starts, ends = torch.tensor(ranges, dtype=torch.int32, device=DEVICE).T.contiguous()
    plan = make_plan(starts, ends, num_rows, tiles, programs).view(-1, 4).tolist()
    assert plan[0][2] == len(ranges)
    assert all(entry[3] == 0 for entry in plan[1:])
    return plan


@given(st.lists(st.tuples(st.integers(-5, 90), st.integers(-5, 90)), min_size=1, max_size=70))
def test_experts_with_most_rows_come_first(ranges: list[tuple[int, int]]) -> None:
    """Ranges that leave the buffer, or end before they start, are clamped into it."""
    clamped = [(max(0, min(start, 64)), max(0, min(end, 64))) for start, end in ranges]
    rows = [(e, start, max(0, end - start)) for e, (start, end) in enumerate(clamped)]
    plan = plan_of(ranges, num_rows=64, tiles=4, programs=4)
    assert [tuple(row[:3]) for row in plan[1:]] == sorted(rows, key=lambda row: (-row[2], row[0]))
    assert plan[0][0] == 0


@given(st.lists(st.tuples(st.integers(-5, 900), st.integers(-5, 900)), min_size=1, max_size=40), st.integers(0, 20))
def test_experts_that_are_filled_up(ranges: list[tuple[int, int]], room: int) -> None:
    """One behind the other, in blocks of 128, whatever the ranges say; none leaves the room."""
    starts, ends = torch.tensor(ranges, dtype=torch.int32, device=DEVICE).T.contiguous()
    plan = make_plan(starts, ends, 128 * room, tiles=4, programs=4, filled=128).view(-1, 4).tolist()
    first, expected = 0, []
    for e, (start, end) in enumerate(ranges):
        clamped = min(max(end, 0), 128 * room) - min(max(start, 0), 128 * room)
        rows = min(-(-max(clamped, 0) // 128) * 128, 128 * room - first)
        expected.append([e, first, rows, 0])
        first += rows
    assert sorted(plan[1:]) == expected


@pytest.mark.parametrize("experts", [300, 600, 1100])
def test_many_experts(experts: int) -> None:
    """By rows up to a thousand, in their own order beyond; none is left out."""
    counts = [e * 37 % 50 for e in range(experts)]
    ends = torch.tensor(counts).cumsum(0).tolist()
    plan = plan_of(list(zip([0, *ends[:-1]], ends, strict=True)), ends[-1], tiles=1, programs=4)
    order = sorted(range(experts), key=lambda e: -counts[e]) if experts <= 1000 else list(range(experts))
    assert [row[0] for row in plan[1:]] == order
    assert [row[2] for row in plan[1:]] == [counts[e] for e in order]


@pytest.mark.parametrize(("largest", "claimed"), [(100, 0), (101, 1)])
def test_tiles_are_claimed_where_one_is_more_than_a_sixteenth_of_a_program(largest: int, claimed: int) -> None:
    """32 experts of `largest`, 100, 100 ... rows; 2 programs share 64 tiles of each."""
    counts = [largest] + [100] * 31
    ends = torch.tensor(counts).cumsum(0).tolist()
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    assert plan_of(ranges, sum(counts), tiles=64, programs=2)[0][1] == 0
    # One tile of each: a program has 1600 rows to contract, a sixteenth of which are 100.
    assert plan_of(ranges, sum(counts), tiles=1, programs=2)[0][1] == claimed


@given(
    counts=st.lists(
        st.one_of(st.integers(0, 300), st.integers(FEWEST_ROWS - 2, 4 * FEWEST_ROWS), st.integers(0, 10**6)),
        min_size=1,
        max_size=40,
    ),
    tiles=st.integers(1, 140),
    programs=st.integers(1, 140),
)
@example(counts=[16400], tiles=1, programs=20)
@example(counts=[16800], tiles=8, programs=132)
@example(counts=[20000] * 3 + [0, 5, 1300], tiles=33, programs=132)
@example(counts=[9000] * 10, tiles=10, programs=132)
@example(counts=[65536] + [516] * 127, tiles=48, programs=132)
def test_large_experts_in_pieces(counts: list[int], tiles: int, programs: int) -> None:
    """Every row is contracted once, in pieces of about one size; experts of many shares are in pieces."""
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
    starts, num_rows = ends - torch.tensor(counts, device=DEVICE, dtype=torch.int32), sum(counts)
    split = entries_of_pieces(len(counts), tiles, programs)
    plan = make_plan(starts, ends, num_rows, tiles, programs, split).tolist()
    counters, entries = (
        plan[4 : 4 + 2 * split * tiles],
        torch.tensor(plan[4 + 2 * split * tiles :]).view(-1, 4).tolist(),
    )
    assert not any(counters)
    entries = entries[: plan[2]]
    assert [e for e, *_ in entries] == [e for e in order_of(counts) for _ in range([x[0] for x in entries].count(e))]
    for e, count in enumerate(counts):
        mine = [(place, *entry[1:]) for place, entry in enumerate(entries) if entry[0] == e]
        assert sum(rows for _, _, rows, _ in mine) == count
        assert [start for _, start, _, _ in mine] == [
            int(starts[e]) + sum(rows for _, _, rows, _ in mine[:i]) for i in range(len(mine))
        ]
        if len(mine) == 1:
            assert mine[0][3] == 0
            assert split == 0 or count * programs <= 1.26 * tiles * num_rows or count < 2 * FEWEST_ROWS
        else:
            assert mine[-1][0] < split  # so that their tiles lie in the workspace
            assert [code for *_, code in mine] == [(mine[0][0] << 16) + (i << 8) + len(mine) for i in range(len(mine))]
            assert len(mine) <= MOST_PIECES
            assert all(rows % 64 == 0 for _, _, rows, _ in mine[:-1])
            sizes = [rows for _, _, rows, _ in mine]
            assert max(sizes) - min(sizes) <= 2 * 64
            assert min(sizes) > FEWEST_ROWS - 2 * 64


def order_of(counts: list[int]) -> list[int]:
    return sorted(range(len(counts)), key=lambda e: -counts[e])


def test_an_expert_of_more_than_its_share_is_in_pieces() -> None:
    """1.375 shares and 2.06 are two pieces, 1.03 are one."""
    for tiles, pieces in ((48, 2), (32, 2), (64, 1)):
        counts = [65536] + [516] * 127
        ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
        starts = ends - torch.tensor(counts, device=DEVICE, dtype=torch.int32)
        plan = make_plan(starts, ends, sum(counts), tiles, 132, entries_of_pieces(128, tiles, 132))
        assert int(plan[2]) == 127 + pieces


@pytest.mark.parametrize(("tiles", "programs"), [(1, 132), (47, 132), (66, 132), (131, 132), (5, 7)])
def test_room_for_entries_of_pieces(tiles: int, programs: int) -> None:
    """As many experts as can have a little more than 1.25 shares, which are two pieces each."""
    most = programs * 100 // (126 * tiles)
    rows = 126 * tiles * 100_000 // (programs * 100)
    rest = 100_000 - most * rows
    counts = torch.tensor([rows] * most + ([rest] if rest else []), device=DEVICE, dtype=torch.int32) * 20
    ends = counts.cumsum(0).to(torch.int32)
    split = entries_of_pieces(len(counts), tiles, programs)
    plan = make_plan(ends - counts, ends, int(counts.sum()), tiles, programs, split)
    entries = plan[4 + 2 * split * tiles :].view(-1, 4)[: int(plan[2])]
    assert int((entries[:, 3] > 0).sum()) <= split
