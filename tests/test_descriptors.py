"""Ragged descriptors: where TMA looks for the rows of an expert, by its own arithmetic, and what it leaves out."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("triton", reason="needs Triton")

from grouped_experts.ops.hopper.descriptors import _ANY, MOST_ROWS, rows_at
from grouped_experts.ops.hopper.dispatch import is_fast

MOST = MOST_ROWS.value


@pytest.mark.parametrize("stride", [8, 2048, 57344, 2**20])
@pytest.mark.parametrize(
    ("first", "end"),
    [(0, 1), (0, 0), (5, 5), (7, 300), (0, MOST), (MOST - 64, MOST), (MOST - 1, MOST), (MOST + 63, MOST), (363, 300)],
)
def test_rows_of_an_expert(first: int, end: int, stride: int) -> None:
    wrap, until, row = (int(getattr(at, "value", at)) for at in rows_at.fn(first, end))
    for size in (2, 4):
        strides = (size * (2**34 - stride), size * stride, size * stride)
        address = wrap * strides[0] + until * strides[1] + row * strides[2]
        assert address % 2**64 == size * first * stride
        assert all(0 < s < 2**40 and s % 16 == 0 for s in strides)
    assert max(wrap, until) < _ANY
    assert 0 <= row < 2**31
    assert MOST - row == end - first  # of as many rows `row` is within the bound


def test_more_rows_than_that_go_to_the_portable_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="grouped_experts.ops.hopper.dispatch"):
        assert is_fast("product", MOST, 8, 64)
        assert not is_fast("product", MOST + 1, 8, 64)
    assert "portable, since 1073741825 rows are many" in caplog.text
