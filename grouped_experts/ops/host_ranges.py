"""Row ranges on the host, as the reference walks them. On a GPU reading them would synchronise; on a CPU it is free."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int, int]


@dataclass(frozen=True)
class HostRanges:
    """bounds: (start, end) of every expert. The rest follows from them, computed once.

    sizes: rows before, of, before, of ... each expert and behind the last: what cuts a buffer in one call.
    owned, gaps: the spans of rows that some expert owns, neighbours joined, and those that none does.
    even: (first row, rows from expert to expert, rows of an expert) where these are the same for all; or None.
    offs: the ends as a tensor, (E,) int32, where no gap lies before or between the experts' rows; or None.
    """

    bounds: tuple[Span, ...]
    sizes: tuple[int, ...]
    owned: tuple[Span, ...]
    gaps: tuple[Span, ...]
    even: tuple[int, int, int] | None
    offs: Tensor | None

    def __len__(self) -> int:
        return len(self.bounds)

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows of every expert, as views."""
        return x.split_with_sizes(self.sizes)[1::2]

    def batch(self, x: Tensor) -> Tensor:
        """The rows of evenly spaced experts as one view (E, rows of an expert, N)."""
        assert self.even is not None
        start, step, count = self.even
        row, column = x.stride()
        shape = (len(self), count, x.shape[1])
        return x.as_strided(shape, (step * row, row, column), x.storage_offset() + start * row)

    def zero_gaps(self, x: Tensor) -> None:
        """Zero the rows that no expert owns, and only those."""
        for start, end in self.gaps:
            x[start:end] = 0


def host_ranges(starts: Tensor, ends: Tensor, num_rows: int) -> HostRanges:
    """Raises ValueError unless the ranges ascend, are disjoint and lie within the rows there are."""
    return _host_ranges(tuple(starts.tolist()), tuple(ends.tolist()), num_rows)


@functools.lru_cache(maxsize=64)  # the products of a layer ask for the same ranges; values in, values out
def _host_ranges(starts: tuple[int, ...], ends: tuple[int, ...], num_rows: int) -> HostRanges:
    bounds: list[Span] = []
    sizes: list[int] = []
    owned: list[Span] = []
    gaps: list[Span] = []
    behind = 0
    for start, end in zip(starts, ends, strict=True):
        if start == end:  # an empty range may lie anywhere
            start = end = behind
        if not behind <= start <= end <= num_rows:
            raise ValueError(
                f"rows: wanted ascending, disjoint ranges within {num_rows} rows, "
                f"got {start}:{end} behind row {behind} for expert {len(bounds)}"
            )
        bounds.append((start, end))
        sizes += (start - behind, end - start)
        if start > behind:
            gaps.append((behind, start))
        if end > start:
            joins = bool(owned) and owned[-1][1] == start
            owned[-1:] = [(owned[-1][0], end)] if joins else [*owned[-1:], (start, end)]
        behind = end
    packed = not gaps
    if behind < num_rows:
        gaps.append((behind, num_rows))
    return HostRanges(
        tuple(bounds),
        (*sizes, num_rows - behind),
        tuple(owned),
        tuple(gaps),
        _even(bounds),
        torch.tensor([end for _, end in bounds], dtype=torch.int32) if packed else None,
    )


def _even(bounds: list[Span]) -> tuple[int, int, int] | None:
    if not bounds or bounds[0][0] == bounds[0][1]:
        return None
    start, end = bounds[0]
    step = bounds[1][0] - start if len(bounds) > 1 else end - start
    even = all(bound == (start + e * step, end + e * step) for e, bound in enumerate(bounds))
    return (start, step, end - start) if even else None
