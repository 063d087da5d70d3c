"""fc2 dgrad with the activation's backward in Gluon for sm_90: the pipeline of m_grouped.py, and a warpgroup behind it.

The epilogue moves as many bytes as the product of two thousand columns takes time for. The two consumers therefore hand
da over in shared memory, and a warpgroup of its own finishes the tile while they are at the next.
See docs/hopper.md for the pipeline.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from grouped_experts.activations import ACTIVATIONS
from grouped_experts.ops import portable
from grouped_experts.ops.hopper.descriptors import operand_descriptors
from grouped_experts.ops.hopper.dispatch import is_fast
from grouped_experts.ops.hopper.epilogues import load_rows
from grouped_experts.ops.hopper.m_grouped import multiply
from grouped_experts.ops.hopper.m_producer import produce, row_tile
from grouped_experts.ops.hopper.pipeline import ring
from grouped_experts.ops.hopper.tiles import BLOCK_M, Tile, choose_tile
from grouped_experts.ops.portable.activations import GRADIENTS, VALUES
from grouped_experts.ops.portable.launch import Kernel, cdiv, contiguous, kernel, num_processors
from grouped_experts.ops.portable.permute import gather_rows
from grouped_experts.ops.portable.products import sum_partials
from grouped_experts.ops.portable.schedule import schedule_of
from grouped_experts.rows import GATHERED_COLUMNS


@gluon.jit
def consume(
    half: gl.constexpr, tiles_ptr, N, K, x_smem, w_smem, da_smem, full, empty, handed, taken, GATHERED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """da of each tile, to the warpgroup that finishes it."""
    total = gl.load(tiles_ptr) * gl.cdiv(N, BLOCK_N)
    stage = 0
    phase = 0
    turn = 1
    for _t in range(gl.program_id(0), total, gl.num_programs(0)):
        acc, stage, phase = multiply(
            half, gl.cdiv(K, BLOCK_K), stage, phase, x_smem, w_smem, full, empty, GATHERED, False, BLOCK_N, BLOCK_K,
            STAGES
        )  # fmt: skip
        mbarrier.wait(taken.index(half), turn)
        da_smem.index(half).store(acc)
        mbarrier.arrive(handed.index(half), count=1)
        turn ^= 1


@gluon.jit
def finish(
    dh_ptr, a_ptr, h_ptr, probs_ptr, partials_ptr, tiles_ptr, num_rows, N, K, da_smem, handed, taken,
    ACT: gl.constexpr, ACT_GRADIENT: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr
):  # fmt: skip
    """Each tile in bands of ROWS rows; h and p of the next band are loaded before this one is finished."""
    BANDS: gl.constexpr = 2 * da_smem.shape[1] // ROWS
    num_m = gl.load(tiles_ptr)
    num_n = gl.cdiv(N, BLOCK_N)
    total = num_m * num_n
    programs = gl.num_programs(0)
    turn = 0
    _expert, m0, end, i_n, _steps = row_tile(gl.program_id(0), total, tiles_ptr, num_m, num_n, K, GROUP_M, BLOCK_K)
    end = gl.where(total > 0, end, m0)  # without tiles it is a gap's
    gate, up, p = load_band(h_ptr, probs_ptr, m0, end, i_n, N, GATED, ROWS, BLOCK_N)
    for t in range(gl.program_id(0), total, programs):
        _expert, m0_next, end_next, i_n_next, _steps = row_tile(
            t + programs, total, tiles_ptr, num_m, num_n, K, GROUP_M, BLOCK_K
        )
        for i in gl.static_range(BANDS):
            if i + 1 < BANDS:
                ahead = load_band(h_ptr, probs_ptr, m0 + (i + 1) * ROWS, end, i_n, N, GATED, ROWS, BLOCK_N)
            else:
                ahead = load_band(h_ptr, probs_ptr, m0_next, end_next, i_n_next, N, GATED, ROWS, BLOCK_N)
            da = take(i, turn, da_smem, handed, taken, ROWS)
            finish_band(
                da, gate, up, p, m0 + i * ROWS, end, i_n, dh_ptr, a_ptr, probs_ptr, partials_ptr, num_rows, N,
                ACT, ACT_GRADIENT, GATED
            )  # fmt: skip
            gate, up, p = ahead
        turn ^= 1
        m0, end, i_n = m0_next, end_next, i_n_next


@gluon.jit
def take(i: gl.constexpr, turn, da_smem, handed, taken, ROWS: gl.constexpr):
    """Band i of a tile's da. The first of a half waits for it, the last one gives its place back."""
    BANDS: gl.constexpr = da_smem.shape[1] // ROWS
    HALF: gl.constexpr = i // BANDS
    if i % BANDS == 0:
        mbarrier.wait(handed.index(HALF), turn)
    da = da_smem.index(HALF).slice(i % BANDS * ROWS, ROWS, 0).load(row_pieces(da_smem.shape[2]))
    if i % BANDS == BANDS - 1:
        mbarrier.arrive(taken.index(HALF), count=1)
    return da


@gluon.jit
def finish_band(
    da, gate, up, p, m0, end, i_n, dh_ptr, a_ptr, probs_ptr, partials_ptr, num_rows, N,
    ACT: gl.constexpr, ACT_GRADIENT: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """dh = act'(h) (p * da), a = p * act(h), partials = sum of da * act(h) over the tile's columns."""
    ROWS: gl.constexpr = da.shape[0]
    BLOCK_N: gl.constexpr = da.shape[1]
    LAYOUT: gl.constexpr = da.type.layout
    PARTS: gl.constexpr = 2 if GATED else 1
    n0 = i_n * BLOCK_N
    gate = gate.to(gl.float32)
    up = up.to(gl.float32)
    s = ACT(gate, up, False)
    if partials_ptr is not None:  # behind column N stands 0 * dy, which is NaN for a dy of Inf
        m = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        partial = gl.sum(gl.where((n < N)[None, :], da * s, 0.0), 1)
        gl.store(partials_ptr + gl.to_tensor(i_n).to(gl.int64) * num_rows + m, partial, mask=m < end)
    ds = da
    if probs_ptr is not None:
        ds = p[:, None] * da
        s = p[:, None] * s
    d_gate, d_up = ACT_GRADIENT(ds, gate, up, False)
    store_part(dh_ptr, d_gate, m0, end, n0, N, 0, PARTS)
    if GATED:
        store_part(dh_ptr, d_up, m0, end, n0, N, 1, PARTS)
    if a_ptr is not None:
        store_part(a_ptr, s, m0, end, n0, N, 0, 1)


@gluon.jit
def load_band(
    h_ptr, probs_ptr, m0, end, i_n, N, GATED: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Gate and up of ROWS rows, as they are stored, without a gate the same block twice; and p, or ones."""
    LAYOUT: gl.constexpr = row_pieces(BLOCK_N)
    PARTS: gl.constexpr = 2 if GATED else 1
    n0 = i_n * BLOCK_N
    at, inside = part_at(h_ptr, m0, end, n0, N, 0, PARTS, ROWS, BLOCK_N, LAYOUT)
    gate = gl.load(at, mask=inside, other=0.0)
    up = gate
    if GATED:
        at, inside = part_at(h_ptr, m0, end, n0, N, 1, PARTS, ROWS, BLOCK_N, LAYOUT)
        up = gl.load(at, mask=inside, other=0.0)
    p = gl.full((ROWS,), 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    if probs_ptr is not None:
        p = load_rows(probs_ptr, m0, end, gate)
    return gate, up, p


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


@gluon.constexpr_function
def row_pieces(columns):
    """A layout of four warps: eight elements to a thread, 16 bytes, and as many threads to a row as that takes."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def fc2_dgrad_kernel(
    dy_desc,  # ragged (T, K), block (HALF, BLOCK_K): the rows of one consumer
    w_desc,  # (E, 1, K, N), block (1, 1, BLOCK_K, BLOCK_N)
    dh_ptr,  # (T, 2 N), or (T, N) without a gate
    a_ptr,  # (T, N) or None
    h_ptr,  # the shape of dh
    probs_ptr,  # (T,) or None
    partials_ptr,  # (column tiles, T) or None
    tiles_ptr,  # (1 + tiles, 4), tiles of 2 HALF rows
    dy_ptr,  # with an index; dy_desc is not loaded from then
    index_ptr,  # (R,) int32: rows of dy, or None
    num_source,  # rows of dy
    eighths_of_stride,  # of dy
    num_rows,
    eighths_of_N,  # so that 8 elements are one access, whatever else divides N
    K,  # with an index in eighths as well
    ACT: gl.constexpr,
    ACT_GRADIENT: gl.constexpr,
    GATED: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (programs,), persistent, four warps."""
    HALF: gl.constexpr = dy_desc.block_type.shape[2]
    N = 8 * eighths_of_N
    GATHERED: gl.constexpr = index_ptr is not None
    x_smem, w_smem, full, empty = ring(dy_desc, w_desc, STAGES, 128 if GATHERED else 0)
    # Eight bytes of four rows, as wgmma has them, meet no bank twice.
    da_smem = gl.allocate_shared_memory(gl.float32, [2, HALF, BLOCK_N], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    handed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(handed.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    depth = 8 * K if GATHERED else K
    gl.warp_specialize(
        [
            (consume, (0, tiles_ptr, N, depth, x_smem, w_smem, da_smem, full, empty, handed, taken, GATHERED,
                BLOCK_N, BLOCK_K, STAGES)),
            (consume, (1, tiles_ptr, N, depth, x_smem, w_smem, da_smem, full, empty, handed, taken, GATHERED,
                BLOCK_N, BLOCK_K, STAGES)),
            (finish, (dh_ptr, a_ptr, h_ptr, probs_ptr, partials_ptr, tiles_ptr, num_rows, N, depth, da_smem,
                handed, taken, ACT, ACT_GRADIENT, GATED, ROWS, BLOCK_N, BLOCK_K, GROUP_M)),
            (produce, (dy_desc, dy_ptr, index_ptr, num_source, eighths_of_stride, w_desc, tiles_ptr, N, K,
                x_smem, w_smem, full, empty, 0, False, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 4, 4 if GATHERED else 1],
        # of 512 registers that four threads share; what is left, 152, is for consumer 0
        [104, 216 if GATHERED else 232, 40 if GATHERED else 24],
    )  # fmt: skip


def fc2_dgrad_activation(
    dy: Tensor,
    fc2_weight: Tensor,
    h: Tensor,
    starts: Tensor,
    ends: Tensor,
    probs: Tensor | None,
    fc2_bias: Tensor | None,
    activation: str,
    need_a: bool,
    need_dprobs: bool,
    tiles: Tensor | None = None,
    row_index: Tensor | None = None,
    expected_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, depth, columns = h.shape[0], dy.shape[1], fc2_weight.shape[2]
    experts = fc2_weight.shape[0]
    indexed = (row_index,)
    if not is_fast(
        "fc2_dgrad_activation", num_rows, experts, columns, dy, fc2_weight, indexed=indexed, expected_rows=expected_rows
    ):
        return portable.fc2_dgrad_activation(
            dy, fc2_weight, h, starts, ends, probs, fc2_bias, activation, need_a, need_dprobs, tiles, row_index,
            expected_rows
        )  # fmt: skip
    if columns > GATHERED_COLUMNS:
        dy, row_index = gather_rows(dy, row_index), None
    gathered = row_index is not None
    dh, a = h.new_empty(h.shape), h.new_empty(num_rows if need_a else 0, columns)
    tile = choose_tile("dgrad", columns)
    column_tiles = cdiv(columns, tile.block_n)
    partials = dh.new_empty(column_tiles, num_rows, dtype=torch.float32) if need_dprobs else None
    tiles = schedule_of(tiles, starts, ends, num_rows, expected_rows)
    fc2_dgrad(tile, activation).launch(
        (min(num_processors(dy.device), (tiles.shape[0] - 1) * column_tiles),),
        dy.device,
        *operand_descriptors(dy, fc2_weight, columns, tile, transpose_w=False),
        dh,
        a if need_a else None,
        h.contiguous(),
        contiguous(probs),
        partials,
        tiles,
        dy if gathered else None,
        row_index,
        dy.shape[0] if gathered else 0,
        dy.stride(0) // 8 if gathered else 0,
        num_rows,
        columns // 8,
        depth // 8 if gathered else depth,
    )
    return dh, a, sum_partials(partials, dy, fc2_bias, tiles, BLOCK_M, starts.shape[0], row_index)


@functools.cache
def fc2_dgrad(tile: Tile, activation: str) -> Kernel:
    return kernel(
        fc2_dgrad_kernel,
        ACT=VALUES[activation],
        ACT_GRADIENT=GRADIENTS[activation],
        GATED=ACTIVATIONS[activation].gated,
        ROWS=16,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        STAGES=tile.stages,
        num_warps=4,
    )
