"""Tensors as TMA sees them.

TMA bounds what it moves by the shape of a tensor, but where an expert's rows end is known on the device alone. A ragged
descriptor therefore has three dimensions for the rows, with strides of 2**34 - s, s and s elements where s is that of
the rows. Coordinates (2**30, end, 2**30 - end + first) begin at row `first`, since addresses are modulo 2**64. The last
of the three has 2**30 elements, so that rows from `end` on are out of bounds: read as zero, and not written.
`triton.tools.ragged_tma` does the same.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from grouped_experts.ops.hopper.tiles import BLOCK_M, Tile
from grouped_experts.ops.portable.launch import Unchecked

MOST_ROWS = gl.constexpr(2**30)
_ANY = 0x7FFF0000  # more than any coordinate of the first two dimensions
_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


class _Descriptor(Unchecked, TensorDescriptor):  # type: ignore[misc]
    pass


def descriptor(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> object:
    """Of a tensor that `suits_tma`, seen with that shape and those strides."""
    return _Descriptor(tensor, shape, strides, block, _layout(block, tensor.dtype))


def ragged_descriptor(tensor: Tensor, row: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> object:
    """Of rows of shape `row`, bounded by `rows_at`; strides and block begin with those of the rows."""
    shape = (_ANY, _ANY, MOST_ROWS.value, *row)
    return descriptor(tensor, shape, (2**34 - strides[0], strides[0], *strides), (1, 1, *block))


@gluon.jit
def rows_at(first, end):
    """Coordinates of rows first : end in a ragged descriptor; what lies behind is read as zero, and not written.

    first may lie behind `end` by less than 2**29: there are no rows then.
    """
    return MOST_ROWS, end, MOST_ROWS - end + first


def operand_descriptors(
    x: Tensor, w: Tensor, columns: int, tile: Tile, transpose_w: bool, parts: int = 1
) -> tuple[object, object]:
    """x (T, K), a block of it for one consumer, and w as `m_grouped_kernel` takes it: parts of `columns` rows each."""
    depth, num_experts = x.shape[1], w.shape[0]
    if transpose_w:
        shape, block = (num_experts, parts, columns, depth), (1, parts, tile.block_n, tile.block_k)
        strides = (w.stride(0), columns * w.stride(1), w.stride(1), 1)
    else:
        shape, block = (num_experts, 1, depth, columns), (1, 1, tile.block_k, tile.block_n)
        strides = (w.stride(0), w.stride(0), w.stride(1), 1)
    rows = ragged_descriptor(x, (depth,), (x.stride(0), 1), (BLOCK_M // 2, tile.block_k))
    return rows, descriptor(w, shape, strides, block)


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
