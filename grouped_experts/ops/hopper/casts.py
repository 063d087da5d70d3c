"""Blocks of 128 x 128 on their way through Gluon kernels that cast them: how they come, and how they leave.

A block comes by TMA while the ones before it are cast. A thread has 4 neighbouring rows of 8 neighbouring columns, so
that the transposition of a cast by columns, through shared memory, moves 4 bytes at a time; there a row, of 128 bytes,
has its 16 bytes in an order of its own, so that neither side meets a bank twice.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from grouped_experts.ops.portable.fp8 import larger_or_nan, reciprocal, scale_of, to_fp8

WARPS = gl.constexpr(8)  # of a program
# A block of 2-byte numbers for casts by rows, and the same for casts by columns, whose registers count rows first: four
# rows of a column, neighbours there, become a word without being sorted.
ROWS_OF_FOUR = gl.constexpr(gl.BlockedLayout([4, 8], [4, 8], [8, 1], [1, 0]))
COLUMNS_OF_FOUR = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [0, 1], [0, 2], [0, 4], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 128],
    )
)
# In shared memory what `cast_columns` transposes there: bytes, for both formats.
TRANSPOSED = gl.constexpr(gl.SwizzledSharedLayout(16, 8, 8, [1, 0]))


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """One for every stage. A fence must follow."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    return full


@gluon.jit
def block_at(t, tiles_ptr, blocks_across, BLOCK: gl.constexpr):
    """Block t, row of blocks by row of blocks: which padded block its rows are, the first of them, the one behind the
    last, and its first column. tiles_ptr: a schedule of BLOCK rows each.
    """
    block = t // blocks_across
    tile = tiles_ptr + 4 * (1 + block)
    return block, gl.load(tile + 1), gl.load(tile + 2), t % blocks_across * BLOCK


@gluon.jit
def scales_of(x, axis: gl.constexpr, E5M2: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """The scales along an axis, each by one thread, as divisions take time, and their reciprocals as x wants them."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    ONE: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [0, 1])
    if axis == 0:  # the largest of every warp, and of those
        warps = gl.reduce(gl.abs(x).reshape([WARPS, ROWS // WARPS, COLUMNS]), 1, larger_or_nan)
        largest = gl.reduce(gl.convert_layout(warps, ONE), 0, larger_or_nan)
    else:
        largest = gl.convert_layout(gl.reduce(gl.abs(x), 1, larger_or_nan), gl.SliceLayout(0, ONE))
    scale = scale_of(gl.where(largest != largest, float("inf"), largest), E5M2, POWER_OF_TWO)
    return scale, gl.convert_layout(reciprocal(scale), gl.SliceLayout(axis, x.type.layout))


@gluon.jit
def cast_columns(
    x, block, k0, data_ptr, scales_ptr, stride_s, K, P, smem, E5M2: gl.constexpr, POWER_OF_TWO: gl.constexpr
):  # fmt: skip
    """x (128 rows, zeros behind the last; 128 columns from k0 on) to padded block `block` of data (K, P).

    With a scale a column, of scales (K, P / 128). smem: a block, `TRANSPOSED`.
    """
    BLOCK: gl.constexpr = x.shape[0]
    OUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    scale, inverse = scales_of(x, 0, E5M2, POWER_OF_TWO)
    k = k0 + gl.arange(0, BLOCK, scale.type.layout)
    gl.store(scales_ptr + block.to(gl.int64) * stride_s + k, scale, mask=k < K)
    data = to_fp8(x * inverse[None, :], E5M2, True)
    smem.store(data.to(gl.uint8, bitcast=True).permute([1, 0]))
    data = smem.load(OUT).to(data.dtype, bitcast=True)
    k = k0 + gl.arange(0, BLOCK, gl.SliceLayout(1, OUT))
    row = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, OUT))
    gl.store(data_ptr + k.to(gl.int64)[:, None] * P + row[None, :], data, mask=(k < K)[:, None])


@gluon.jit
def cast_rows(x, m0, end, k0, data_ptr, scales_ptr, stride_s, K, E5M2: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """x to rows m0 : end and 128 columns from k0 on of data (T, K), with a scale a row, of scales (T, K / 128)."""
    BLOCK: gl.constexpr = x.shape[1]
    scale, inverse = scales_of(x, 1, E5M2, POWER_OF_TWO)
    m = m0 + gl.arange(0, x.shape[0], scale.type.layout)
    gl.store(scales_ptr + (k0 // BLOCK).to(gl.int64) * stride_s + m, scale, mask=m < end)
    data = to_fp8(x * inverse[:, None], E5M2, True)
    m = m0 + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    k = k0 + gl.arange(0, BLOCK, gl.SliceLayout(0, x.type.layout))
    gl.store(data_ptr + m.to(gl.int64)[:, None] * K + k[None, :], data, mask=(m < end)[:, None] & (k < K)[None, :])
