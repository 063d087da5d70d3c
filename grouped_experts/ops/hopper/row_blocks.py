"""Contracting the rows of an expert, block by block. Rows behind its last are zero in both operands."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from grouped_experts.ops.hopper.pipeline import advance


@gluon.jit
def blocks_of(rows, BLOCK_T: gl.constexpr):
    """How many blocks they fill; no rows are a block of zeros. gl.cdiv would overflow near 2**31."""
    return gl.maximum(rows // BLOCK_T + gl.where(rows % BLOCK_T > 0, 1, 0), 1)


@gluon.jit
def begin_tile(
    half: gl.constexpr, stage, phase, a_smem, b_smem, full, empty, GATHERED: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr
):  # fmt: skip
    """The first block of rows. GATHERED: one operand was copied by threads, which wgmma sees behind a fence only."""
    HALF: gl.constexpr = a_smem.shape[4]
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    mbarrier.wait(full.index(stage), phase)
    if GATHERED:
        fence_async_shared()
    acc = gl.zeros((HALF, BLOCK_N), gl.float32, ACC)  # a constant: the first wgmma takes none
    acc, done = contract(half, stage, stage, False, a_smem, b_smem, empty, acc)
    stage, phase = advance(stage, phase, STAGES)
    return acc, done, stage, phase


@gluon.jit
def contract_blocks(
    half: gl.constexpr, first, last, acc, done, stage, phase, a_smem, b_smem, full, empty, GATHERED: gl.constexpr,
    STAGES: gl.constexpr
):  # fmt: skip
    for _i in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            fence_async_shared()
        acc, done = contract(half, stage, done, True, a_smem, b_smem, empty, acc)
        stage, phase = advance(stage, phase, STAGES)
    return acc, done, stage, phase


@gluon.jit
def contract(half: gl.constexpr, stage, done, gives: gl.constexpr, a_smem, b_smem, empty, acc):
    """Add one block of rows, leave it in flight, and give back the stage before it, if there is one."""
    a = a_smem.index(2 * stage + half).reshape([a_smem.shape[3], a_smem.shape[4]])
    b = b_smem.index(stage).reshape([b_smem.shape[3], b_smem.shape[4]])
    acc = warpgroup_mma(a.permute((1, 0)), b, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    if gives:
        mbarrier.arrive(empty.index(done), count=1)
    return acc, stage
