"""The routed layer of few tokens without gradients: two kernels, in which nothing is sorted, gathered or put back.

Reading the weights of the chosen experts is what takes the time, and a slot (t, j), a token with one of its choices,
needs no other: it is a row with an expert of its own. fc1 and the activation take a program a slot and block of
columns, fc2 one a token and block of columns, which goes through the token's choices and so sums them. Products are
sums of fp32 numbers in a fixed order; h and a are rounded as everywhere. An expert that several slots chose is read
several times, from the L2 cache at best.

From Hopper on fc2 is launched while fc1 runs (programmatic dependent launch): its programs come as those of fc1 end,
load the first of their weights, and only then wait for a.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from grouped_experts.activations import get_activation
from grouped_experts.ops.portable.activations import VALUES
from grouped_experts.ops.portable.launch import cdiv, contiguous, has_dependent_launch, kernel
from grouped_experts.ops.portable.route import load_experts


class Block(NamedTuple):
    """A program is a warp. Its columns, how many numbers of each it loads at a time, how many such loads it starts.

    A thread loads 16 bytes of a column: what it multiplies with is then where the column's numbers are, without a way
    through shared memory, at whose barriers all loads would end.
    """

    columns: int
    depth: int
    unroll: int

    @classmethod
    def of(cls, weight: Tensor, columns: int, unroll: int) -> Block:
        """Of rows that Triton does not know to be aligned, a load is one number: few columns make loads enough."""
        specialized = (weight.shape[2], *weight.stride()[:2], weight.data_ptr())  # on being a multiple of 16
        aligned = all(number % 16 == 0 for number in specialized)
        return cls(columns if aligned else 2, 32 * 16 // weight.element_size(), unroll if aligned else 1)


@triton.jit
def slot_fc1_kernel(
    x_ptr,  # (T, H)
    ids_ptr,  # (T, k)
    probs_ptr,  # (T, k) or None
    weight_ptr,  # (E, 2 I, H), or (E, I, H) without a gate; of unit stride in H
    bias_ptr,  # (E, 2 I), (E, I) or None
    a_ptr,  # (T * k, I)
    num_slots,
    num_experts,
    choices,
    H,
    I,
    stride_ids,
    stride_ids_k,
    stride_we,
    stride_wn,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAP: tl.constexpr,  # with fc2
):
    """Grid (slots, column blocks). h = W1_e x_t + b1_e, rounded; a = p * act(h). A slot of no expert is left out."""
    if OVERLAP:
        gdc_launch_dependents()
    slot = tl.program_id(0)
    expert = load_experts(ids_ptr, slot, slot < num_slots, num_experts, choices, stride_ids, stride_ids_k)
    if expert < num_experts:
        n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        x_at = x_ptr + (slot // choices).to(tl.int64) * H + k
        row = n.to(tl.int64)[:, None]
        weight_ptr += expert.to(tl.int64) * stride_we
        total = tl.zeros((COLUMNS, DEPTH), tl.float32)
        total_up = tl.zeros((COLUMNS, DEPTH), tl.float32)
        for k0 in tl.range(0, H, DEPTH, loop_unroll_factor=UNROLL):
            inside = k0 + k < H
            x = tl.load(x_at + k0, mask=inside, other=0.0).to(tl.float32)[None, :]
            at = weight_ptr + row * stride_wn + (k0 + k)[None, :]
            mask = (n < I)[:, None] & inside[None, :]
            total += x * tl.load(at, mask=mask, other=0.0).to(tl.float32)
            if GATED:
                at = weight_ptr + (row + I) * stride_wn + (k0 + k)[None, :]
                total_up += x * tl.load(at, mask=mask, other=0.0).to(tl.float32)
        gate, up = tl.sum(total, 1), tl.sum(total_up, 1)
        if bias_ptr is not None:
            bias_at = bias_ptr + expert.to(tl.int64) * (I * (2 if GATED else 1)) + n
            gate += tl.load(bias_at, mask=n < I, other=0.0).to(tl.float32)
            if GATED:
                up += tl.load(bias_at + I, mask=n < I, other=0.0).to(tl.float32)
        dtype: tl.constexpr = a_ptr.dtype.element_ty
        a = ACT(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype == tl.float32)
        if probs_ptr is not None:
            a *= tl.load(probs_ptr + slot).to(tl.float32)
        tl.store(a_ptr + slot.to(tl.int64) * I + n, a.to(dtype), mask=n < I)


@triton.jit
def step_of_choices(step, k, choices_of_token, I):
    """Choice j of a token, its expert, the first number of I, and which of those at k are there, of no expert none."""
    ids_ptr, num_experts, choices, stride_k = choices_of_token
    steps = tl.maximum(1, tl.cdiv(I, k.shape[0]))  # of no columns, one with nothing in it
    j = step // steps
    k0 = step % steps * k.shape[0]
    expert = load_experts(ids_ptr, j, j < choices, num_experts, choices, 0, stride_k)
    return j, expert, k0, k0 + k < tl.where(expert < num_experts, I, 0)


@triton.jit
def load_weights(step, at, there, k, choices_of_token, stride_we, I):
    _j, expert, k0, inside = step_of_choices(step, k, choices_of_token, I)
    return tl.load(at + (expert.to(tl.int64) * stride_we + k0), mask=there[:, None] & inside[None, :], other=0.0)


@triton.jit
def times_a(w, step, a_ptr, k, choices_of_token, I):
    j, _expert, k0, inside = step_of_choices(step, k, choices_of_token, I)
    a = tl.load(a_ptr + (j.to(tl.int64) * I + k0) + k, mask=inside, other=0.0)
    return a.to(tl.float32)[None, :] * w.to(tl.float32)


@triton.jit
def slot_fc2_kernel(
    a_ptr,  # (T * k, I)
    ids_ptr,  # (T, k)
    probs_ptr,  # (T, k) or None: scale of the bias
    weight_ptr,  # (E, H, I), of unit stride in I
    bias_ptr,  # (E, H) or None
    y_ptr,  # (T, H)
    num_experts,
    choices,
    H,
    I,
    stride_ids,
    stride_ids_k,
    stride_we,
    stride_wn,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAP: tl.constexpr,  # with fc1
):
    """Grid (tokens, column blocks). y_t = sum over its choices of W2_e a + p b2_e, in fp32, rounded once."""
    token = tl.program_id(0)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    at = weight_ptr + n.to(tl.int64)[:, None] * stride_wn + k[None, :]
    a_ptr += token.to(tl.int64) * choices * I
    of_token = ids_ptr + token.to(tl.int64) * stride_ids, num_experts, choices, stride_ids_k
    total = tl.zeros((COLUMNS, DEPTH), tl.float32)
    first = ()
    for step in tl.static_range(UNROLL):
        first += (load_weights(step, at, n < H, k, of_token, stride_we, I),)  # type: ignore[assignment]
    if OVERLAP:
        gdc_wait()  # for all of fc1
    for step in tl.static_range(UNROLL):
        total += times_a(first[step], step, a_ptr, k, of_token, I)
    # One loop through the choices and along I, so that loads run ahead of sums.
    for step in tl.range(UNROLL, choices * tl.cdiv(I, DEPTH), loop_unroll_factor=UNROLL):
        w = load_weights(step, at, n < H, k, of_token, stride_we, I)
        total += times_a(w, step, a_ptr, k, of_token, I)
    y = tl.sum(total, 1)
    if bias_ptr is not None:
        for j in range(choices):
            expert = load_experts(of_token[0], j, j < choices, num_experts, choices, 0, stride_ids_k)
            here = n < tl.where(expert < num_experts, H, 0)
            bias = tl.load(bias_ptr + expert.to(tl.int64) * H + n, mask=here, other=0.0).to(tl.float32)
            if probs_ptr is not None:
                bias *= tl.load(probs_ptr + (token * choices + j), mask=expert < num_experts, other=0.0).to(tl.float32)
            y += bias
    tl.store(y_ptr + token.to(tl.int64) * H + n, y.to(y_ptr.dtype.element_ty), mask=n < H)


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
    num_tokens, choices = top_k_ids.shape
    num_experts, hidden, inner = fc2_weight.shape
    x = x.contiguous()
    top_k_probs, fc1_bias, fc2_bias = (contiguous(t) for t in (top_k_probs, fc1_bias, fc2_bias))
    fc1_weight, fc2_weight = (w if w.stride(2) == 1 else w.contiguous() for w in (fc1_weight, fc2_weight))
    a, y = x.new_empty(top_k_ids.numel(), inner), x.new_empty(num_tokens, hidden)
    sizes = num_experts, choices, hidden, inner, *top_k_ids.stride()
    overlap = has_dependent_launch(x.device)
    if a.numel():
        block = Block.of(fc1_weight, columns=4, unroll=4)
        kernel(
            slot_fc1_kernel,
            num_warps=1,
            ACT=VALUES[activation],
            GATED=get_activation(activation).gated,
            COLUMNS=block.columns,
            DEPTH=block.depth,
            UNROLL=block.unroll,
            OVERLAP=overlap,
        ).launch(
            (a.shape[0], cdiv(inner, block.columns)),
            x.device,
            x,
            top_k_ids,
            top_k_probs,
            fc1_weight,
            fc1_bias,
            a,
            a.shape[0],
            *sizes,
            *fc1_weight.stride()[:2],
        )
    if y.numel():
        block = Block.of(fc2_weight, columns=2, unroll=12)
        kernel(
            slot_fc2_kernel,
            num_warps=1,
            launch_pdl=overlap and a.numel() > 0,  # else what comes before may not be fc1
            COLUMNS=block.columns,
            DEPTH=block.depth,
            UNROLL=block.unroll,
            OVERLAP=overlap,
        ).launch(
            (num_tokens, cdiv(hidden, block.columns)),
            x.device,
            a,
            top_k_ids,
            top_k_probs,
            fc2_weight,
            fc2_bias,
            y,
            *sizes,
            *fc2_weight.stride()[:2],
        )
    return y
