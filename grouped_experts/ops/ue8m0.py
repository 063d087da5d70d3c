"""Scales that are powers of two in their packed form, UE8M0: four exponents of eight bits in an int32.

An exchange format: what dispatchers and other kernels send and take. Products here take scales in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.ops.checks import check_shape
from grouped_experts.ops.reference.quantize import num_blocks

SHIFTS = (0, 8, 16, 24)  # of the four exponents of a word
EXPONENT = 0x7F800000  # its bits in fp32
SMALLEST = 2.0**-127  # of exponent 0, which as bits of fp32 would be zero


def pack_ue8m0(scales: Tensor) -> Tensor:
    """The exponents of scales (T, B) fp32, of a cast with `power_of_two`, four neighbours of a row to a word.

    Returns int32 (T, ceil(B / 4)): byte j of word i, from the lowest, is 127 + log2 of block 4 i + j, 255 for one that
    is infinite; bytes behind the last block are 0. In memory column by column, each at a multiple of 16 bytes, as
    DeepGEMM has them. Raises TypeError for a dtype, ValueError for a shape, and on a CPU for a scale that is no power
    of two; on a device its bits below the exponent are dropped.
    """
    if scales.dtype != torch.float32:
        raise TypeError(f"scales: wanted dtype float32, got {scales.dtype}")
    check_shape("scales", scales, (None, None), "(T, B)")
    bits = scales.contiguous().view(torch.int32)
    if scales.device.type == "cpu" and ((bits & ~EXPONENT) != 0).any():
        wrong = scales[(bits & ~EXPONENT) != 0][0].item()
        raise ValueError(f"scales: wanted powers of two from 2^-126 on, got {wrong}")
    rows, blocks = scales.shape
    words = -(-blocks // len(SHIFTS))
    exponents = torch.zeros(rows, words * len(SHIFTS), dtype=torch.int32, device=scales.device)
    exponents[:, :blocks] = (bits & EXPONENT) >> 23
    bytes_of_word = exponents.view(rows, words, len(SHIFTS)).unbind(2)
    packed = torch.empty_strided((rows, words), (1, (rows + 3) // 4 * 4), dtype=torch.int32, device=scales.device)
    packed.zero_()
    for byte, shift in zip(bytes_of_word, SHIFTS, strict=True):
        packed |= byte << shift
    return packed


def unpack_ue8m0(packed: Tensor, columns: int) -> Tensor:
    """The scales (T, B) fp32 of blocks of 128 of so many columns, B = ceil(columns / 128).

    packed (T, ceil(B / 4)) int32, as `pack_ue8m0` returns it, of any strides. Raises TypeError for a dtype, ValueError
    for a shape.
    """
    if packed.dtype != torch.int32:
        raise TypeError(f"packed: wanted dtype int32, got {packed.dtype}")
    blocks = num_blocks(columns)
    check_shape("packed", packed, (None, -(-blocks // len(SHIFTS))), "(T, ceil(B / 4))")
    exponents = torch.stack([packed >> shift & 255 for shift in SHIFTS], 2).flatten(1)[:, :blocks]
    return torch.where(exponents == 0, SMALLEST, (exponents << 23).view(torch.float32))
