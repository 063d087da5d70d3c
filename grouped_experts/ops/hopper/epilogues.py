"""What becomes of a finished tile: a plain store, or fc1's activation.

Each takes the same arguments and uses what it needs: acc, the accumulator of one consumer (0 or 1: `half`); expert (-1:
rows of no expert), rows m0 : end, columns n0.. of N. y, a and h are (T, parts, N), parts = 2 for a tensor with gate and
up; each as a ragged descriptor, so that a tile that is not full leaves the rows behind it alone. out_smem: BUFFERS
blocks for each consumer, from which stores leave.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from grouped_experts.ops.hopper.compat import async_store
from grouped_experts.ops.hopper.descriptors import rows_at
from grouped_experts.ops.hopper.pipeline import halves


@gluon.jit
def store_product(
    half: gl.constexpr, acc, expert, m0, end, n0, y_desc, a_desc, h_desc, bias_ptr, probs_ptr, N,
    out_smem, ACT: gl.constexpr, GATED: gl.constexpr, BUFFERS: gl.constexpr
):  # fmt: skip
    """y = acc + scale * bias. In rows of no expert acc is zero, and bias and scale are not read."""
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, expert, n0, N, acc)
        if probs_ptr is not None:
            acc += load_rows(probs_ptr, m0, gl.where(expert < 0, m0, end), acc)[:, None] * bias[None, :]
        else:
            acc += bias[None, :]
    store_rows(y_desc, acc.to(y_desc.dtype), out_smem, half, m0, end, 0, n0, BUFFERS)


@gluon.jit
def activate(
    half: gl.constexpr, acc, expert, m0, end, n0, y_desc, a_desc, h_desc, bias_ptr, probs_ptr, N,
    out_smem, ACT: gl.constexpr, GATED: gl.constexpr, BUFFERS: gl.constexpr
):  # fmt: skip
    """h = acc, rounded; a = p * act(h) of the rounded h. With a gate acc is [gate | up]."""
    tma.store_wait(0)  # of a tile with a gate the last store was from the buffer that comes first
    if h_desc.dtype == gl.float16:
        acc += 0.0  # or ptxas of Triton 3.6 moves the rounding in between the wgmmas, and serializes them
    left, right = halves(acc)
    if GATED:
        activate_part(
            half, left, right, expert, m0, end, n0, a_desc, h_desc, bias_ptr, probs_ptr, N, out_smem,
            ACT, True, BUFFERS
        )  # fmt: skip
    else:
        activate_part(
            half, left, left, expert, m0, end, n0, a_desc, h_desc, bias_ptr, probs_ptr, N, out_smem,
            ACT, False, BUFFERS
        )  # fmt: skip
        activate_part(
            half, right, right, expert, m0, end, n0 + left.shape[1], a_desc, h_desc, bias_ptr, probs_ptr, N, out_smem,
            ACT, False, BUFFERS
        )  # fmt: skip


@gluon.jit
def activate_part(
    half: gl.constexpr, gate, up, expert, m0, end, n0, a_desc, h_desc, bias_ptr, probs_ptr, N, out_smem,
    ACT: gl.constexpr, GATED: gl.constexpr, BUFFERS: gl.constexpr
):  # fmt: skip
    FIRST: gl.constexpr = half * BUFFERS
    LAST: gl.constexpr = half * BUFFERS + BUFFERS - 1
    PARTS: gl.constexpr = 2 if GATED else 1
    if bias_ptr is not None:
        gate += load_bias(bias_ptr, PARTS * expert, n0, N, gate)[None, :]
        if GATED:
            up += load_bias(bias_ptr, PARTS * expert + 1, n0, N, up)[None, :]
    gate = gate.to(h_desc.dtype)
    store_rows(h_desc, gate, out_smem, FIRST, m0, end, 0, n0, BUFFERS)
    if GATED:
        up = up.to(h_desc.dtype)
        store_rows(h_desc, up, out_smem, LAST, m0, end, 1, n0, BUFFERS)
    else:
        up = gate
    s = ACT(gate.to(gl.float32), up.to(gl.float32), False)
    if probs_ptr is not None:
        s *= load_rows(probs_ptr, m0, end, s)[:, None]
    store_rows(a_desc, s.to(a_desc.dtype), out_smem, FIRST if GATED else LAST, m0, end, 0, n0, BUFFERS)


@gluon.jit
def load_rows(ptr, m0, end, like):
    """One value for each row m0 : end of a block laid out as `like`, zero behind."""
    m = m0 + gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout))
    return gl.load(ptr + m, mask=m < end, other=0.0).to(gl.float32)


@gluon.jit
def load_bias(bias_ptr, row, n0, N, like):
    """Columns n0.. of a row of the bias, laid out as those of `like`; zero for a negative row, which is of no expert.

    Each is loaded by one thread: the addresses of all that a thread needs would not fit its registers.
    """
    n = n0 + gl.arange(0, like.shape[1], gl.BlockedLayout([1], [32], [4], [0]))
    at = bias_ptr + gl.to_tensor(row).to(gl.int64) * N + n
    bias = gl.load(at, mask=n < gl.where(row < 0, 0, N), other=0.0).to(gl.float32)
    return gl.convert_layout(bias, gl.SliceLayout(0, like.type.layout))


@gluon.jit
def store_rows(
    desc, block, out_smem, i: gl.constexpr, m0, end, part: gl.constexpr, n0, BUFFERS: gl.constexpr
):  # fmt: skip
    """Rows m0 : end of one part, by way of buffer i, which the last store but BUFFERS - 1 has left by then."""
    smem = out_smem.index(i)
    tma.store_wait(BUFFERS - 1)
    smem.reshape([block.shape[0], block.shape[1]]).store(block)
    fence_async_shared()
    wrap, until, row = rows_at(m0, end)
    async_store(desc, [wrap, until, row, part, n0], smem)
