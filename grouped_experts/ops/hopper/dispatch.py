"""Which calls the Gluon kernels take."""

from __future__ import annotations

import logging

from torch import Tensor

from grouped_experts.ops.hopper.descriptors import MOST_ROWS
from grouped_experts.ops.hopper.tiles import BLOCK_M
from grouped_experts.ops.portable.launch import suits_tma
from grouped_experts.ops.portable.tiles import row_block

_log = logging.getLogger(__name__)


def is_fast(
    op: str,
    num_rows: int,
    num_experts: int,
    columns: int,
    *operands: Tensor,
    indexed: tuple[Tensor | None, ...] = (),
    expected_rows: int = 0,
    but: str | None = None,
) -> bool:
    """Whether the Gluon kernels take the call; which kernels do, and why, goes to the debug log.

    They take tiles of 128 rows (`row_block`), and operands and outputs that TMA can address. indexed: the row index of
    each operand, of those that may have one. expected_rows: as in `row_block`. but: what else speaks against them.
    """
    reason = but
    gathered = [operand for operand, index in zip(operands, indexed, strict=False) if index is not None]
    if num_experts == 0 or row_block(num_rows, num_experts, expected_rows) != BLOCK_M:
        rows = f"{expected_rows} rows an expert" if expected_rows else f"{num_rows} rows for {num_experts} experts"
        reason = f"{rows} are few"
    elif num_rows > MOST_ROWS.value:
        reason = f"{num_rows} rows are many"
    elif columns % 8:
        reason = f"{columns} columns are no multiple of 8"
    elif any(operand.shape[1] % 8 for operand in gathered):
        reason = f"rows of {[operand.shape[1] for operand in gathered]} columns, gathered, are not aligned to 16 bytes"
    elif not all(map(suits_tma, operands)):
        reason = f"TMA cannot address {[(tuple(t.shape), t.stride()) for t in operands]}"
    return _noted(op, reason)


def suits_casts(op: str, *operands: Tensor, but: str | None = None) -> bool:
    """Whether the Gluon kernels take a cast of these, of any number of rows; noted as `is_fast` does.

    They take numbers of two bytes that TMA can address.
    """
    reason = but
    if any(operand.element_size() != 2 for operand in operands):
        reason = f"{[operand.dtype for operand in operands]} are not of two bytes each"
    elif any(operand.shape[0] > MOST_ROWS.value for operand in operands):
        reason = f"{operands[0].shape[0]} rows are many"
    elif not all(map(suits_tma, operands)):
        reason = f"TMA cannot address {[(tuple(t.shape), t.stride()) for t in operands]}"
    return _noted(op, reason)


def _noted(op: str, reason: str | None) -> bool:
    """Whether there is no reason against the Gluon kernels, which the debug log is told."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s: %s", op, "Gluon" if reason is None else f"portable, since {reason}")
    return reason is None
