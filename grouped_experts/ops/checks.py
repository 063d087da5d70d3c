"""Checks of the public ops' arguments: raised once, with the name, what was wanted and what came.

Nothing here reads a value of a tensor on a device: shapes, dtypes and devices only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.rows import RowRanges

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_float(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise TypeError(f"{name}: wanted a dtype of {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], legend: str) -> None:
    """None in `shape` takes any size; `legend` says the shape in words, such as "(T, H)"."""
    fits = tensor.dim() == len(shape) and all(
        want is None or size == want for size, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name}: wanted shape {legend} = ({wanted}), got {tuple(tensor.shape)}")


def check_matrix(name: str, tensor: Tensor, shape: tuple[int | None, ...], legend: str, like: Tensor) -> None:
    """A floating-point tensor of that shape, in the dtype and on the device of `like`."""
    check_float(name, tensor)
    check_shape(name, tensor, shape, legend)
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name}: wanted the dtype of the rows, {like.dtype}, got {tensor.dtype}")
    check_device(name, tensor, like)


def check_row_vector(name: str, tensor: Tensor, num_rows: int, like: Tensor) -> None:
    """A floating-point number a row, in any floating dtype, on the device of `like`."""
    check_float(name, tensor)
    check_shape(name, tensor, (num_rows,), "(T,)")
    check_device(name, tensor, like)


def check_expected_rows(expected_rows: int | None) -> int:
    """0 if not given."""
    if expected_rows is None:
        return 0
    if type(expected_rows) is not int:
        raise TypeError(f"expected_rows: wanted an int >= 1, got {expected_rows!r}")
    if expected_rows < 1:
        raise ValueError(f"expected_rows: wanted an int >= 1, got {expected_rows}")
    return expected_rows


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name}: wanted a tensor on {like.device}, got one on {tensor.device}")


def check_row_index(name: str, index: Tensor, source: Tensor, rows: RowRanges) -> None:
    """Which row of `source` every row is. On the CPU, but in compiled code, those of the experts' rows are checked."""
    if not isinstance(index, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(index).__name__}")
    if index.dtype != torch.int32:
        raise TypeError(f"{name}: wanted dtype int32, got {index.dtype}")
    check_shape(name, index, (None,), "(R,)")
    if not index.is_contiguous():
        raise ValueError(f"{name}: wanted a contiguous tensor, got strides {index.stride()}")
    check_device(name, index, like=source)
    if index.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for start, end in zip(rows.starts.tolist(), rows.ends.tolist(), strict=True):
        owned = index[max(start, 0) : max(end, 0)]
        if owned.numel() and not (int(owned.min()) >= 0 and int(owned.max()) < source.shape[0]):
            low, high = int(owned.min()), int(owned.max())
            raise ValueError(f"{name}: wanted rows from 0 to {source.shape[0] - 1}, got {low} to {high}")


def check_ids(top_k_ids: Tensor, num_experts: int) -> None:
    if not isinstance(top_k_ids, Tensor):
        raise TypeError(f"top_k_ids: wanted a tensor, got {type(top_k_ids).__name__}")
    if top_k_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"top_k_ids: wanted dtype int32 or int64, got {top_k_ids.dtype}")
    check_shape("top_k_ids", top_k_ids, (None, None), "(T, k)")
    if num_experts < 1:
        raise ValueError(f"num_experts: wanted an int >= 1, got {num_experts}")


def check_values_of_ids(top_k_ids: Tensor, num_experts: int) -> None:
    """Where they are on the CPU."""
    if top_k_ids.device.type == "cpu" and top_k_ids.numel():
        low, high = (int(bound) for bound in top_k_ids.aminmax())
        if low < 0 or high > num_experts:
            raise ValueError(f"top_k_ids: wanted ids from 0 to num_experts = {num_experts}, got {low} to {high}")


def check_rows(rows: RowRanges, num_experts: int | None, like: Tensor) -> None:
    if not isinstance(rows, RowRanges):
        raise TypeError(f"rows: wanted a RowRanges, got {type(rows).__name__}")
    for name, tensor in (("rows.starts", rows.starts), ("rows.ends", rows.ends)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name}: wanted dtype int32, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: wanted a contiguous tensor, got strides {tensor.stride()}")
        check_shape(name, tensor, (rows.num_experts if num_experts is None else num_experts,), "(E,)")
        check_device(name, tensor, like)
