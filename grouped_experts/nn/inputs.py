"""What a call of the layer checks and decides before anything is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from grouped_experts.activations import get_activation
from grouped_experts.nn.autocast import autocast_dtype
from grouped_experts.nn.fp8 import FP8Recipe, QuantizedWeights
from grouped_experts.nn.function import Weights
from grouped_experts.ops.checks import check_device, check_float, check_shape
from grouped_experts.ops.permute import Routing
from grouped_experts.ops.quantize import Quantized, check_quantized
from grouped_experts.ops.reference.quantize import num_blocks
from grouped_experts.ops.schedule import scheduled_ranges
from grouped_experts.rows import RowRanges


def check_weights(
    weights: Weights, activation: str, num_experts: int, hidden_size: int, intermediate_size: int, like: Tensor
) -> None:
    """Weights may come from elsewhere (`torch.func.functional_call`, parametrisations): of those sizes they must be."""
    width = get_activation(activation).width(intermediate_size)
    shapes = ((width, hidden_size), (hidden_size, intermediate_size), (width,), (hidden_size,))
    for name, weight, shape in zip(Weights._fields, weights, shapes, strict=True):
        if weight is None:
            continue
        if is_dtensor(weight):
            raise TypeError(f"{name}: wanted a plain tensor, got a DTensor: unwrap it (as fully_shard does) first")
        check_float(name, weight)
        check_shape(name, weight, (num_experts, *shape), "(E, ...)")
        check_device(name, weight, like=like)


def is_dtensor(tensor: Tensor | None) -> bool:
    # By its attribute: importing torch.distributed.tensor for an isinstance takes longer than the rest of the package.
    return hasattr(tensor, "device_mesh")


def compute_dtype(x: Tensor | Quantized, weights: Weights) -> torch.dtype:
    """The dtype that the products run in: autocast's, or that of x, which the weights must not be narrower than.

    Of an x in FP8, which has none of its own: bf16, or fp16 with weights of fp16.
    """
    dtype = autocast_dtype(x.data if isinstance(x, Quantized) else x)
    if dtype is not None:
        return dtype
    if isinstance(x, Quantized):
        return torch.float16 if weights.fc1_weight.dtype == torch.float16 else torch.bfloat16
    for name, weight in zip(Weights._fields, weights, strict=True):
        if weight is not None and torch.promote_types(weight.dtype, x.dtype) != weight.dtype:
            raise TypeError(
                f"{name}: wanted the dtype of x, {x.dtype}, or a wider one, got {weight.dtype}: "
                "convert x, or use autocast"
            )
    return x.dtype


def check_quantized_x(x: Quantized, precision: FP8Recipe | None) -> None:
    """All but the shape of its data, (..., H)."""
    if precision is None:
        raise TypeError("x: wanted a tensor, got a Quantized, which a layer with a precision takes")
    check_quantized("x", x, x.data.dim(), "(..., H)")
    shape = *x.data.shape[:-1], num_blocks(x.data.shape[-1]) if x.data.dim() else 0
    check_shape("x.scales", x.scales, shape, "(..., ceil(H / 128))")
    if torch.is_grad_enabled() and (x.data.requires_grad or x.scales.requires_grad):
        raise ValueError("x: wanted a Quantized without requires_grad, which gets no gradient, got one with it")


def check_quantized_weights(casts: QuantizedWeights, weights: Weights, name: str = "weights") -> None:
    """That they could be casts of these weights."""
    if not isinstance(casts, QuantizedWeights):
        raise TypeError(f"{name}: wanted what `quantize_weights` returns, got {type(casts).__name__}")
    for part, each in casts._asdict().items():
        weight = weights.fc1_weight if part.startswith("fc1") else weights.fc2_weight
        experts, *sizes = weight.mT.shape if part.endswith("transposed") else weight.shape
        check_quantized(f"{name}.{part}", each, 3, "(E, N, K)")
        check_shape(f"{name}.{part}.data", each.data, (experts, *sizes), "that of the layer's")
        blocks = experts, *map(num_blocks, sizes)
        check_shape(f"{name}.{part}.scales", each.scales, blocks, "(E, ceil(N / 128), ceil(K / 128))")
        check_device(f"{name}.{part}.data", each.data, like=weight)


def check_choices(slots: Tensor, x: Tensor, top_k_probs: Tensor | None, slots_name: str, probs_name: str) -> None:
    """That slots, one of every token and choice, and their probs are of the tokens x; by the names given."""
    check_shape(slots_name, slots, (x.shape[0], None), "(T, k)")
    check_device(slots_name, slots, like=x)
    if top_k_probs is not None:
        check_float(probs_name, top_k_probs)
        check_shape(probs_name, top_k_probs, tuple(slots.shape), "(T, k)")
        check_device(probs_name, top_k_probs, like=x)


def routed_ranges(routing: Routing, dtype: torch.dtype) -> tuple[RowRanges, Tensor | None]:
    """The ranges of the rows that a routing makes, and their tiles where these come from the same kernel."""
    if routing.rows is not None:
        return routing.rows, routing.tiles
    num_rows = routing.row_to_slot.shape[0]
    if routing.counts.device.type == "cpu":
        return RowRanges.contiguous(routing.counts, num_rows=num_rows), None
    return scheduled_ranges(routing.counts, num_rows, None, dtype)
