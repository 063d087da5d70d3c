"""Inputs to test with: named counts, layouts, dtypes, strides, and hypothesis strategies of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from grouped_experts import RowRanges

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
ACTIVATIONS = ["swiglu", "geglu", "clamped_swiglu", "squared_relu"]


# ---- row layouts


@dataclass(frozen=True)
class Layout:
    """Rows of a buffer, their owners (worked out here, not by the package), and how the package is told of them."""

    num_rows: int
    bounds: list[tuple[int, int]]
    make: Callable[[str], RowRanges]

    @property
    def num_experts(self) -> int:
        return len(self.bounds)

    def rows(self, device: str) -> RowRanges:
        return self.make(device)

    def unowned(self) -> list[int]:
        owned = {row for start, end in self.bounds for row in range(start, end)}
        return [row for row in range(self.num_rows) if row not in owned]

    def empty_experts(self) -> list[int]:
        return [expert for expert, (start, end) in enumerate(self.bounds) if start == end]


def contiguous(counts: list[int], spare: int = 0) -> Layout:
    bounds, row = [], 0
    for count in counts:
        bounds.append((row, row + count))
        row += count
    return Layout(row + spare, bounds, lambda device: RowRanges.contiguous(counts, num_rows=row + spare, device=device))


def padded(counts: list[int], alignment: int, spare: int = 0) -> Layout:
    bounds, row = [], 0
    for count in counts:
        bounds.append((row, row + count))
        row = -(-(row + count) // alignment) * alignment
    num_rows = row + spare
    return Layout(
        num_rows, bounds, lambda device: RowRanges.padded(counts, alignment, num_rows=num_rows, device=device)
    )


def padded_cumsum(counts: list[int], alignment: int, spare: int = 0) -> Layout:
    layout = padded(counts, alignment, spare)
    ends = torch.tensor([end for _, end in layout.bounds], dtype=torch.int32)
    return Layout(
        layout.num_rows, layout.bounds, lambda device: RowRanges.from_padded_cumsum(ends.to(device), alignment)
    )


def masked(counts: list[int], capacity: int) -> Layout:
    bounds = [(expert * capacity, expert * capacity + count) for expert, count in enumerate(counts)]
    return Layout(len(counts) * capacity, bounds, lambda device: RowRanges.masked(counts, capacity, device=device))


def from_m_indices(m_indices: list[int], num_experts: int) -> Layout:
    bounds, behind = [], 0
    for expert in range(num_experts):
        mine = [row for row, owner in enumerate(m_indices) if owner == expert]
        behind = mine[-1] + 1 if mine else behind
        bounds.append((mine[0] if mine else behind, behind))
    indices = torch.tensor(m_indices, dtype=torch.int32)
    return Layout(len(m_indices), bounds, lambda device: RowRanges.from_m_indices(indices.to(device), num_experts))


COUNTS = {
    "one-takes-all": [0, 16, 0],
    "all-empty": [0, 0, 0],
    "single-row-each": [1, 1, 1, 1],
    "equal": [5, 5, 5],
    "uneven": [17, 1, 33, 0, 2],
    "first-empty": [0, 3, 5],
    "middle-empty": [3, 0, 0, 5],
    "last-empty": [3, 5, 0],
    "one-expert": [7],
    "one-empty-expert": [0],
    "tail-of-five": [1, 1, 1, 5],
}

LAYOUTS = {name: contiguous(counts) for name, counts in COUNTS.items()} | {
    "tail-rows": contiguous([6, 4], spare=6),
    "tail-rows-only": contiguous([0, 0], spare=5),
    "tail-behind-empty": contiguous([4, 0], spare=4),
    "padded-8": padded([3, 0, 9, 8], 8, spare=5),
    "padded-128": padded([5, 0, 130], 128),
    "padded-evenly": padded([3, 3, 3], 4),
    "padded-cumsum": padded_cumsum([3, 0, 9, 8], 8, spare=5),
    "masked": masked([3, 8], 8),
    "masked-first-idle": masked([0, 4], 4),
    "masked-evenly": masked([4, 4, 4], 6),
    "m-indices": from_m_indices([0, 0, -1, -1, 1], 2),
    "m-indices-with-idle": from_m_indices([-1, 1, 1, 1, -1, 3, -1, -1, 4, -1], 6),
    "no-rows": contiguous([0, 0]),
}

# (columns of the left factor, columns of the right): K and N of a product
SIZES = [(1, 1), (1, 3), (5, 1), (3, 5), (63, 100), (100, 63), (8, 4), (40, 96)]


# ---- strides


def _in_wider_rows(t: Tensor) -> Tensor:
    return _guard(*t.shape[:-1], t.shape[-1] + 5, like=t)[..., 2 : t.shape[-1] + 2].copy_(t)


def _every_second_column(t: Tensor) -> Tensor:
    return _guard(*t.shape[:-1], 2 * t.shape[-1], like=t)[..., ::2].copy_(t)


def _every_second_row(t: Tensor) -> Tensor:
    return _guard(*t.shape[:-2], 2 * t.shape[-2], t.shape[-1], like=t)[..., ::2, :].copy_(t)


def _off_by_one(t: Tensor) -> Tensor:
    return _guard(t.numel() + 1, like=t)[1:].view(t.shape).copy_(t)


def _guard(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


# The same values in other strides, NaN in between.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.mT.contiguous().mT,
    "permuted": lambda t: t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim()))),
    "in-wider-rows": _in_wider_rows,
    "every-second-column": _every_second_column,
    "every-second-row": _every_second_row,
    "base-off-by-one": _off_by_one,
}

# Other values: one stored row, one stored column or one stored element.
EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "one-row": lambda t: t[..., :1, :].expand_as(t),
    "one-column": lambda t: t[..., :1].expand_as(t),
    "one-element": lambda t: t.flatten()[0].expand_as(t) if t.numel() else t,
}


# ---- poison and guards


def poison_unowned(t: Tensor, layout: Layout) -> Tensor:
    """t with NaN, inf and -inf in the rows that no expert owns, in place."""
    for row in layout.unowned():
        t[row] = (torch.nan, torch.inf, -torch.inf)[row % 3]
    return t


def random_rows(layout: Layout, *columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """(T, columns) normal, poisoned in rows of no expert."""
    return poison_unowned(randn(layout.num_rows, *columns, dtype=dtype, device=device), layout)


def randn(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Drawn on the CPU: the same numbers on every device."""
    return torch.randn(*shape, dtype=torch.float64).to(dtype).to(device)


@contextlib.contextmanager
def unchanged(*tensors: Tensor | None) -> Iterator[None]:
    """Every byte of the storages behind the tensors is the same afterwards, the elements around a view included."""
    kept = [t for t in tensors if t is not None]
    before = [_storage_bytes(t).clone() for t in kept]
    yield
    for t, expected in zip(kept, before, strict=True):
        assert torch.equal(_storage_bytes(t), expected), f"a tensor {tuple(t.shape)} of the caller was changed"


def _storage_bytes(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


# ---- hypothesis


def layouts(max_experts: int = 5, max_count: int = 9) -> st.SearchStrategy[Layout]:
    counts = st.lists(st.integers(0, max_count), min_size=1, max_size=max_experts)
    spare = st.integers(0, 3)
    return st.one_of(
        st.builds(contiguous, counts, spare),
        st.builds(padded, counts, st.integers(1, 9), spare),
        st.builds(padded_cumsum, counts, st.integers(1, 9), spare),
        st.builds(masked, counts, st.integers(max_count, max_count + 2)),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=max_experts).map(
            lambda runs: from_m_indices(
                [owner for e, (gap, count) in enumerate(runs) for owner in [-1] * gap + [e] * count], len(runs)
            )
        ),
    )


dtypes = st.sampled_from(DTYPES)
sizes = st.sampled_from([1, 2, 3, 5, 8, 13, 16, 33])
strides = st.sampled_from(sorted(STRIDES))
seeds = st.integers(0, 2**16)
