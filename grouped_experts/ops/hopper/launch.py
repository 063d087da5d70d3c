"""Descriptors for Gluon kernels, and when a call suits them."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from grouped_experts.ops.hopper.tiles import BLOCK_M, Tile
from grouped_experts.ops.portable.launch import Unchecked, suits_tma
from grouped_experts.ops.portable.tiles import row_block

_log = logging.getLogger(__name__)
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class _Descriptor(Unchecked, TensorDescriptor):  # type: ignore[misc]
    pass


def descriptor(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> object:
    """Of a tensor that `suits_tma`, seen with that shape and those strides."""
    return _Descriptor(tensor, shape, strides, block, _layout(block, tensor.dtype))


def operand_descriptors(
    x: Tensor, w: Tensor, columns: int, tile: Tile, transpose_w: bool, parts: int = 1
) -> tuple[object, object]:
    """x (T, K), a block of it for one consumer, and w as `m_grouped_kernel` takes it: parts of `columns` rows each."""
    (num_rows, depth), num_experts = x.shape, w.shape[0]
    if transpose_w:
        shape, block = (num_experts, parts, columns, depth), (1, parts, tile.block_n, tile.block_k)
        strides = (w.stride(0), columns * w.stride(1), w.stride(1), 1)
    else:
        shape, block = (num_experts, 1, depth, columns), (1, 1, tile.block_k, tile.block_n)
        strides = (w.stride(0), w.stride(0), w.stride(1), 1)
    rows = descriptor(x, (num_rows, depth), (x.stride(0), 1), (BLOCK_M // 2, tile.block_k))
    return rows, descriptor(w, shape, strides, block)


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])


def is_fast(op: str, num_rows: int, num_experts: int, columns: int, *operands: Tensor, but: str | None = None) -> bool:
    """Whether the Gluon kernels take the call; which kernels do, and why, goes to the debug log.

    They take tiles of 128 rows (`row_block`), and operands and outputs that TMA can address. but: what else speaks
    against them.
    """
    reason = but
    if num_experts == 0 or row_block(num_rows, num_experts) != BLOCK_M:
        reason = f"{num_rows} rows for {num_experts} experts are few"
    elif columns % 8:
        reason = f"{columns} columns are no multiple of 8"
    elif not all(map(suits_tma, operands)):
        reason = f"TMA cannot address {[(tuple(t.shape), t.stride()) for t in operands]}"
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s: %s", op, "Gluon" if reason is None else f"portable, since {reason}")
    return reason is None
