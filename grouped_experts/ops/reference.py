"""Every op in plain torch: what it means, and how it runs on a CPU.

T rows, E experts, H hidden size, I intermediate size; M, N, K inside products. Arguments were checked by the callers.
The tile schedule, `tiles`, is for kernels: it is not read here. With a row index (R,), row r of an operand is row
index[r] of the tensor that is given: there are R rows then, and as many tokens as there may be.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from grouped_experts.activations import Activation, get_activation, multiply_into
from grouped_experts.ops.host_ranges import HostRanges, Span, host_ranges

# ---- grouped products


def gather_rows(x: Tensor, row_index: Tensor | None) -> Tensor:
    """x[row_index[r]] as row r; indices are clamped into x, since those of no expert's rows may be anything."""
    if row_index is None:
        return x
    if x.shape[0] == 0:
        return x.new_zeros(row_index.shape[0], x.shape[1])
    return x.index_select(0, row_index.clamp(0, x.shape[0] - 1))


def row_product(x: Tensor, w: Tensor, ranges: HostRanges, dtype: torch.dtype) -> Tensor:
    """y[r] = x[r] @ w[e] for the rows r of expert e, zero for rows of no expert; w (E, K, N), computed in `dtype`.

    The three ways are one product, fastest first: `bmm` where all experts have as many rows, else `grouped_mm` where
    it may run, else a loop.
    """
    exact = x.dtype == dtype
    if exact and ranges.even is None and ranges.offs is not None and suits_grouped_mm(w.shape[2], x, w):
        y = F.grouped_mm(x, w, offs=ranges.offs.to(x.device))
        ranges.zero_gaps(y)
        return y
    y = x.new_empty(x.shape[0], w.shape[2], dtype=dtype)
    ranges.zero_gaps(y)
    if exact and ranges.even is not None:
        torch.bmm(ranges.batch(x), w, out=ranges.batch(y))
        return y
    for rows, expert, product in zip(ranges.cut(x), w.unbind(), ranges.cut(y), strict=True):
        if rows.shape[0]:
            torch.mm(rows.to(dtype), expert.to(dtype), out=product)
    return y


def suits_grouped_mm(columns: int, *operands: Tensor) -> bool:
    """What F.grouped_mm asks for: no fp64, operands with something in them, 16-byte strides and base, a unit stride."""

    def suits(t: Tensor) -> bool:
        *outer, rows, columns = t.stride()
        pitch, least = (rows, t.shape[-1]) if columns == 1 else (columns, t.shape[-2])
        aligned = all(stride * t.element_size() % 16 == 0 for stride in (*outer, pitch)) and t.data_ptr() % 16 == 0
        return aligned and 1 in (rows, columns) and pitch >= least

    whole = columns * operands[0].element_size() % 16 == 0  # else its output comes with padded rows
    return whole and operands[0].dtype != torch.float64 and all(t.numel() > 0 and suits(t) for t in operands)


def m_grouped_gemm(
    x: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    transpose_w: bool,
    tiles: Tensor | None = None,
    row_index: Tensor | None = None,
    zero_gaps: bool = True,
) -> Tensor:
    """y[r] = x[r] @ w[e].T (or @ w[e]) + bias_scale[r] * bias[e] for the rows r of expert e; zero for rows of none."""
    x = gather_rows(x, row_index)
    ranges = host_ranges(starts, ends, x.shape[0])
    w = w.transpose(1, 2) if transpose_w else w
    if bias is None:
        return row_product(x, w, ranges, x.dtype)
    y = row_product(x, w, ranges, accumulation_dtype(x.dtype))
    products = ranges.cut(y)
    scales = None if bias_scale is None else ranges.cut(bias_scale.to(y.dtype)[:, None])
    for e, expert_bias in enumerate(bias.to(y.dtype).unbind()):
        products[e].add_(expert_bias if scales is None else scales[e] * expert_bias)
    return y.to(x.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def k_grouped_gemm(
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> Tensor:
    """c[e] = a[r].T @ b[r] over the rows r of expert e; exact zeros for an expert without rows."""
    a, b = gather_rows(a, a_index), gather_rows(b, b_index)
    ranges = host_ranges(starts, ends, a.shape[0])
    exact = a.dtype == out_dtype
    if exact and ranges.even is not None:
        return torch.bmm(ranges.batch(a).transpose(1, 2), ranges.batch(b))
    if exact and ranges.offs is not None and suits_grouped_mm(b.shape[1], a, b):
        return F.grouped_mm(a.t(), b, offs=ranges.offs.to(a.device))
    c = a.new_empty(len(ranges), a.shape[1], b.shape[1], dtype=out_dtype)
    dtype = torch.promote_types(a.dtype, out_dtype)
    for left, right, expert in zip(ranges.cut(a), ranges.cut(b), c.unbind(), strict=True):
        if not left.shape[0]:
            expert.zero_()
        elif exact:
            torch.mm(left.t(), right, out=expert)
        else:
            expert.copy_(torch.mm(left.to(dtype).t(), right.to(dtype)))
    return c


def k_grouped_gemm_accumulate(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> None:
    """c[e] += a[r].T @ b[r] over the rows r of expert e."""
    a, b = gather_rows(a, a_index), gather_rows(b, b_index)
    ranges = host_ranges(starts, ends, a.shape[0])
    dtype = accumulation_dtype(torch.promote_types(a.dtype, c.dtype))
    for left, right, expert in zip(ranges.cut(a), ranges.cut(b), c.unbind(), strict=True):
        if left.shape[0]:
            expert += torch.mm(left.to(dtype).t(), right.to(dtype))


def k_grouped_sum(
    a: Tensor,
    starts: Tensor,
    ends: Tensor,
    scale: Tensor | None,
    out_dtype: torch.dtype,
    row_index: Tensor | None = None,
) -> Tensor:
    """c[e] = sum of scale[r] * a[r] over the rows r of expert e."""
    a = gather_rows(a, row_index)
    ranges = host_ranges(starts, ends, a.shape[0])
    c = a.new_empty(len(ranges), a.shape[1], dtype=out_dtype)
    dtype = accumulation_dtype(a.dtype)
    scales = None if scale is None else ranges.cut(scale.to(dtype)[:, None])
    for e, (rows, expert) in enumerate(zip(ranges.cut(a), c.unbind(), strict=True)):
        rows = rows.to(dtype)
        expert.copy_((rows if scales is None else rows * scales[e]).sum(0))
    return c


# ---- activation, scaled by the router prob

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


# ---- the two products of the layer that are fused with the activation


def fc1_activation(
    x: Tensor,
    fc1_weight: Tensor,
    starts: Tensor,
    ends: Tensor,
    fc1_bias: Tensor | None,
    probs: Tensor | None,
    activation: str,
    tiles: Tensor | None = None,
    row_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h = x W1_e^T + b1_e, rounded; a = p * act(h) of the rounded h. Both undefined in rows of no expert."""
    act = get_activation(activation)
    h = m_grouped_gemm(x, fc1_weight, starts, ends, fc1_bias, None, True, row_index=row_index)
    ranges = host_ranges(starts, ends, h.shape[0])
    a = h.new_empty(h.shape[0], h.shape[1] // 2 if act.gated else h.shape[1])
    scaled_activation_into(a, h, probs, act, ranges.owned)
    return h, a


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
) -> tuple[Tensor, Tensor, Tensor]:
    """da = dy W2_e; dh = act'(h) (p * da), a = p * act(h), dprobs = sum_j da_j act(h)_j + dy . b2_e.

    dh and a are undefined in rows of no expert, dprobs (fp32) is zero there. What is not needed comes back empty.
    The kernels keep da in fp32. Here it is rounded once to the dtype of dy, as PyTorch's CPU products come: those of
    bf16 and fp16 have no fp32 output, and widening the operands instead costs about a tenth of the layer's time.
    """
    dy = gather_rows(dy, row_index)
    ranges = host_ranges(starts, ends, dy.shape[0])
    dtype = accumulation_dtype(dy.dtype)
    da = row_product(dy, fc2_weight, ranges, dy.dtype)
    dh = h.new_empty(h.shape)
    a = h.new_empty(da.shape if need_a else (0, da.shape[1]))
    dprobs = h.new_empty(h.shape[0] if need_dprobs else 0, dtype=dtype)
    scaled_activation_backward_into(
        dh,
        a if need_a else None,
        dprobs if need_dprobs else None,
        da,
        h,
        probs,
        get_activation(activation),
        ranges.owned,
    )
    if need_dprobs:
        ranges.zero_gaps(dprobs)
        if fc2_bias is not None:
            rows = zip(ranges.cut(dy), ranges.cut(dprobs), fc2_bias.to(dtype).unbind(), strict=True)
            for dy_rows, dp_rows, bias in rows:
                dp_rows += dy_rows.to(dtype) @ bias
    return dh, a, dprobs


# ---- permute


def route(top_k_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, the row of every slot and the slot of every row, rows sorted by expert and stably by slot within one.

    A slot is a position in top_k_ids (T, k) read row by row. A slot whose id is no expert has row -1; the rows behind
    the last expert's have slot -1.
    """
    ids = top_k_ids.reshape(-1).to(torch.int64)
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    slots = torch.arange(ids.shape[0], device=ids.device)
    sorted_ids, row_to_slot = ids.sort(stable=True)
    slot_to_row = torch.empty_like(slots).scatter_(0, row_to_slot, slots)
    slot_to_row = torch.where(ids == num_experts, -1, slot_to_row)
    row_to_slot = torch.where(sorted_ids == num_experts, -1, row_to_slot)
    edges = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=ids.device))
    counts = edges.diff()
    return (
        counts.to(torch.int32),
        slot_to_row.to(torch.int32).view(top_k_ids.shape),
        row_to_slot.to(torch.int32),
    )


def permute(x: Tensor, slot_to_row: Tensor, row_to_slot: Tensor) -> Tensor:
    """y[r] = x[row_to_slot[r] // k]; zero where the row has no slot."""
    token = torch.div(row_to_slot.clamp(min=0), max(1, slot_to_row.shape[1]), rounding_mode="floor")
    y = x.index_select(0, token) if x.shape[0] else x.new_zeros(row_to_slot.shape[0], x.shape[1])
    y[row_to_slot < 0] = 0
    return y


def unpermute(y: Tensor, slot_to_row: Tensor, row_to_slot: Tensor) -> Tensor:
    """x[t] = sum over j of y[slot_to_row[t, j]], in fp32, j ascending; a slot without a row adds nothing."""
    x = y.new_zeros(slot_to_row.shape[0], y.shape[1], dtype=accumulation_dtype(y.dtype))
    if y.shape[0]:
        for row in slot_to_row.unbind(1):
            part = y.index_select(0, row.clamp(min=0))
            part[row < 0] = 0
            x += part
    return x.to(y.dtype)


def unpermute_with_values(
    y: Tensor, row_values: Tensor, slot_to_row: Tensor, row_to_slot: Tensor
) -> tuple[Tensor, Tensor]:
    """`unpermute`, and values[t, j] = row_values[slot_to_row[t, j]], zero for a slot without a row."""
    values = row_values.new_zeros(slot_to_row.shape)
    if row_values.shape[0]:
        values = torch.where(slot_to_row < 0, 0, row_values[slot_to_row.clamp(min=0)])
    return unpermute(y, slot_to_row, row_to_slot), values


# ---- the routed layer of few tokens


def few_tokens(
    x: Tensor,
    top_k_ids: Tensor,
    top_k_probs: Tensor | None,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """y_t = sum over j of W2_e a_tj + p_tj b2_e, a = p act(h), h = W1_e x_t + b1_e; h and a rounded, sums in fp32."""
    num_tokens, choices = top_k_ids.shape
    act, dtype = get_activation(activation), accumulation_dtype(x.dtype)
    ids = top_k_ids.reshape(-1).to(torch.int64)
    slot = ((ids >= 0) & (ids < fc1_weight.shape[0])).nonzero()[:, 0]
    expert, token = ids[slot], torch.div(slot, max(1, choices), rounding_mode="floor")
    h = (fc1_weight[expert].to(dtype) @ x[token].to(dtype)[:, :, None])[:, :, 0]
    h = h if fc1_bias is None else h + fc1_bias[expert].to(dtype)
    a = act.value(*act.split(h.to(x.dtype).to(dtype)))
    probs = None if top_k_probs is None else top_k_probs.reshape(-1)[slot].to(dtype)[:, None]
    a = (a if probs is None else probs * a).to(x.dtype)
    y = (fc2_weight[expert].to(dtype) @ a.to(dtype)[:, :, None])[:, :, 0]
    if fc2_bias is not None:
        y += fc2_bias[expert].to(dtype) if probs is None else probs * fc2_bias[expert].to(dtype)
    slots = y.new_zeros(num_tokens * choices, y.shape[1])
    slots[slot] = y
    return slots.view(num_tokens, choices, y.shape[1]).sum(1).to(x.dtype)
