"""RowRanges: every constructor against ranges worked out by hand or by a plain loop."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from conftest import needs_cuda, no_synchronisation
from hypothesis import given
from hypothesis import strategies as st
from inputs import COUNTS, LAYOUTS, Layout, layouts

from grouped_experts import RowRanges
from grouped_experts.ops import m_grouped_gemm
from grouped_experts.rows import _ranges

INT32_MAX = 2**31 - 1


def bounds_of(rows: RowRanges) -> list[tuple[int, int]]:
    return list(zip(rows.starts.tolist(), rows.ends.tolist(), strict=True))


def check(rows: RowRanges, bounds: list[tuple[int, int]], device: str) -> None:
    assert bounds_of(rows) == bounds
    assert rows.num_experts == len(bounds)
    assert rows.counts.tolist() == [end - start for start, end in bounds]
    for tensor in (rows.starts, rows.ends, rows.counts):
        assert tensor.dtype == torch.int32
        assert tensor.device.type == device
        assert tensor.is_contiguous()


# ---- values


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout: Layout, device: str) -> None:
    check(layout.rows(device), layout.bounds, device)


def as_every_second(counts: list[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    buffer = torch.full((2 * len(counts),), -7, dtype=dtype, device=device)
    buffer[::2] = torch.tensor(counts, dtype=dtype, device=device)
    return buffer[::2]


COUNTS_AS = {
    "list": lambda counts, device: counts,
    "tuple": lambda counts, device: tuple(counts),
    "int32": lambda counts, device: torch.tensor(counts, dtype=torch.int32, device=device),
    "int64": lambda counts, device: torch.tensor(counts, dtype=torch.int64, device=device),
    "int32 on the CPU": lambda counts, device: torch.tensor(counts, dtype=torch.int32),
    "every second int32": lambda counts, device: as_every_second(counts, torch.int32, device),
    "every second int64": lambda counts, device: as_every_second(counts, torch.int64, device),
    "expanded": lambda counts, device: torch.tensor(counts[:1], device=device).expand(len(counts)),
}


@pytest.mark.parametrize("given_as", COUNTS_AS)
def test_counts_in_every_form(given_as: str, device: str) -> None:
    values = [4, 4, 4] if given_as == "expanded" else [3, 0, 4]
    counts = COUNTS_AS[given_as](values, device)
    before = counts.clone() if isinstance(counts, torch.Tensor) else list(counts)
    a, b, c = values
    check(RowRanges.contiguous(counts, device=device), [(0, a), (a, a + b), (a + b, a + b + c)], device)
    check(
        RowRanges.padded(counts, 8, device=device), [(0, a), (8, 8 + b), (16 if b else 8, c + (16 if b else 8))], device
    )
    check(RowRanges.masked(counts, 5, device=device), [(0, a), (5, 5 + b), (10, 10 + c)], device)
    assert torch.equal(counts, before) if isinstance(counts, torch.Tensor) else list(counts) == before


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_padding_to_one_is_contiguous(counts: list[int]) -> None:
    assert bounds_of(RowRanges.padded(counts, 1)) == bounds_of(RowRanges.contiguous(counts))


def test_padded_to_128(device: str) -> None:
    rows = RowRanges.padded([5, 128, 129, 0, 1], 128, device=device)
    check(rows, [(0, 5), (128, 256), (256, 385), (512, 512), (512, 513)], device)


def test_padding_behind_the_last_expert_need_not_exist() -> None:
    check(RowRanges.padded([5, 3], 8, num_rows=11), [(0, 5), (8, 11)], "cpu")
    # Nor does the place of an expert without rows: it is an empty range at the end.
    check(RowRanges.padded([5, 0], 8, num_rows=5), [(0, 5), (5, 5)], "cpu")


@pytest.mark.parametrize("spare", [0, 1, 100])
def test_rows_beyond_the_sum_are_nobodys(spare: int, device: str) -> None:
    check(RowRanges.contiguous([2, 3], num_rows=5 + spare, device=device), [(0, 2), (2, 5)], device)


def test_no_experts(device: str) -> None:
    none = torch.empty(0, dtype=torch.int32, device=device)
    for rows in (
        RowRanges.contiguous([], device=device),
        RowRanges.contiguous(none),
        RowRanges.padded(none, 8),
        RowRanges.masked([], 4, device=device),
        RowRanges.masked(none, 4),
        RowRanges.from_padded_cumsum(none, 8),
        RowRanges.from_m_indices(none, 0),
        RowRanges.from_m_indices(torch.full((3,), -1, dtype=torch.int32, device=device), 0),
    ):
        check(rows, [], device)


def test_no_rows(device: str) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    check(RowRanges.contiguous([0, 0], num_rows=0, device=device), [(0, 0), (0, 0)], device)
    check(RowRanges.masked([0, 0], 0, device=device), [(0, 0), (0, 0)], device)
    check(RowRanges.from_m_indices(none, 2), [(0, 0), (0, 0)], device)


def test_masked_full(device: str) -> None:
    check(RowRanges.masked([4, 4], 4, device=device), [(0, 4), (4, 8)], device)


M_INDICES = {
    "no gaps": ([0, 0, 1, 2], 3, [(0, 2), (2, 3), (3, 4)]),
    "gap before": ([-1, -1, 0, 1], 2, [(2, 3), (3, 4)]),
    "gap between": ([0, 0, -1, -1, 1], 2, [(0, 2), (4, 5)]),
    "gap behind": ([0, 1, -1], 2, [(0, 1), (1, 2)]),
    "first idle": ([1, 1, 2], 3, [(0, 0), (0, 2), (2, 3)]),
    "middle idle": ([0, 0, -1, 2], 3, [(0, 2), (2, 2), (3, 4)]),
    "last idle": ([0, 1, -1], 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
    "all rows of nobody": ([-1, -1, -1], 2, [(0, 0), (0, 0)]),
    "one expert": ([0, 0, 0], 1, [(0, 3)]),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("m_indices", "num_experts", "bounds"), M_INDICES.values(), ids=M_INDICES.keys())
def test_from_m_indices(
    m_indices: list[int], num_experts: int, bounds: list[tuple[int, int]], dtype: torch.dtype, device: str
) -> None:
    for validate in (False, True):
        tensor = torch.tensor(m_indices, dtype=dtype, device=device)
        check(RowRanges.from_m_indices(tensor, num_experts, validate=validate), bounds, device)
        tensor = as_every_second(m_indices, dtype, device)
        check(RowRanges.from_m_indices(tensor, num_experts, validate=validate), bounds, device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_padded_cumsum(dtype: torch.dtype, device: str) -> None:
    ends = torch.tensor([3, 8, 17, 24, 24], dtype=dtype, device=device)
    check(RowRanges.from_padded_cumsum(ends, 8), [(0, 3), (8, 8), (8, 17), (24, 24), (24, 24)], device)
    check(RowRanges.from_padded_cumsum(ends[:1], 8), [(0, 3)], device)
    assert ends.tolist() == [3, 8, 17, 24, 24]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_padded_cumsum_keeps_a_copy(dtype: torch.dtype, device: str) -> None:
    """Of its own memory, contiguous: kernels take starts[e] and ends[e] to lie e elements behind the first."""
    ends = torch.tensor([3, 8, 17, 24, 24], dtype=dtype, device=device)
    rows = RowRanges.from_padded_cumsum(ends[::2], 1)
    ends.fill_(-1)
    check(rows, [(0, 3), (3, 17), (17, 24)], device)


def test_a_running_sum_just_below_the_int32_limit(device: str) -> None:
    half = 2**30
    check(RowRanges.contiguous([half, half - 1], device=device), [(0, half), (half, INT32_MAX)], device)
    ends = torch.tensor([INT32_MAX], dtype=torch.int64, device=device)
    check(RowRanges.from_padded_cumsum(ends, 128), [(0, INT32_MAX)], device)


def test_to_another_device(device: str) -> None:
    check(RowRanges.contiguous([1, 2]).to(device), [(0, 1), (1, 3)], device)
    check(RowRanges.contiguous([1, 2], device=device).to("cpu"), [(0, 1), (1, 3)], "cpu")


def test_ranges_cannot_be_reassigned() -> None:
    rows = RowRanges.contiguous([1])
    with pytest.raises(AttributeError):
        rows.starts = rows.ends


# ---- hypothesis


@given(layouts())
def test_ranges_ascend_are_disjoint_and_stay_within_the_rows(layout: Layout) -> None:
    rows = layout.rows("cpu")
    check(rows, layout.bounds, "cpu")
    edges = torch.stack([rows.starts, rows.ends], dim=1).flatten().tolist()
    assert edges == sorted(edges)
    assert all(0 <= edge <= layout.num_rows for edge in edges)
    assert rows.counts.sum() == layout.num_rows - len(layout.unowned())


@given(st.lists(st.integers(0, 2**20), max_size=40), st.integers(1, 300))
def test_padded_starts_are_the_least_multiples_behind(counts: list[int], alignment: int) -> None:
    bounds = bounds_of(RowRanges.padded(counts, alignment))
    behind = 0
    for count, (start, end) in zip(counts, bounds, strict=True):
        assert start % alignment == 0
        assert 0 <= start - behind < alignment
        assert end - start == count
        behind = end


@given(st.lists(st.integers(-1, 3), max_size=8))
def test_m_indices_are_accepted_if_and_only_if_in_ascending_runs(m_indices: list[int]) -> None:
    owners = [owner for owner in m_indices if owner >= 0]
    runs = [owner for i, owner in enumerate(m_indices) if owner >= 0 and (i == 0 or m_indices[i - 1] != owner)]
    right = owners == sorted(owners) and len(runs) == len(set(runs))
    tensor = torch.tensor(m_indices, dtype=torch.int32)
    if right:
        rows = RowRanges.from_m_indices(tensor, 4)
        again = [-1] * len(m_indices)
        for expert, (start, end) in enumerate(bounds_of(rows)):
            again[start:end] = [expert] * (end - start)
        assert again == m_indices
    else:
        with pytest.raises(ValueError, match="m_indices"):
            RowRanges.from_m_indices(tensor, 4)


# ---- refusals

FORMS = {
    "list": lambda counts: counts,
    "int32": lambda counts: torch.tensor(counts, dtype=torch.int32),
    "int64": lambda counts: torch.tensor(counts, dtype=torch.int64),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("make", "counts", "message"),
    [
        (RowRanges.contiguous, [3, -1, 2], "counts: wanted counts >= 0, got -1 for expert 1"),
        (lambda c: RowRanges.padded(c, 8), [-1, 9], "counts: wanted counts >= 0, got -1 for expert 0"),
        (lambda c: RowRanges.masked(c, 8), [3, -2], "counts: wanted counts >= 0, got -2 for expert 1"),
        (lambda c: RowRanges.contiguous(c, num_rows=8), [5, 5], "counts: wanted rows within the 8 .* end at row 10"),
        (lambda c: RowRanges.contiguous(c, num_rows=0), [0, 1], "counts: wanted rows within the 0 .* end at row 1"),
        (lambda c: RowRanges.padded(c, 8, num_rows=9), [5, 2], "counts: wanted rows within the 9 .* end at row 10"),
        (lambda c: RowRanges.masked(c, 4), [4, 5], "counts: wanted at most capacity = 4 rows, got 5 for expert 1"),
        (RowRanges.contiguous, [INT32_MAX, 1], f"counts: wanted rows within the {INT32_MAX} .* end at row {2**31}"),
        (lambda c: RowRanges.padded(c, 2**30), [1, 1, 1], f"counts: wanted rows within .* end at row {2**31 + 1}"),
        (lambda c: RowRanges.masked(c, 2**30), [1, 1, 1], f"counts: wanted rows within .* end at row {3 * 2**30}"),
    ],
    ids=[
        "negative", "padded-negative", "masked-negative", "sum-beyond", "sum-beyond-none", "padding-beyond",
        "beyond-capacity", "int32-overflow", "padded-int32-overflow", "masked-int32-overflow",
    ],
)  # fmt: skip
def test_bad_counts_on_the_host(make, counts: list[int], message: str, form: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(FORMS[form](counts))


MAKERS = {
    "contiguous": RowRanges.contiguous,
    "padded": lambda counts: RowRanges.padded(counts, 8),
    "masked": lambda counts: RowRanges.masked(counts, 8),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        (torch.tensor([1.0, 2.0]), TypeError, "counts: wanted dtype int32 or int64, got torch.float32"),
        (torch.tensor([True, False]), TypeError, "counts: wanted dtype int32 or int64, got torch.bool"),
        (torch.tensor([1, 2], dtype=torch.uint8), TypeError, "counts: wanted dtype int32 or int64, got torch.uint8"),
        (torch.tensor([1, 2], dtype=torch.int16), TypeError, "counts: wanted dtype int32 or int64, got torch.int16"),
        (torch.tensor([[1, 2]]), ValueError, r"counts: wanted one dimension, got shape \(1, 2\)"),
        (torch.tensor(3), ValueError, r"counts: wanted one dimension, got shape \(\)"),
        ([1, 2.0], TypeError, "counts: wanted a list of int, got a float"),
        ([1, True], TypeError, "counts: wanted a list of int, got a bool"),
        ([1, None], TypeError, "counts: wanted a list of int, got a NoneType"),
        (3, TypeError, "counts: wanted a list of int or an integer tensor, got int"),
        (None, TypeError, "counts: wanted a list of int or an integer tensor, got NoneType"),
    ],
    ids=str,
)
def test_counts_that_are_none(make, counts: object, error: type[Exception], message: str, device: str) -> None:
    if isinstance(counts, torch.Tensor):
        counts = counts.to(device)
    with pytest.raises(error, match=message):
        make(counts)


@pytest.mark.parametrize("alignment", [0, -1])
def test_alignment_below_one(alignment: int) -> None:
    message = f"alignment: wanted a positive int, got {alignment}"
    with pytest.raises(ValueError, match=message):
        RowRanges.padded([1], alignment)
    with pytest.raises(ValueError, match=message):
        RowRanges.from_padded_cumsum(torch.tensor([1]), alignment)


def test_negative_sizes() -> None:
    with pytest.raises(ValueError, match="capacity: wanted an int >= 0, got -1"):
        RowRanges.masked([1], -1)
    with pytest.raises(ValueError, match="num_experts: wanted an int >= 0, got -1"):
        RowRanges.from_m_indices(torch.tensor([0]), -1)


@pytest.mark.parametrize("bad", [torch.tensor([1.0]), torch.tensor([True]), [1], None], ids=str)
def test_other_integers_of_the_wrong_type(bad: object) -> None:
    with pytest.raises(TypeError, match="ends: wanted"):
        RowRanges.from_padded_cumsum(bad, 8)
    with pytest.raises(TypeError, match="m_indices: wanted"):
        RowRanges.from_m_indices(bad, 2)


def test_other_integers_of_the_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"ends: wanted one dimension, got shape \(1, 1\)"):
        RowRanges.from_padded_cumsum(torch.tensor([[1]]), 8)
    with pytest.raises(ValueError, match=r"m_indices: wanted one dimension, got shape \(1, 1\)"):
        RowRanges.from_m_indices(torch.tensor([[1]]), 2)


BAD_M_INDICES = {
    "descending": [1, 0],
    "descending-runs": [1, 1, -1, 0, 0],
    "split": [0, 1, 0],
    "split-by-a-gap": [0, -1, 0],
    "alternating": [0, 1, 0, 1],
    "beyond": [0, 1, 3],
    "below": [0, -2, 1],
}


@pytest.mark.parametrize("m_indices", BAD_M_INDICES.values(), ids=BAD_M_INDICES.keys())
def test_bad_m_indices_on_the_cpu(m_indices: list[int]) -> None:
    message = "m_indices: wanted -1 or experts 0..2 in ascending runs, one run an expert, got "
    for validate in (False, True):
        with pytest.raises(ValueError, match=re.escape(message + str(m_indices))):
            RowRanges.from_m_indices(torch.tensor(m_indices), 3, validate=validate)


BAD_BOUNDS = {
    "overlapping": ([0, 2], [3, 5], "got 2:5 .*expert 1"),
    "descending": ([3, 0], [6, 3], "got 0:3 .*expert 1"),
    "beyond": ([0, 3], [3, 7], "got 3:7 .*expert 1"),
    "below": ([-1, 3], [3, 6], "got -1:3 .*expert 0"),
    "backwards": ([3, 3], [0, 6], "got 3:0 .*expert 0"),
}


@pytest.mark.parametrize(("starts", "ends", "message"), BAD_BOUNDS.values(), ids=BAD_BOUNDS.keys())
def test_ops_on_the_cpu_refuse_other_ranges(starts: list[int], ends: list[int], message: str) -> None:
    rows = RowRanges(torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32))
    with pytest.raises(ValueError, match="rows: wanted ascending, disjoint ranges within 6 rows, " + message):
        m_grouped_gemm(torch.ones(6, 2), torch.ones(2, 3, 2), rows)


@pytest.mark.parametrize("ends", [[2**32 + 3, 2**32 + 5], [3, 2**32 + 5], [2**31, 2**31]])
def test_a_padded_running_sum_beyond_int32_does_not_wrap(ends: list[int]) -> None:
    """On the CPU the op refuses it at the latest; it must not turn into other, valid ranges."""

    def use() -> None:
        rows = RowRanges.from_padded_cumsum(torch.tensor(ends), 1)
        m_grouped_gemm(torch.ones(6, 2), torch.ones(2, 3, 2), rows)

    with pytest.raises(ValueError, match="ends|rows"):
        use()


# ---- device counts: not read on the host, clamped instead


HOSTILE = {
    "beyond": [5, 5],
    "negative": [-1, 9],
    "int32-overflow": [INT32_MAX, INT32_MAX],
    "int64-overflow": [2**62, 2**62],
    "largest": [2**63 - 1, 2**63 - 1],
    "smallest": [-(2**63), 4],
}


@pytest.mark.parametrize("counts", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize(
    ("alignment", "capacity", "num_rows", "masked"),
    [(1, 0, 8, False), (128, 0, 130, False), (1, 4, 8, True)],
    ids=["contiguous", "padded", "masked"],
)
def test_device_counts_never_leave_the_rows(
    alignment: int, capacity: int, num_rows: int, masked: bool, counts: list[int], device: str
) -> None:
    tensor = torch.tensor(counts, device=device)
    if device == "cpu":  # refused there by the constructors: this is what they run on a device
        rows = RowRanges(*_ranges(tensor, alignment, capacity, num_rows, masked))
    elif masked:
        rows = RowRanges.masked(tensor, capacity)
    else:
        rows = RowRanges.padded(tensor, alignment, num_rows=num_rows)
    edges = [edge for bounds in bounds_of(rows) for edge in bounds]
    assert edges == sorted(edges)
    assert edges[0] >= 0
    assert edges[-1] <= num_rows


@pytest.mark.gpu
@needs_cuda
def test_no_host_synchronisation() -> None:
    counts = torch.tensor([3, 0, 4], device="cuda")
    m_indices = torch.tensor([0, 0, -1, 2], device="cuda")
    with no_synchronisation():
        RowRanges.contiguous(counts, num_rows=7)
        RowRanges.padded(counts, 8)
        RowRanges.masked(counts, 4)
        RowRanges.from_padded_cumsum(counts.cumsum(0), 1)
        RowRanges.from_m_indices(m_indices, 3)
        RowRanges.from_m_indices(m_indices, 3, validate=True)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("m_indices", [BAD_M_INDICES["descending"], BAD_M_INDICES["split"], BAD_M_INDICES["beyond"]])
def test_validate_on_the_device(m_indices: list[int]) -> None:
    """In a process of its own: a failed device assertion takes the CUDA context with it."""
    code = (
        "import torch; from grouped_experts import RowRanges\n"
        f"RowRanges.from_m_indices(torch.tensor({m_indices}, device='cuda'), 3, validate=True)\n"
        "torch.cuda.synchronize()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "assert" in result.stderr.lower()


# ---- registration

OPCHECK_COUNTS = {"some": [3, 0, 4], "one": [5], "none": []}


@pytest.mark.parametrize("counts", OPCHECK_COUNTS.values(), ids=OPCHECK_COUNTS.keys())
@pytest.mark.parametrize("layout", [(1, 0, 100, False), (8, 0, 100, False), (1, 6, INT32_MAX, True)], ids=str)
def test_opcheck(counts: list[int], layout: tuple[int, int, int, bool], device: str) -> None:
    ops = torch.ops.grouped_experts
    torch.library.opcheck(ops.ranges_from_tensor.default, (torch.tensor(counts, device=device).int(), *layout))
    torch.library.opcheck(ops.ranges_from_tensor.default, (as_every_second(counts, torch.int64, device), *layout))
    torch.library.opcheck(ops.ranges_from_list.default, (counts, *layout, torch.device(device)))
