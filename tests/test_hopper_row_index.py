"""The Gluon kernels that gather rows in their loads, against what the same kernels make of a copy of those rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from conftest import Place, on_hopper
from inputs import ACTIVATIONS, contiguous, randn, random_rows
from row_index import INDEXED, Case, assert_same, owned_of, weight
from torch import Tensor

from grouped_experts.ops import (
    fc1_activation,
    fc2_dgrad_activation,
    k_grouped_gemm,
    k_grouped_gemm_accumulate,
    m_grouped_gemm,
)
from grouped_experts.rows import GATHERED_COLUMNS

OPS = torch.ops.grouped_experts
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

needs_hopper = pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU")

# 119 rows on average: tiles of 128. One row, half a tile, a row more, a whole one, several; spare rows behind.
LARGE = contiguous([130, 0, 1, 64, 65, 128, 300, 256], spare=5)
# H and I that are multiples of 8 and of no tile; I on both sides of where rows are gathered before instead.
HIDDEN, NARROW, WIDE = 200, (136, 264), (520, 1032)

by_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
by_source = pytest.mark.parametrize("num_source", [40, 500, 5000])
by_inner = pytest.mark.parametrize("inner", NARROW + WIDE)


def drained(paths: list[str]) -> list[str]:
    """The kernels that calls took since the last question."""
    taken = paths[:]
    paths.clear()
    return taken


def in_wide_rows(x: Tensor) -> Tensor:
    """A row stride of H + 8, NaN behind every row."""
    return torch.full((x.shape[0], x.shape[1] + 8), torch.nan, dtype=x.dtype, device=x.device)[:, :-8].copy_(x)


def the_same_twenty_times(run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """To the bit, also beside another kernel that occupies part of the GPU."""
    other, m = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=BF16)
    first = run()
    for repeat in range(1, 20):
        with torch.cuda.stream(other):
            for _ in range(repeat % 4):
                torch.mm(m, m)
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
    other.synchronize()
    return first


def assert_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for result, value in zip(actual, expected, strict=True):
        assert value.isfinite().all()
        assert torch.equal(result, value)


def test_sizes_lie_on_both_sides_of_the_border() -> None:
    assert max(NARROW) <= GATHERED_COLUMNS < min(WIDE)


@pytest.mark.gpu
@needs_hopper
@by_source
@by_inner
@by_dtype
def test_gluon_m_grouped_gemm(dtype: torch.dtype, inner: int, num_source: int, paths: list[str]) -> None:
    case, place = Case(LARGE, num_source), Place("cuda", dtype)
    rows, index, x = LARGE.rows("cuda"), case.index("cuda"), in_wide_rows(case.source(HIDDEN, dtype, "cuda"))
    copied, owned = case.copied(x, index), owned_of(LARGE)
    bias = randn(LARGE.num_experts, inner, dtype=dtype, device="cuda")
    scale = random_rows(LARGE, dtype=FP32, device="cuda")
    for transpose_w in (True, False):
        w = weight(case, inner, HIDDEN, place) if transpose_w else weight(case, HIDDEN, inner, place)
        run = partial(m_grouped_gemm, w=w, rows=rows, bias=bias, bias_scale=scale, transpose_w=transpose_w)
        paths.clear()
        (y,) = the_same_twenty_times(lambda run=run: (run(x, row_index=index),))
        assert drained(paths) == ["m_grouped_gemm: Gluon"] * 20
        assert_bits((y,), (run(copied),))
        assert not y[LARGE.unowned()].any()
        arguments = x, w, rows.starts, rows.ends, bias, scale, transpose_w, None, index, False
        assert torch.equal(OPS.m_grouped_gemm(*arguments)[owned], y[owned])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("activation", ACTIVATIONS)
@by_inner
@by_dtype
def test_gluon_fc1_activation(dtype: torch.dtype, inner: int, activation: str, paths: list[str]) -> None:
    case, owned = Case(LARGE, 500), owned_of(LARGE)
    width = inner if activation == "squared_relu" else 2 * inner
    rows, index, x = LARGE.rows("cuda"), case.index("cuda"), in_wide_rows(case.source(HIDDEN, dtype, "cuda"))
    w, probs = weight(case, width, HIDDEN, Place("cuda", dtype)) / 16, random_rows(LARGE, dtype=FP32, device="cuda")
    bias = randn(LARGE.num_experts, width, dtype=dtype, device="cuda")

    def run(x: Tensor, index: Tensor | None) -> tuple[Tensor, ...]:
        results = fc1_activation(x, w, rows, probs, bias, activation=activation, row_index=index)
        return tuple(t[owned] for t in results)

    actual = the_same_twenty_times(lambda: run(x, index))
    assert drained(paths) == ["fc1_activation: Gluon"] * 20
    assert_bits(actual, run(case.copied(x, index), None))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("activation", ACTIVATIONS)
@by_inner
@by_dtype
def test_gluon_fc2_dgrad_activation(dtype: torch.dtype, inner: int, activation: str, paths: list[str]) -> None:
    case, owned = Case(LARGE, 500), owned_of(LARGE)
    rows, index, dy = LARGE.rows("cuda"), case.index("cuda"), in_wide_rows(case.source(HIDDEN, dtype, "cuda"))
    w, probs = weight(case, HIDDEN, inner, Place("cuda", dtype)) / 16, random_rows(LARGE, dtype=FP32, device="cuda")
    h = random_rows(LARGE, inner if activation == "squared_relu" else 2 * inner, dtype=dtype, device="cuda")
    bias = randn(LARGE.num_experts, HIDDEN, dtype=dtype, device="cuda")

    def run(dy: Tensor, index: Tensor | None) -> tuple[Tensor, ...]:
        dh, a, dprobs = fc2_dgrad_activation(dy, w, h, rows, probs, bias, activation=activation, row_index=index)
        return dh[owned], a[owned], dprobs

    actual = the_same_twenty_times(lambda: run(dy, index))
    assert drained(paths) == ["fc2_dgrad_activation: Gluon"] * 20
    # The sum of dy . b2_e is laid out, and so added up, by what the stride of the rows allows, gathered before or not.
    copied = case.copied(dy, index)
    assert_bits(actual, run(in_wide_rows(copied) if inner in NARROW else copied, None))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("indexed", INDEXED, ids=["a", "b", "both"])
@by_source
@by_inner
@by_dtype
def test_gluon_k_grouped_gemm(
    dtype: torch.dtype, inner: int, num_source: int, indexed: tuple[bool, bool], paths: list[str]
) -> None:
    """Whole blocks of rows, parts of one, and an expert that is contracted in pieces."""
    for layout in (LARGE, contiguous([2600, 0, 64, 5300, *[64] * 20], spare=3)):
        case, rows = Case(layout, num_source), layout.rows("cuda")
        sources = [in_wide_rows(case.source(n, dtype, "cuda")) for n in (HIDDEN, inner)]
        indices = [case.index("cuda") if by_index else None for by_index in indexed]
        copies = [
            random_rows(layout, x.shape[1], dtype=dtype, device="cuda") if index is None else case.copied(x, index)
            for x, index in zip(sources, indices, strict=True)
        ]
        a, b = (c if i is None else x for x, c, i in zip(sources, copies, indices, strict=True))
        options = {"a_index": indices[0], "b_index": indices[1]}
        paths.clear()
        actual = the_same_twenty_times(lambda a=a, b=b, rows=rows, o=options: (k_grouped_gemm(a, b, rows, **o),))
        assert drained(paths) == ["k_grouped_gemm: Gluon"] * 20
        assert_bits(actual, (k_grouped_gemm(*copies, rows),))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("indexed", INDEXED, ids=["a", "b", "both"])
@by_inner
@by_dtype
def test_gluon_k_grouped_gemm_accumulate(
    dtype: torch.dtype, inner: int, indexed: tuple[bool, bool], paths: list[str]
) -> None:
    layout = contiguous([2000, 0, 700, 1], spare=3)
    case, rows = Case(layout, 1500), layout.rows("cuda")
    sources = [in_wide_rows(case.source(n, dtype, "cuda")) for n in (HIDDEN, inner)]
    indices = [case.index("cuda") if by_index else None for by_index in indexed]
    copies = [
        random_rows(layout, x.shape[1], dtype=dtype, device="cuda") if index is None else case.copied(x, index)
        for x, index in zip(sources, indices, strict=True)
    ]
    a, b = (c if i is None else x for x, c, i in zip(sources, copies, indices, strict=True))
    start = randn(4, HIDDEN, inner, dtype=FP32, device="cuda")

    def run(a: Tensor, b: Tensor, **options: Tensor | None) -> tuple[Tensor, ...]:
        total = start.clone()
        k_grouped_gemm_accumulate(total, a, b, rows, **options)
        return (total,)

    actual = the_same_twenty_times(lambda: run(a, b, a_index=indices[0], b_index=indices[1]))
    assert drained(paths) == ["k_grouped_gemm_accumulate: Gluon"] * 20
    assert_bits(actual, run(*copies))


@pytest.mark.gpu
@needs_hopper
def test_gluon_rows_that_are_not_aligned_go_to_the_portable_kernels(paths: list[str]) -> None:
    """60 columns in rows of 64: TMA could load them, copies of 16 bytes would not end with them."""
    case, place = Case(LARGE, 500), Place("cuda", BF16)
    x = torch.full((500, 64), torch.nan, dtype=BF16, device="cuda")[:, :60].copy_(case.source(60, BF16, "cuda"))
    index, rows = case.index("cuda"), LARGE.rows("cuda")
    w = torch.full((8, 136, 64), torch.nan, dtype=BF16, device="cuda")[..., :60].copy_(weight(case, 136, 60, place))
    y = m_grouped_gemm(x, w, rows, row_index=index)
    assert "not aligned" in drained(paths)[0]
    assert_same(y, m_grouped_gemm(case.copied(x, index), w, rows))
