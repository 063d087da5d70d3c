"""What the Hopper kernels share: the order of tiles, the ring of stages, and parts of a tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_position(t, num_m, num_n, GROUP_M: gl.constexpr):
    """Tiles in groups of GROUP_M rows of tiles, column by column, so that both operands stay in the L2 cache."""
    group = t // (GROUP_M * num_n)
    first = group * GROUP_M
    size = gl.minimum(num_m - first, GROUP_M)
    within = t - group * GROUP_M * num_n
    return first + within % size, within // size


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and the parity that its barriers will show."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def halves(block):
    """The left and the right half of the columns of an accumulator, which are registers of their own."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block.shape[1] // 2, 16]
    )
    left, right = block.reshape([block.shape[0], 2, block.shape[1] // 2]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)
