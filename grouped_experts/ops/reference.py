"""Every op in plain torch: what it means, and how it runs on a CPU.

T rows, E experts, H hidden size, I intermediate size; M, N, K inside products. Arguments were checked by the callers.
Row ranges are read on the host here, which is free on a CPU; on a GPU it would synchronise. The tile schedule, `tiles`,
is for kernels: it is not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grouped_experts.activations import Activation, get_activation

Bounds = list[tuple[int, int]]  # the row range of every expert, on the host


# ---- row ranges on the host


def host_bounds(starts: Tensor, ends: Tensor, num_rows: int) -> Bounds:
    """The ranges as ints, an empty one moved behind the range before it.

    Raises ValueError unless they ascend, are disjoint and lie within the rows there are.
    """
    bounds: Bounds = []
    behind = 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if start == end:
            start = end = behind
        if not behind <= start <= end <= num_rows:
            raise ValueError(
                f"rows: wanted ascending, disjoint ranges within {num_rows} rows, "
                f"got {start}:{end} behind row {behind} for expert {len(bounds)}"
            )
        bounds.append((start, end))
        behind = end
    return bounds


def expert_rows(x: Tensor, bounds: Bounds) -> tuple[Tensor, ...]:
    """The rows of every expert, as views, cut in one call."""
    sizes: list[int] = []
    behind = 0
    for start, end in bounds:
        sizes += (start - behind, end - start)
        behind = end
    return x.split([*sizes, x.shape[0] - behind])[1::2]


def spans(bounds: Bounds) -> list[tuple[int, int]]:
    """The rows that some expert owns, neighbouring ranges joined."""
    joined: list[tuple[int, int]] = []
    for start, end in bounds:
        if start == end:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def zero_gaps(out: Tensor, bounds: Bounds) -> None:
    """Zero the rows that no expert owns, and only those."""
    behind = 0
    for start, end in spans(bounds):
        if start > behind:
            out[behind:start] = 0
        behind = end
    if behind < out.shape[0]:
        out[behind:] = 0


def even_ranges(bounds: Bounds) -> tuple[int, int, int] | None:
    """(first row, rows from one expert to the next, rows of an expert) where these are the same for all experts."""
    start, end = bounds[0]
    step = bounds[1][0] - start if len(bounds) > 1 else end - start
    even = end > start and all(b == (start + e * step, end + e * step) for e, b in enumerate(bounds))
    return (start, step, end - start) if even else None


def by_expert(x: Tensor, even: tuple[int, int, int], num_experts: int) -> Tensor:
    """The rows of evenly spaced experts as a view (E, rows of an expert, N)."""
    start, step, count = even
    row, column = x.stride()
    return x.as_strided((num_experts, count, x.shape[1]), (step * row, row, column), x.storage_offset() + start * row)


# ---- grouped products


def row_product(x: Tensor, w: Tensor, bounds: Bounds, out: Tensor) -> None:
    """out[r] = x[r] @ w[e] for the rows r of expert e; w (E, K, N), computed in the dtype of `out`."""
    exact = x.dtype == out.dtype
    if exact and bounds and (even := even_ranges(bounds)):
        torch.bmm(by_expert(x, even, len(bounds)), w, out=by_expert(out, even, len(bounds)))
        return
    for rows, expert, product in zip(expert_rows(x, bounds), w.unbind(), expert_rows(out, bounds), strict=True):
        if rows.shape[0]:
            if not exact:
                rows, expert = rows.to(out.dtype), expert.to(out.dtype)
            torch.mm(rows, expert, out=product)


def m_grouped_gemm(
    x: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    transpose_w: bool,
    tiles: Tensor | None = None,
) -> Tensor:
    """y[r] = x[r] @ w[e].T (or @ w[e]) + bias_scale[r] * bias[e] for the rows r of expert e; zero for rows of none."""
    bounds = host_bounds(starts, ends, x.shape[0])
    w = w.transpose(1, 2) if transpose_w else w
    y = x.new_empty(x.shape[0], w.shape[2])
    zero_gaps(y, bounds)
    if bias is None:
        row_product(x, w, bounds, y)
        return y
    product = torch.empty_like(y, dtype=accumulation_dtype(x.dtype))
    row_product(x, w, bounds, product)
    products, ys = expert_rows(product, bounds), expert_rows(y, bounds)
    scales = None if bias_scale is None else expert_rows(bias_scale.to(product.dtype)[:, None], bounds)
    for e, expert_bias in enumerate(bias.to(product.dtype).unbind()):
        ys[e].copy_(products[e].add_(expert_bias if scales is None else scales[e] * expert_bias))
    return y


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def k_grouped_gemm(a: Tensor, b: Tensor, starts: Tensor, ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    """c[e] = a[r].T @ b[r] over the rows r of expert e; exact zeros for an expert without rows."""
    bounds = host_bounds(starts, ends, a.shape[0])
    c = a.new_empty(len(bounds), a.shape[1], b.shape[1], dtype=out_dtype)
    if a.dtype == out_dtype and bounds and (even := even_ranges(bounds)):
        return torch.bmm(by_expert(a, even, len(bounds)).transpose(1, 2), by_expert(b, even, len(bounds)), out=c)
    dtype = torch.promote_types(a.dtype, out_dtype)
    for left, right, expert in zip(expert_rows(a, bounds), expert_rows(b, bounds), c.unbind(), strict=True):
        if not left.shape[0]:
            expert.zero_()
        elif a.dtype == out_dtype:
            torch.mm(left.t(), right, out=expert)
        else:
            expert.copy_(torch.mm(left.to(dtype).t(), right.to(dtype)))
    return c


def k_grouped_gemm_accumulate(c: Tensor, a: Tensor, b: Tensor, starts: Tensor, ends: Tensor) -> None:
    """c[e] += a[r].T @ b[r] over the rows r of expert e."""
    bounds = host_bounds(starts, ends, a.shape[0])
    dtype = torch.promote_types(a.dtype, c.dtype)
    for left, right, expert in zip(expert_rows(a, bounds), expert_rows(b, bounds), c.unbind(), strict=True):
        if left.shape[0]:
            expert += torch.mm(left.to(dtype).t(), right.to(dtype))


def k_grouped_sum(a: Tensor, starts: Tensor, ends: Tensor, scale: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """c[e] = sum of scale[r] * a[r] over the rows r of expert e."""
    bounds = host_bounds(starts, ends, a.shape[0])
    c = a.new_empty(len(bounds), a.shape[1], dtype=out_dtype)
    dtype = accumulation_dtype(a.dtype)
    scales = None if scale is None else expert_rows(scale.to(dtype)[:, None], bounds)
    for e, (rows, expert) in enumerate(zip(expert_rows(a, bounds), c.unbind(), strict=True)):
        rows = rows.to(dtype)
        expert.copy_((rows if scales is None else rows * scales[e]).sum(0))
    return c


# ---- activation, scaled by the router prob


def activation_blocks(
    h: Tensor, probs: Tensor | None, act: Activation, owned: list[tuple[int, int]]
) -> Iterator[tuple[slice, tuple[Tensor, ...], Tensor | None]]:
    """(rows, parts of h, probs (rows, 1)) in the accumulation dtype, in blocks whose temporaries stay in the cache.

    Forward and backward walk the same blocks: the backward then recomputes a bit for bit.
    """
    dtype = accumulation_dtype(h.dtype)
    step = max(1, 2**19 // max(1, h.shape[1]))
    for first, behind in owned:
        for start in range(first, behind, step):
            rows = slice(start, min(start + step, behind))
            # Contiguous, since vectorised and scalar loops differ in the last bit.
            yield (
                rows,
                act.split(h[rows].to(dtype).contiguous()),
                None if probs is None else probs[rows, None].to(dtype),
            )


def scaled_activation_into(
    a: Tensor, h: Tensor, probs: Tensor | None, act: Activation, owned: list[tuple[int, int]]
) -> None:
    for rows, parts, p in activation_blocks(h, probs, act, owned):
        s = act.value(*parts)
        a[rows] = s if p is None else s.mul_(p)


def scaled_activation_backward_into(
    dh: Tensor,
    a: Tensor | None,
    dprobs: Tensor | None,
    da: Tensor,
    h: Tensor,
    probs: Tensor | None,
    act: Activation,
    owned: list[tuple[int, int]],
) -> None:
    for rows, parts, p in activation_blocks(h, probs, act, owned):
        da_rows = da[rows].to(parts[0].dtype)
        if a is not None or dprobs is not None:
            s = act.value(*parts)
            if dprobs is not None:
                torch.sum(da_rows * s, 1, out=dprobs[rows])
            if a is not None:
                a[rows] = s if p is None else s.mul_(p)
        ds = da_rows if p is None else da_rows * p
        for d_part, gradient in zip(act.split(dh[rows]), act.gradient(ds, *parts), strict=True):
            d_part.copy_(gradient)


def scaled_activation(
    h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str
) -> Tensor:
    """a = p * act(h), elementwise in fp32; zero for rows of no expert."""
    act = get_activation(activation)
    bounds = _bounds_or_all(starts, ends, h.shape[0])
    a = h.new_empty(h.shape[0], h.shape[1] // 2 if act.gated else h.shape[1])
    zero_gaps(a, bounds)
    scaled_activation_into(a, h, probs, act, spans(bounds))
    return a


def scaled_activation_backward(
    da: Tensor, h: Tensor, probs: Tensor | None, starts: Tensor | None, ends: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dh = act'(h) (p * da), a = p * act(h), dprobs = sum_j da_j act(h)_j; zero for rows of no expert."""
    bounds = _bounds_or_all(starts, ends, h.shape[0])
    dh, a = h.new_empty(h.shape), da.new_empty(da.shape)
    dprobs = h.new_empty(h.shape[0], dtype=accumulation_dtype(h.dtype))
    for out in (dh, a, dprobs):
        zero_gaps(out, bounds)
    scaled_activation_backward_into(dh, a, dprobs, da, h, probs, get_activation(activation), spans(bounds))
    return dh, a, dprobs


def _bounds_or_all(starts: Tensor | None, ends: Tensor | None, num_rows: int) -> Bounds:
    return [(0, num_rows)] if starts is None or ends is None else host_bounds(starts, ends, num_rows)


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
) -> tuple[Tensor, Tensor]:
    """h = x W1_e^T + b1_e, rounded; a = p * act(h) of the rounded h. Both undefined in rows of no expert."""
    act = get_activation(activation)
    bounds = host_bounds(starts, ends, x.shape[0])
    h = m_grouped_gemm(x, fc1_weight, starts, ends, fc1_bias, None, True)
    a = h.new_empty(h.shape[0], h.shape[1] // 2 if act.gated else h.shape[1])
    scaled_activation_into(a, h, probs, act, spans(bounds))
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
) -> tuple[Tensor, Tensor, Tensor]:
    """da = dy W2_e; dh = act'(h) (p * da), a = p * act(h), dprobs = sum_j da_j act(h)_j + dy . b2_e.

    dh and a are undefined in rows of no expert, dprobs (fp32) is zero there. What is not needed comes back empty.
    The kernels keep da in fp32. Here it is rounded once to the dtype of dy, as PyTorch's CPU products come: those of
    bf16 and fp16 have no fp32 output, and widening the operands instead made the layer 1.1 to 1.2 times slower.
    """
    bounds = host_bounds(starts, ends, dy.shape[0])
    dtype = accumulation_dtype(dy.dtype)
    da = dy.new_empty(dy.shape[0], fc2_weight.shape[2])
    row_product(dy, fc2_weight, bounds, da)
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
        spans(bounds),
    )
    if need_dprobs:
        zero_gaps(dprobs, bounds)
        if fc2_bias is not None:
            rows = zip(expert_rows(dy, bounds), expert_rows(dprobs, bounds), fc2_bias.to(dtype).unbind(), strict=True)
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
