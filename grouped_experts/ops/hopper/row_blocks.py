"""Contracting the rows of an expert, block by block; the last block of them need not be full."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from grouped_experts.ops.hopper.pipeline import advance, row_pieces


@gluon.jit
def blocks_of(rows, BLOCK_T: gl.constexpr):
    """How many blocks they fill; no rows are a block of which none is kept. gl.cdiv would overflow near 2**31."""
    return gl.maximum(rows // BLOCK_T + gl.where(rows % BLOCK_T > 0, 1, 0), 1)


@gluon.jit
def begin_tile(
    half: gl.constexpr, rows, stage, phase, tail_phase, a_smem, b_smem, full, empty, masked,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The first block of rows, and the one that is not full, if that is another; and how many those are.

    Rows that fill no block are masked while the first ones are contracted.
    """
    BLOCK_T: gl.constexpr = a_smem.shape[1]
    HALF: gl.constexpr = a_smem.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    mbarrier.wait(full.index(stage), phase)
    if rows < BLOCK_T:
        tail_phase = mask_rows(half, stage, rows, tail_phase, a_smem, b_smem, masked)
    acc = gl.zeros((HALF, BLOCK_N), gl.float32, ACC)  # a constant: the first wgmma takes none
    acc, done = contract(half, stage, stage, False, a_smem, b_smem, empty, acc)
    stage, phase = advance(stage, phase, STAGES)
    rest = rows % BLOCK_T
    step = gl.where((rest > 0) & (rows > BLOCK_T), 2, 1)
    for _i in range(1, step):
        mbarrier.wait(full.index(stage), phase)
        tail_phase = mask_rows(half, stage, rest, tail_phase, a_smem, b_smem, masked)
        acc, done = contract_first(rest, half, stage, done, a_smem, b_smem, empty, acc)
        stage, phase = advance(stage, phase, STAGES)
    return acc, done, step, stage, phase, tail_phase


@gluon.jit
def contract_blocks(
    half: gl.constexpr, first, last, acc, done, stage, phase, a_smem, b_smem, full, empty, STAGES: gl.constexpr
):  # fmt: skip
    for _i in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        acc, done = contract(half, stage, done, True, a_smem, b_smem, empty, acc)
        stage, phase = advance(stage, phase, STAGES)
    return acc, done, stage, phase


@gluon.jit
def contract(half: gl.constexpr, stage, done, gives: gl.constexpr, a_smem, b_smem, empty, acc):
    """Add one block of rows, leave it in flight, and give back the stage before it, if there is one."""
    acc = warpgroup_mma(a_smem.index(2 * stage + half).permute((1, 0)), b_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    if gives:
        mbarrier.arrive(empty.index(done), count=1)
    return acc, stage


@gluon.jit
def contract_first(rows, half: gl.constexpr, stage, done, a_smem, b_smem, empty, acc):
    """The same for the first rows of a block, sixteen by sixteen."""
    a = a_smem.index(2 * stage + half)
    b = b_smem.index(stage)
    for i in gl.static_range(a.shape[0] // 16):
        for _i in range(gl.where(rows > 16 * i, 1, 0)):
            acc = warpgroup_mma(a.slice(16 * i, 16, 0).permute((1, 0)), b.slice(16 * i, 16, 0), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(empty.index(done), count=1)
    return acc, stage


@gluon.jit
def mask_rows(half: gl.constexpr, stage, rows, phase, a_smem, b_smem, masked):
    """Zero what is behind the first `rows` rows of a stage: each consumer its own rows and half of what both share."""
    SHARE: gl.constexpr = b_smem.shape[2] // 2
    keep_first(a_smem.index(2 * stage + half), rows)
    keep_first(b_smem.index(stage).slice(half * SHARE, SHARE, 1), rows)
    fence_async_shared()
    mbarrier.arrive(masked, count=1)
    mbarrier.wait(masked, phase)
    return phase ^ 1


@gluon.jit
def keep_first(block, rows):
    """Zero what is behind the first `rows` rows of a block in shared memory: 0 * NaN would be NaN."""
    LAYOUT: gl.constexpr = row_pieces(block.shape[1])
    row = gl.arange(0, block.shape[0], gl.SliceLayout(1, LAYOUT))
    values = block.load(LAYOUT)
    block.store(gl.where((row < rows)[:, None], values, gl.zeros_like(values)))
