"""The activation, scaled by the router prob, and its backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grouped_experts.activations import Activation, get_activation, multiply_into
from grouped_experts.ops.host_ranges import HostRanges, Span, host_ranges
from grouped_experts.ops.reference.products import accumulation_dtype

BLOCK_ELEMENTS = 2**20  # of h: their temporaries stay in the cache, their loops are long enough


def activation_blocks(
    h: Tensor, probs: Tensor | None, act: Activation, owned: tuple[Span, ...]
) -> Iterator[tuple[slice, tuple[Tensor, ...], Tensor | None]]:
    """(rows, parts of h, probs (rows, 1)) in the accumulation dtype, in blocks whose temporaries stay in the cache.

    Forward and backward walk the same blocks: the backward then recomputes a bit for bit. A block is overwritten by the
    next one.
    """
    dtype = accumulation_dtype(h.dtype)
    step = max(1, BLOCK_ELEMENTS // max(1, h.shape[1]))
    longest = max((min(step, behind - first) for first, behind in owned), default=0)
    converted = None if h.dtype == dtype else h.new_empty(longest, h.shape[1], dtype=dtype)
    for first, behind in owned:
        for start in range(first, behind, step):
            rows = slice(start, min(start + step, behind))
            # Contiguous, since vectorised and scalar loops differ in the last bit.
            block = h[rows].contiguous() if converted is None else converted[: rows.stop - start].copy_(h[rows])
            yield rows, act.split(block), None if probs is None else probs[rows, None].to(dtype)


def scaled_activation_into(
    a: Tensor, h: Tensor, probs: Tensor | None, act: Activation, owned: tuple[Span, ...]
) -> None:
    for rows, parts, p in activation_blocks(h, probs, act, owned):
        _scale_into(a[rows], act.value(*parts), p)


def scaled_activation_backward_into(
    dh: Tensor,
    a: Tensor | None,
    dprobs: Tensor | None,
    da: Tensor,
    h: Tensor,
    probs: Tensor | None,
    act: Activation,
    owned: tuple[Span, ...],
) -> None:
    for rows, parts, p in activation_blocks(h, probs, act, owned):
        _block_backward_into(
            act.split(dh[rows]),
            None if a is None else a[rows],
            None if dprobs is None else dprobs[rows],
            da[rows],
            parts,
            p,
            act,
        )


def _block_backward_into(
    d_parts: tuple[Tensor, ...],
    a: Tensor | None,
    dprobs: Tensor | None,
    da: Tensor,
    parts: tuple[Tensor, ...],
    p: Tensor | None,
    act: Activation,
) -> None:
    """A function of its own, so that a block's temporaries are gone before the next block's come."""
    ds = da.to(parts[0].dtype)
    s, gradient = act.linearize(*parts)
    if dprobs is not None:
        torch.sum(ds * s, 1, out=dprobs)
    if a is not None:
        _scale_into(a, s, p)
    if p is not None:
        ds = ds * p if ds is da else ds.mul_(p)
    gradient(ds, d_parts)


def _scale_into(a: Tensor, s: Tensor, p: Tensor | None) -> None:
    if p is None:
        a.copy_(s)
    else:
        multiply_into(a, s, p)


def scaled_activation(
    h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str
) -> Tensor:
    """a = p * act(h), elementwise in fp32; zero for rows of no expert."""
    act = get_activation(activation)
    ranges = _ranges_or_all(starts, ends, h.shape[0])
    a = h.new_empty(h.shape[0], h.shape[1] // 2 if act.gated else h.shape[1])
    ranges.zero_gaps(a)
    scaled_activation_into(a, h, probs, act, ranges.owned)
    return a


def scaled_activation_backward(
    da: Tensor, h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dh = act'(h) (p * da), a = p * act(h), dprobs = sum_j da_j act(h)_j; zero for rows of no expert."""
    ranges = _ranges_or_all(starts, ends, h.shape[0])
    dh, a = h.new_empty(h.shape), da.new_empty(da.shape)
    dprobs = h.new_empty(h.shape[0], dtype=accumulation_dtype(h.dtype))
    for out in (dh, a, dprobs):
        ranges.zero_gaps(out)
    scaled_activation_backward_into(dh, a, dprobs, da, h, probs, get_activation(activation), ranges.owned)
    return dh, a, dprobs


def _ranges_or_all(starts: Tensor | None, ends: Tensor | None, num_rows: int) -> HostRanges:
    if starts is None or ends is None:
        return host_ranges(torch.zeros(1, dtype=torch.int32), torch.tensor([num_rows]), num_rows)
    return host_ranges(starts, ends, num_rows)
