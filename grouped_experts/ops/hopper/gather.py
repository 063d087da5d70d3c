"""Rows that a row index names, gathered into shared memory by `cp.async`: TMA on Hopper loads neighbouring rows only.

A thread's copies are 16 bytes each. They arrive at a barrier by themselves when they have landed, and wgmma sees them
behind a fence only, which is the consumer's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from grouped_experts.ops.hopper.compat import async_load_by_pointer


@gluon.constexpr_function
def chunks_of_rows(columns):
    """A layout of four warps: eight elements to a thread, 16 bytes, and at most eight threads to a row.

    So a thread has few rows, and few addresses.
    """
    lanes = min(8, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def rows_of(x_ptr, index, num_source, eighths_of_stride):
    """Where those rows of x begin, clamped into it; a stride in eighths keeps 16 bytes one access."""
    index = gl.maximum(gl.minimum(index, num_source - 1), 0)
    return x_ptr + 8 * (index.to(gl.int64) * eighths_of_stride)


@gluon.jit
def copy_rows(at, n, inside, to):
    """Columns n of the rows that begin at `at`, where they are inside, else zeros, as the block `to`; not awaited."""
    block = to.reshape([to.shape[len(to.shape) - 2], to.shape[len(to.shape) - 1]])
    async_load_by_pointer(block, at[:, None] + n[None, :], mask=inside)
