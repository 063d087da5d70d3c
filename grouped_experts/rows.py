"""RowRanges: which rows of a 2-D buffer belong to which expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grouped_experts.registration import define_op

INT32_MAX = 2**31 - 1

Counts = Sequence[int] | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowRanges:
    """E half-open row ranges of one 2-D buffer: expert e owns the rows starts[e] : ends[e].

    starts (E,) int32, ends (E,) int32, both on the device of the data; ranges ascend and are disjoint. Rows in no range
    belong to no expert. The constructors below never read a device value on the host; counts that are on the host are
    checked there, device counts are clamped so that no range leaves the buffer.

    `counts` is a list of int or an integer tensor (E,), int32 or int64, on the CPU or the device, of any stride.
    `num_rows` is the number of rows T of the buffer: with it, a sum beyond T is refused (host) or clamped (device).
    `device` is where starts and ends are put: by default that of the counts, or the CPU for a list.
    """

    starts: Tensor
    ends: Tensor

    @classmethod
    def contiguous(
        cls, counts: Counts, *, num_rows: int | None = None, device: torch.device | str | None = None
    ) -> RowRanges:
        """Experts follow one another: ends = cumsum(counts), starts = ends - counts.

        Raises TypeError for counts that are not integers, ValueError for negative counts or a sum beyond num_rows.
        """
        return cls._from_counts(counts, 1, 0, num_rows, device)

    @classmethod
    def padded(
        cls,
        counts: Counts,
        alignment: int,
        *,
        num_rows: int | None = None,
        device: torch.device | str | None = None,
    ) -> RowRanges:
        """Every range starts at a multiple of `alignment` A: starts = exclusive cumsum of counts rounded up to A.

        Raises as `contiguous` does, and ValueError for an alignment below 1.
        """
        if alignment < 1:
            raise ValueError(f"alignment: wanted a positive int, got {alignment}")
        return cls._from_counts(counts, alignment, 0, num_rows, device)

    @classmethod
    def masked(cls, counts: Counts, capacity: int, *, device: torch.device | str | None = None) -> RowRanges:
        """Every expert has `capacity` C rows of its own, of which the first counts[e] are in use: starts = e * C.

        The buffer is (E, C, ...) flattened to (E * C, ...). Raises as `contiguous` does, and ValueError for a count
        beyond the capacity.
        """
        if capacity < 0:
            raise ValueError(f"capacity: wanted an int >= 0, got {capacity}")
        return cls._from_counts(counts, 1, capacity, None, device, masked=True)

    @classmethod
    def from_padded_cumsum(cls, ends: Tensor, alignment: int) -> RowRanges:
        """From the ends of padded ranges alone: starts[e] = ends[e - 1] rounded up to `alignment`, starts[0] = 0.

        ends (E,) int32 or int64: where each expert's rows end, not counting the padding behind them.
        Raises TypeError or ValueError for a tensor of another dtype or dimension; the values are the caller's promise,
        checked by the ops where they are on the host.
        """
        check_integers("ends", ends)
        if alignment < 1:
            raise ValueError(f"alignment: wanted a positive int, got {alignment}")
        ends = ends.to(torch.int64).clamp(0, INT32_MAX)
        starts = torch.cat([ends.new_zeros(min(1, ends.numel())), _round_up(ends[:-1], alignment)])
        return cls(starts.clamp(max=INT32_MAX).to(torch.int32), ends.to(torch.int32))

    @classmethod
    def from_m_indices(cls, m_indices: Tensor, num_experts: int, *, validate: bool = False) -> RowRanges:
        """From the expert of every row: m_indices (T,) int32 or int64, -1 for a row of no expert.

        The rows of each expert must be one run and the runs must ascend; rows of no expert may lie before, between and
        behind them. On the CPU this is checked (ValueError); on a device it is the caller's promise, which
        `validate=True` checks there without a synchronisation (`torch._assert_async`).
        """
        check_integers("m_indices", m_indices)
        if num_experts < 0:
            raise ValueError(f"num_experts: wanted an int >= 0, got {num_experts}")
        num_rows = m_indices.shape[0]
        # One slot more than experts takes the rows of no expert.
        slot = torch.where(m_indices < 0, num_experts, m_indices).clamp(max=num_experts).to(torch.int64)
        row = torch.arange(num_rows, device=m_indices.device)
        first = torch.full((num_experts + 1,), num_rows, device=m_indices.device)
        first = first.scatter_reduce(0, slot, row, "amin")[:num_experts]
        behind = torch.zeros(num_experts + 1, dtype=torch.int64, device=m_indices.device)
        behind = behind.scatter_reduce(0, slot, row + 1, "amax")[:num_experts]
        ends = behind.cummax(0).values if num_experts else behind
        starts = torch.minimum(first, ends)  # an expert without rows: an empty range behind the last one's
        if m_indices.device.type == "cpu" or validate:
            owned = ((m_indices >= 0) & (m_indices < num_experts)).sum()
            valid = (
                (m_indices.ge(-1) & m_indices.lt(num_experts)).all()
                & ((ends - starts).sum() == owned)
                & (starts[1:] >= ends[:-1]).all()
            )
            message = f"m_indices: wanted -1 or experts 0..{num_experts - 1} in ascending runs, one run an expert"
            if m_indices.device.type == "cpu":
                if not valid:
                    raise ValueError(f"{message}, got {m_indices.tolist()}")
            else:
                torch._assert_async(valid, message)
        return cls(starts.to(torch.int32), ends.to(torch.int32))

    @classmethod
    def _from_counts(
        cls,
        counts: Counts,
        alignment: int,
        capacity: int,
        num_rows: int | None,
        device: torch.device | str | None,
        masked: bool = False,
    ) -> RowRanges:
        if num_rows is not None and num_rows < 0:
            raise ValueError(f"num_rows: wanted an int >= 0, got {num_rows}")
        limit = INT32_MAX if num_rows is None else min(num_rows, INT32_MAX)
        if isinstance(counts, Tensor):
            check_integers("counts", counts)
            starts, ends = _ranges_from_tensor(counts, alignment, capacity, limit, masked)
            if device is not None:
                device = torch.device(device)
                starts, ends = _moved(starts, device), _moved(ends, device)
            return cls(starts, ends)
        if not isinstance(counts, (list, tuple)):
            raise TypeError(f"counts: wanted a list of int or an integer tensor, got {type(counts).__name__}")
        for count in counts:
            if not isinstance(count, int) or isinstance(count, bool):
                raise TypeError(f"counts: wanted a list of int, got a {type(count).__name__} in it: {counts}")
        device = torch.device("cpu" if device is None else device)
        return cls(*_ranges_from_list(list(counts), alignment, capacity, limit, masked, device))

    @property
    def num_experts(self) -> int:
        return self.starts.shape[0]

    @property
    def counts(self) -> Tensor:
        """Rows of each expert, (E,) int32."""
        return self.ends - self.starts

    def to(self, device: torch.device | str) -> RowRanges:
        """The same ranges, on another device."""
        return RowRanges(self.starts.to(device), self.ends.to(device))


def num_rows(x: Tensor, row_index: Tensor | None) -> int:
    """How many rows a product of x has: as many as x, or as its row index."""
    return (x if row_index is None else row_index).shape[0]


# Up to so many columns of weight fc2 dgrad gathers dy in its loads; for more, a copy is faster. The copy costs the more
# the fewer they are: on an H200, with it the product runs at 0.69 of its speed with gathering loads at 256 columns, and
# as fast at 768 and more. Products with wider tiles always gather in their loads.
GATHERED_COLUMNS = 512
SMALLEST_TILE = 16  # rows


def schedule_size(num_rows: int, num_experts: int) -> int:
    """Room for a header and every tile of rows: E ranges and E + 1 gaps have at most one tile each that is not full.

    One size for all sizes of tile, so that traced code does not depend on the choice.
    """
    return 1 + num_rows // SMALLEST_TILE + 2 * num_experts + 1


FP8_BLOCK = 128  # numbers of one scale
FP4_BLOCK = 32  # of one scale of FP4


def padded_rows(num_rows: int, num_experts: int) -> int:
    """Room for the rows of E ranges, each filled up to a multiple of FP8_BLOCK."""
    return FP8_BLOCK * (num_rows // FP8_BLOCK + num_experts)


def check_integers(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: wanted an integer tensor, got {type(tensor).__name__}")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: wanted dtype int32 or int64, got {tensor.dtype}")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: wanted one dimension, got shape {tuple(tensor.shape)}")


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Without waiting, unless the host is to read it."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def _round_up(x: Tensor, multiple: int) -> Tensor:
    return (x + (multiple - 1)) // multiple * multiple


def _ranges(counts: Tensor, alignment: int, capacity: int, limit: int, masked: bool) -> tuple[Tensor, Tensor]:
    """starts and ends in int32, clamped into [0, limit]; int64 inside, so that no running sum overflows."""
    counts = counts.to(torch.int64).clamp(0, limit)
    if masked:
        starts = torch.arange(counts.shape[0], device=counts.device) * capacity
        ends = starts + counts.clamp(max=capacity)
    else:
        lengths = _round_up(counts, alignment)
        starts = lengths.cumsum(0) - lengths
        ends = starts + counts
    return starts.clamp(max=limit).to(torch.int32), ends.clamp(max=limit).to(torch.int32)


def _check_counts(counts: list[int], alignment: int, capacity: int, limit: int, masked: bool) -> None:
    end = 0  # of the last row in use, paddings between the ranges included
    start = 0
    for expert, count in enumerate(counts):
        if count < 0:
            raise ValueError(f"counts: wanted counts >= 0, got {count} for expert {expert}")
        if masked and count > capacity:
            raise ValueError(f"counts: wanted at most capacity = {capacity} rows, got {count} for expert {expert}")
        if count:
            end = start + count
        start += -(-count // alignment) * alignment
    if masked:
        end = len(counts) * capacity
    if end > limit:
        raise ValueError(f"counts: wanted rows within the {limit} rows there are, got counts that end at row {end}")


def ranges_from_tensor(
    counts: Tensor, alignment: int, capacity: int, limit: int, masked: bool
) -> tuple[Tensor, Tensor]:
    if counts.device.type == "cpu":
        _check_counts(counts.tolist(), alignment, capacity, limit, masked)
    return _ranges(counts, alignment, capacity, limit, masked)


def _ranges_from_list_impl(
    counts: list[int], alignment: int, capacity: int, limit: int, masked: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    _check_counts(counts, alignment, capacity, limit, masked)
    starts, ends = _ranges(torch.tensor(counts, dtype=torch.int64), alignment, capacity, limit, masked)
    return _moved(starts, device), _moved(ends, device)


# Two ops, so that torch.compile neither guards on the values of counts nor reads them: a list that reaches
# `torch.tensor` in traced code is compiled anew for every list.
_ranges_from_tensor = define_op(
    "ranges_from_tensor(Tensor counts, SymInt alignment, SymInt capacity, SymInt limit, bool masked)"
    " -> (Tensor, Tensor)",
    implementation=ranges_from_tensor,
    fake=lambda counts, *_: (
        counts.new_empty(counts.shape, dtype=torch.int32),
        counts.new_empty(counts.shape, dtype=torch.int32),
    ),
)
_ranges_from_list = define_op(
    "ranges_from_list(SymInt[] counts, SymInt alignment, SymInt capacity, SymInt limit, bool masked, Device device)"
    " -> (Tensor, Tensor)",
    implementation=_ranges_from_list_impl,
    fake=lambda counts, *args: (
        torch.empty(len(counts), dtype=torch.int32, device=args[-1]),
        torch.empty(len(counts), dtype=torch.int32, device=args[-1]),
    ),
    factory=True,
)
