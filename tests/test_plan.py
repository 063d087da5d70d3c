"""The order in which the k-grouped Hopper kernel takes experts; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grouped_experts.ops.hopper.plan import make_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plan_of(ranges: list[tuple[int, int]], num_rows: int, tiles: int, programs: int) -> list[list[int]]:
    starts, ends = torch.tensor(ranges, dtype=torch.int32, device=DEVICE).T.contiguous()
    return make_plan(starts, ends, num_rows, tiles, programs).tolist()


@given(st.lists(st.tuples(st.integers(-5, 90), st.integers(-5, 90)), min_size=1, max_size=70))
def test_experts_with_most_rows_come_first(ranges: list[tuple[int, int]]) -> None:
    """Ranges that leave the buffer, or end before they start, are clamped into it."""
    clamped = [(max(0, min(start, 64)), max(0, min(end, 64))) for start, end in ranges]
    rows = [(e, start, max(0, end - start)) for e, (start, end) in enumerate(clamped)]
    plan = plan_of(ranges, num_rows=64, tiles=4, programs=4)
    assert [tuple(row[:3]) for row in plan[1:]] == sorted(rows, key=lambda row: (-row[2], row[0]))
    assert plan[0][0] == 0


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
