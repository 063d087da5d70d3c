"""Casts to FP8: every block of 128 numbers, or of 128 x 128, with a scale of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from grouped_experts.ops.host_ranges import host_ranges
from grouped_experts.rows import FP8_BLOCK as BLOCK
from grouped_experts.rows import padded_rows

SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


def scales_of(largest: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """The largest |number| of a block over that of the dtype, up to the next power of two where asked for.

    NaN counts as infinity: a block that is not finite becomes NaN. A block of zeros has the smallest scale.
    """
    largest = torch.where(largest.isnan(), torch.inf, largest)
    most = torch.full_like(largest, torch.finfo(dtype).max)  # by a number, a GPU would multiply by its reciprocal
    scales = (largest / most).clamp(min=SMALLEST_SCALE)
    if not power_of_two:
        return scales
    mantissa, exponent = torch.frexp(scales)
    rounded = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return torch.where(scales.isinf(), scales, rounded)


def empty_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for `quantize_rows`."""
    rows, columns = x.shape
    return x.new_empty(rows, columns, dtype=dtype), empty_scales(x, rows, num_blocks(columns))


def empty_columns(x: Tensor, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for `quantize_columns`."""
    size = padded_rows(x.shape[0], num_experts)
    return x.new_empty(x.shape[1], size, dtype=dtype), empty_scales(x, x.shape[1], size // BLOCK)


def empty_scales(x: Tensor, rows: int, blocks: int) -> Tensor:
    """(rows, blocks), in memory column by column, each at a multiple of 16 bytes: what TMA wants of strides."""
    return x.new_empty_strided((rows, blocks), (1, (rows + 3) // 4 * 4), dtype=torch.float32)


def empty_blocks(w: Tensor, dtype: torch.dtype, transpose: bool) -> tuple[Tensor, Tensor]:
    """Room for `quantize_blocks`."""
    experts, *sizes = w.shape
    rows, columns = sizes[::-1] if transpose else sizes
    scales = w.new_empty(experts, num_blocks(rows), num_blocks(columns), dtype=torch.float32)
    return w.new_empty(experts, rows, columns, dtype=dtype), scales


def num_blocks(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def blocks_of(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """In fp32, every dimension of `dims`, counted from the last, filled up with zeros and split into (blocks, 128)."""
    x = x.float()
    for dim in dims:
        missing = -x.shape[dim] % BLOCK
        x = F.pad(x, (0, 0) * (-dim - 1) + (0, missing))
    for dim in sorted(dims):
        x = x.unflatten(dim, (x.shape[dim] // BLOCK, BLOCK))
    return x


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    tiles: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """Of all rows, with ranges too. (R, K), and scales (R, K / 128): those of a block column are neighbours."""
    if starts is not None and ends is not None:
        host_ranges(starts, ends, x.shape[0])  # for what it raises
    data, scales = empty_rows(x, dtype)
    blocks = blocks_of(x, (-1,))
    scales.copy_(scales_of(blocks.abs().amax(2), dtype, power_of_two))
    data.copy_((blocks * (1 / scales)[:, :, None]).flatten(1)[:, : x.shape[1]])
    return data, scales


def quantize_blocks(w: Tensor, dtype: torch.dtype, power_of_two: bool, transpose: bool) -> tuple[Tensor, Tensor]:
    """(E, N, K), and scales (E, N / 128, K / 128); transposed (E, K, N) and (E, K / 128, N / 128)."""
    data, scales = empty_blocks(w, dtype, transpose)
    blocks = blocks_of(w.transpose(1, 2) if transpose else w, (-2, -1))
    scales.copy_(scales_of(blocks.abs().amax((2, 4)), dtype, power_of_two))
    numbers = (blocks * (1 / scales)[:, :, None, :, None]).flatten(3).flatten(1, 2)
    data.copy_(numbers[:, : data.shape[1], : data.shape[2]])
    return data, scales


def quantize_columns(
    x: Tensor, starts: Tensor, ends: Tensor, dtype: torch.dtype, power_of_two: bool, x_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(K, P), the experts' rows one expert behind the other, each filled up with zeros to 128; scales (K, P / 128).

    What is behind the last expert's is zero. With x_scales, x is a cast by rows.
    """
    x = x if x_scales is None else dequantize_rows(x, x_scales)
    ranges = host_ranges(starts, ends, x.shape[0])
    data, scales = empty_columns(x, len(ranges), dtype)
    data.zero_()
    scales.zero_()
    row = 0
    for rows in ranges.cut(x):
        segment, segment_scales = quantize_rows(rows.t(), dtype, power_of_two)
        data[:, row : row + rows.shape[0]] = segment
        scales[:, row // BLOCK :][:, : segment_scales.shape[1]] = segment_scales
        row += BLOCK * segment_scales.shape[1]
    return data, scales


def quantize_rows_and_columns(
    x: Tensor, starts: Tensor, ends: Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *quantize_rows(x, dtype, power_of_two), *quantize_columns(x, starts, ends, dtype, power_of_two)


def dequantize_rows(data: Tensor, scales: Tensor) -> Tensor:
    """In fp32: number times scale."""
    return data.float() * scales.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


def dequantize_blocks(data: Tensor, scales: Tensor) -> Tensor:
    rows, columns = data.shape[1:]
    each = scales.repeat_interleave(BLOCK, 1)[:, :rows].repeat_interleave(BLOCK, 2)[:, :, :columns]
    return data.float() * each
