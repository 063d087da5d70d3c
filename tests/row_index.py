"""Rows that an index names, in tests: of a source, in every layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from conftest import Place
from exact import eps
from inputs import LAYOUTS, Layout, contiguous, randn
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """The layout of R rows, each of which is one of `num_source` rows, by an index."""

    layout: Layout
    num_source: int

    def index(self, device: str) -> Tensor:
        """Every third row of the source is not named, others are often; rows of no expert have anything."""
        named = torch.tensor([row for row in range(self.num_source) if row % 3 != 2], dtype=torch.int32)
        index = named[torch.randint(max(1, len(named)), (self.layout.num_rows,))] if len(named) else None
        index = torch.zeros(self.layout.num_rows, dtype=torch.int32) if index is None else index
        for i, row in enumerate(self.layout.unowned()):
            index[row] = (-1, self.num_source, -(2**31), 2**31 - 1)[i % 4]
        return index.to(device)

    def source(self, columns: int, dtype: torch.dtype, device: str) -> Tensor:
        """NaN, inf and -inf in what is not named."""
        x = randn(self.num_source, columns, dtype=dtype, device=device)
        for i, row in enumerate(range(2, self.num_source, 3)):
            x[row] = (torch.nan, torch.inf, -torch.inf)[i % 3]
        return x

    def copied(self, x: Tensor, index: Tensor) -> Tensor:
        """The rows themselves, NaN in those of no expert."""
        rows = x.new_full((self.layout.num_rows, x.shape[1]), torch.nan)
        owned = owned_of(self.layout)
        rows[owned] = x[index.long()[owned]]
        return rows


CASES = {
    "more-rows-than-source": Case(contiguous([17, 1, 33, 0, 2], spare=3), 20),
    "less-rows-than-source": Case(contiguous([2, 0, 1], spare=1), 200),
    "gaps": Case(LAYOUTS["padded-8"], 11),
    "evenly-with-gaps": Case(LAYOUTS["padded-evenly"], 9),
    "equal": Case(LAYOUTS["equal"], 15),
    "masked-first-idle": Case(LAYOUTS["masked-first-idle"], 7),
    "m-indices-with-idle": Case(LAYOUTS["m-indices-with-idle"], 10),
    "m-indices": Case(LAYOUTS["m-indices"], 4),
    "one-source": Case(LAYOUTS["tail-of-five"], 1),
    "no-rows": Case(LAYOUTS["no-rows"], 7),
    "rows-of-nobody": Case(LAYOUTS["tail-rows-only"], 7),
    "rows-of-nobody-no-source": Case(LAYOUTS["tail-rows-only"], 0),
    "nothing": Case(LAYOUTS["no-rows"], 0),
    "no-experts": Case(contiguous([], spare=3), 4),
}
UNEVEN = CASES["more-rows-than-source"]
GAPS = CASES["gaps"]


def owned_of(layout: Layout) -> list[int]:
    return [row for start, end in layout.bounds for row in range(start, end)]


def weight(case: Case, rows: int, columns: int, place: Place) -> Tensor:
    return randn(case.layout.num_experts, rows, columns, dtype=place.dtype, device=place.device)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """To the bit on a CPU. On a GPU rows that are neighbours may take other kernels: within a few roundings."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert expected.isfinite().all()
    if actual.device.type == "cpu":
        assert torch.equal(actual, expected)
    elif actual.numel():
        error = (actual.double() - expected.double()).abs().max()
        assert error <= 4 * eps(actual.dtype) * expected.double().abs().max()


INDEXED = [(True, False), (False, True), (True, True)]
