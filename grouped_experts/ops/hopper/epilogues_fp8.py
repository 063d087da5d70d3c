"""What becomes of a finished tile of FP8 operands: a plain store, or fc1's activation and its cast.

Each takes the same arguments and uses what it needs: left and right, the sums of one consumer (0 or 1: `half`), 128
columns each; rows m0 : end, column tile i_n. y, a and h are (T, parts, N), as in `epilogues.py`. out_smem: blocks for
each consumer, from which stores leave; a_smem: one more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from grouped_experts.ops.hopper.epilogues import load_rows, store_rows
from grouped_experts.ops.portable.fp8 import absolute, reciprocal, scale_of, to_fp8


@gluon.jit
def store_product(
    half: gl.constexpr, left, right, m0, end, i_n, y_desc, a_desc, h_desc, a_scales_ptr, probs_ptr, stride_as,
    out_smem, a_smem, ACT: gl.constexpr, POWER_OF_TWO: gl.constexpr
):  # fmt: skip
    """y = [left | right]; those of rows of no expert are zero."""
    WIDTH: gl.constexpr = left.shape[1]
    BUFFERS: gl.constexpr = out_smem.shape[0] // 2
    FIRST: gl.constexpr = half * BUFFERS
    n0 = 2 * i_n * WIDTH
    store_rows(y_desc, left.to(y_desc.dtype), out_smem, FIRST, m0, end, 0, n0, BUFFERS)
    store_rows(y_desc, right.to(y_desc.dtype), out_smem, FIRST + BUFFERS - 1, m0, end, 0, n0 + WIDTH, BUFFERS)


@gluon.jit
def activate(
    half: gl.constexpr, left, right, m0, end, i_n, y_desc, a_desc, h_desc, a_scales_ptr, probs_ptr, stride_as,
    out_smem, a_smem, ACT: gl.constexpr, POWER_OF_TWO: gl.constexpr
):  # fmt: skip
    """h = [left | right], rounded: gate and up. a = p * act(h) of the rounded h, rounded to its dtype and cast to e4m3,
    with a scale for each row: the tile's columns of a are a block.
    """
    WIDTH: gl.constexpr = left.shape[1]
    n0 = i_n * WIDTH
    gate, up = left.to(h_desc.dtype), right.to(h_desc.dtype)
    tma.store_wait(0)
    store_rows(h_desc, gate, out_smem, 2 * half, m0, end, 0, n0, 2)
    store_rows(h_desc, up, out_smem, 2 * half + 1, m0, end, 1, n0, 2)
    a = ACT(gate.to(gl.float32), up.to(gl.float32), False)
    if probs_ptr is not None:
        a *= load_rows(probs_ptr, m0, end, a)[:, None]
    a = a.to(h_desc.dtype).to(gl.float32)
    scale = scale_of(gl.max(absolute(a), 1), False, POWER_OF_TWO)
    store_rows(a_desc, to_fp8(a * reciprocal(scale)[:, None], False, True), a_smem, half, m0, end, 0, n0, 3)
    m = m0 + gl.arange(0, a.shape[0], gl.SliceLayout(1, a.type.layout))
    gl.store(a_scales_ptr + i_n.to(gl.int64) * stride_as + m, scale, mask=m < end)
