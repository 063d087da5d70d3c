"""Packed scales: round trips, the bytes themselves, and what is refused."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grouped_experts import RowRanges
from grouped_experts.ops import (
    Quantized,
    m_grouped_gemm_fp8,
    pack_ue8m0,
    quantize_blocks,
    quantize_rows,
    unpack_ue8m0,
)


@given(st.integers(0, 9), st.integers(0, 9), st.randoms(use_true_random=False))
def test_there_and_back(rows: int, blocks: int, random: object) -> None:
    exponents = [[random.randint(-126, 128) for _ in range(blocks)] for _ in range(rows)]
    scales = torch.exp2(torch.tensor(exponents, dtype=torch.float64)).float().view(rows, blocks)  # 2^128 is infinity
    packed = pack_ue8m0(scales)
    assert packed.shape == (rows, -(-blocks // 4))
    assert torch.equal(unpack_ue8m0(packed, 128 * blocks), scales)
    assert torch.equal(unpack_ue8m0(packed.contiguous(), max(0, 128 * blocks - 127)), scales)


def test_bytes(device: str) -> None:
    """As a program in another language would read them."""
    scales = torch.tensor([[1.0, 2.0, 0.5, 2.0**-126, 4.0], [torch.inf, 8.0, 1.0, 1.0, 2.0**127]], device=device)
    packed = pack_ue8m0(scales.t().contiguous().t())
    assert [struct.pack("<2i", *row) for row in packed.tolist()] == [
        bytes([127, 128, 126, 1, 129, 0, 0, 0]),
        bytes([255, 130, 127, 127, 254, 0, 0, 0]),
    ]
    assert packed.stride() == (1, 4)
    assert unpack_ue8m0(torch.zeros(1, 1, dtype=torch.int32, device=device), 1).tolist() == [[2.0**-127]]


def test_a_product_of_what_was_sent(device: str) -> None:
    x = quantize_rows(torch.randn(5, 700, device=device), power_of_two=True)
    w, rows = quantize_blocks(torch.randn(2, 24, 700, device=device)), RowRanges.contiguous([2, 3], device=device)
    sent = Quantized(x.data, unpack_ue8m0(pack_ue8m0(x.scales), x.data.shape[1]))
    assert torch.equal(m_grouped_gemm_fp8(sent, w, rows), m_grouped_gemm_fp8(x, w, rows))


def test_refuses() -> None:
    for scales, error, message in (
        (torch.ones(2, 3).double(), TypeError, "scales: wanted dtype float32, got torch.float64"),
        (torch.ones(3), ValueError, r"scales: wanted shape \(T, B\)"),
        (torch.tensor([[1.0, 3.0]]), ValueError, "scales: wanted powers of two from 2.-126 on, got 3.0"),
        (torch.tensor([[-2.0]]), ValueError, "got -2.0"),
        (torch.tensor([[2.0**-127]]), ValueError, "got 5.87"),
    ):
        with pytest.raises(error, match=message):
            pack_ue8m0(scales)
    with pytest.raises(TypeError, match="packed: wanted dtype int32, got torch.int64"):
        unpack_ue8m0(torch.zeros(1, 1, dtype=torch.int64), 5)
    with pytest.raises(ValueError, match="packed: wanted shape"):
        unpack_ue8m0(torch.zeros(1, 1, dtype=torch.int32), 4 * 128 + 1)
