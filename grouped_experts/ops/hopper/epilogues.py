"""What becomes of a finished tile: a plain store, or fc1's activation.

Each takes the same arguments and uses what it needs: acc, the accumulator of one consumer (0 or 1: `half`); expert (-1:
rows of no expert), rows m0 : end, columns n0.. of N. y, a and h are (T, parts, N), parts = 2 for a tensor with gate and
up; each comes as descriptor and as pointer: rows of a tile that is not full go through the pointer. out_smem: BUFFERS
blocks for each consumer, from which stores leave.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from grouped_experts.ops.hopper.compat import async_store
from grouped_experts.ops.hopper.pipeline import halves, row_pieces


@gluon.jit
def store_product(
    half: gl.constexpr, acc, expert, m0, end, n0, y_desc, a_desc, h_desc, y_ptr, a_ptr, h_ptr, bias_ptr, probs_ptr, N,
    out_smem, ACT: gl.constexpr, GATED: gl.constexpr, BUFFERS: gl.constexpr
):  # fmt: skip
    """y = acc + scale * bias. In rows of no expert acc is zero, and bias and scale are not read."""
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, expert, n0, N, acc)
        if probs_ptr is not None:
            acc += load_rows(probs_ptr, m0, gl.where(expert < 0, m0, end), acc)[:, None] * bias[None, :]
        else:
            acc += bias[None, :]
    store_rows(y_desc, y_ptr, acc.to(y_desc.dtype), out_smem, half, m0, end, 0, n0, N, 1, BUFFERS)


@gluon.jit
def activate(
    half: gl.constexpr, acc, expert, m0, end, n0, y_desc, a_desc, h_desc, y_ptr, a_ptr, h_ptr, bias_ptr, probs_ptr, N,
    out_smem, ACT: gl.constexpr, GATED: gl.constexpr, BUFFERS: gl.constexpr
):  # fmt: skip
    """h = acc, rounded; a = p * act(h) of the rounded h. With a gate acc is [gate | up]."""
    tma.store_wait(0)  # the last tile's stores: theirs need not be the buffers that come next, nor as many
    left, right = halves(acc)
    if GATED:
        activate_part(
            half, left, right, m0, end, n0, a_desc, h_desc, a_ptr, h_ptr, probs_ptr, N, out_smem, ACT, True, BUFFERS
        )
    else:
        activate_part(
            half, left, left, m0, end, n0, a_desc, h_desc, a_ptr, h_ptr, probs_ptr, N, out_smem, ACT, False, BUFFERS
        )
        n1 = n0 + left.shape[1]
        activate_part(
            half, right, right, m0, end, n1, a_desc, h_desc, a_ptr, h_ptr, probs_ptr, N, out_smem, ACT, False, BUFFERS
        )


@gluon.jit
def activate_part(
    half: gl.constexpr, gate, up, m0, end, n0, a_desc, h_desc, a_ptr, h_ptr, probs_ptr, N, out_smem,
    ACT: gl.constexpr, GATED: gl.constexpr, BUFFERS: gl.constexpr
):  # fmt: skip
    FIRST: gl.constexpr = half * BUFFERS
    LAST: gl.constexpr = half * BUFFERS + BUFFERS - 1
    PARTS: gl.constexpr = 2 if GATED else 1
    gate = gate.to(h_desc.dtype)
    store_rows(h_desc, h_ptr, gate, out_smem, FIRST, m0, end, 0, n0, N, PARTS, BUFFERS)
    if GATED:
        up = up.to(h_desc.dtype)
        store_rows(h_desc, h_ptr, up, out_smem, LAST, m0, end, 1, n0, N, PARTS, BUFFERS)
    else:
        up = gate
    s = ACT(gate.to(gl.float32), up.to(gl.float32), False)
    if probs_ptr is not None:
        s *= load_rows(probs_ptr, m0, end, s)[:, None]
    store_rows(a_desc, a_ptr, s.to(a_desc.dtype), out_smem, FIRST if GATED else LAST, m0, end, 0, n0, N, 1, BUFFERS)


@gluon.jit
def part_at(
    ptr, m0, end, n0, N, part: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Where rows m0.. and columns n0.. of one part lie, and which are rows before `end` and columns before N."""
    m = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    n = n0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    at = ptr + m[:, None].to(gl.int64) * (PARTS * N) + part * N + n[None, :]
    return at, (m < end)[:, None] & (n < N)[None, :]


@gluon.jit
def store_part(ptr, block, m0, end, n0, N, part: gl.constexpr, PARTS: gl.constexpr):
    LAYOUT: gl.constexpr = block.type.layout
    at, inside = part_at(ptr, m0, end, n0, N, part, PARTS, block.shape[0], block.shape[1], LAYOUT)
    gl.store(at, block.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def load_rows(ptr, m0, end, like):
    """One value for each row m0 : end of a block laid out as `like`, zero behind."""
    m = m0 + gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout))
    return gl.load(ptr + m, mask=m < end, other=0.0).to(gl.float32)


@gluon.jit
def load_bias(bias_ptr, expert, n0, N, like):
    """Columns n0.. of an expert's bias, laid out as those of `like`; zero for rows of no expert."""
    n = n0 + gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout))
    at = bias_ptr + gl.to_tensor(expert).to(gl.int64) * N + n
    return gl.load(at, mask=n < gl.where(expert < 0, 0, N), other=0.0).to(gl.float32)


@gluon.jit
def store_rows(
    desc, ptr, block, out_smem, i: gl.constexpr, m0, end, part: gl.constexpr, n0, N, PARTS: gl.constexpr,
    BUFFERS: gl.constexpr
):  # fmt: skip
    """Rows m0 : end of one part, by way of buffer i, which the last store but BUFFERS - 1 has left by then.

    Through shared memory in any case: with two readers of the accumulator ptxas serializes wgmma.
    """
    ROWS: gl.constexpr = block.shape[0]
    COLUMNS: gl.constexpr = block.shape[1]
    smem = out_smem.index(i)
    flat = smem.reshape([ROWS, COLUMNS])
    tma.store_wait(BUFFERS - 1)
    flat.store(block)
    if end - m0 >= ROWS:
        fence_async_shared()
        async_store(desc, [m0, part, n0], smem)
    else:
        store_part(ptr, flat.load(row_pieces(COLUMNS)), m0, end, n0, N, part, PARTS)
