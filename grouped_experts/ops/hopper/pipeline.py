"""What the Hopper kernels share: the ring of stages, and parts of a tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def ring(rows_desc, shared_desc, STAGES: gl.constexpr, COPIES: gl.constexpr = 0):
    """Shared memory of STAGES stages, each with rows for two consumers and a block for both, and barriers.

    full: the bytes of a stage have come, and the copies of COPIES threads; empty: both consumers are done with it. A
    fence must follow.
    """
    rows = gl.allocate_shared_memory(rows_desc.dtype, [2 * STAGES] + rows_desc.block_type.shape, rows_desc.layout)
    shared = gl.allocate_shared_memory(shared_desc.dtype, [STAGES] + shared_desc.block_type.shape, shared_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + COPIES)
        mbarrier.init(empty.index(i), count=2)
    return rows, shared, full, empty


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and the parity that its barriers will show."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def before(stage, STAGES: gl.constexpr):
    """The stage ahead of that one."""
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def halves(block):
    """The left and the right half of the columns of an accumulator, which are registers of their own."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block.shape[1] // 2, 16]
    )
    left, right = block.reshape([block.shape[0], 2, block.shape[1] // 2]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)
