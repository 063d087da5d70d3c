"""The layer's mathematics as one autograd.Function: fc1 -> activation x router prob -> fc2.

Forward, for row r of expert e with prob p:

    h = x W1_e^T (+ b1_e)      rounded, saved
    a = p * act(h)             in fp32 from the rounded h; not saved: the backward recomputes it bit for bit
    y = a W2_e^T (+ p * b2_e)

Backward:

    da = dy W2_e               stays in fp32
    dp = sum_j da_j act(h)_j (+ dy . b2_e)
    dh = act'(h) (p * da)      dx = dh W1_e
    dW2_e = dy_r^T a_r         db2_e = sum p dy
    dW1_e = dh_r^T x_r         db1_e = sum dh

Routed, x and dy are of tokens, and row r of a product is row `row_index[r]` of theirs; y and dx of a token are the sums
of its rows (`unpermute`), probs and dprobs are (T, k).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_experts.nn.deferred import BiasGradient, PendingGradient, WgradQueue
from grouped_experts.nn.products import Products, Rows, Wanted, cast
from grouped_experts.ops.activation import scaled_activation_op
from grouped_experts.ops.permute import Routing, gather_rows_op, permute_op, unpermute_op, unpermute_with_values_op
from grouped_experts.ops.quantize import Quantized
from grouped_experts.ops.schedule import tile_schedule_op
from grouped_experts.registration import below_autograd
from grouped_experts.rows import GATHERED_COLUMNS, RowRanges, num_rows


class Weights(NamedTuple):
    """fc1_weight (E, 2I, H), or (E, I, H) without a gate; fc2_weight (E, H, I); biases (E, 2I) or (E, I), (E, H)."""

    fc1_weight: Tensor
    fc2_weight: Tensor
    fc1_bias: Tensor | None = None
    fc2_bias: Tensor | None = None

    def detached(self) -> Weights:
        return Weights(*(None if w is None else w.detach() for w in self))  # type: ignore[arg-type]

    def need_grad(self) -> Needs:
        return Needs(*(w is not None and w.requires_grad for w in self))


class Needs(NamedTuple):
    """Which weights want a gradient."""

    fc1_weight: bool
    fc2_weight: bool
    fc1_bias: bool
    fc2_bias: bool


class Saved(NamedTuple):
    """What the forward leaves for the backward, each None where no gradient that is wanted needs it.

    x_scales: of an x that came in FP8. probs: of every row. slot_to_row, row_index: of a routed layer, else None.
    """

    x: Any
    x_scales: Tensor | None
    h: Any
    probs: Tensor | None
    fc1_weight: Any
    fc2_weight: Any
    fc2_bias: Tensor | None
    starts: Tensor
    ends: Tensor
    tiles: Tensor | None
    slot_to_row: Tensor | None
    row_index: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Deferral:
    """What a deferred layer hands to its backward beside the graph.

    The live weights must not hang in the graph (DDP's hook would fire early, without a gradient), and every tensor
    argument of `apply` does: so they travel in this container. Work that a backward leaves in `found` reaches the
    queue when the anchor, which stands in the graph for the weights, gets its gradient: that is, unless the backward
    was asked for other gradients only, as by `torch.autograd.grad(y, x)`.
    """

    queue: WgradQueue
    weights: Weights
    found: list[PendingGradient] = field(default_factory=list)

    def anchor(self, device: torch.device) -> Tensor:
        """An empty leaf. On the device of the layer, whose autograd thread then serves it before anything upstream."""
        anchor = torch.empty(0, device=device, requires_grad=True)
        anchor.register_hook(self._enqueue)
        return anchor

    def _enqueue(self, _: Tensor) -> None:
        self.queue.put(self.found[:])
        self.found.clear()


class GroupedMLPFunction(torch.autograd.Function):
    """y = apply(x, probs, fc1_weight, ..., fc2_bias, anchor, rows, tiles, routing, activation, products, deferral).

    x (T, H), or a Quantized, which gets no gradient; probs (T,) or None, weights as in `Weights`, rows a RowRanges,
    tiles their schedule or None, products a `Products`, which says how they are computed and in which dtype. routing:
    None, or where the slots of T tokens went; probs are (T, k) or None then, y is (T, H).
    With a deferral the weights come detached, their gradients go to its queue, and `anchor`, an empty tensor that
    requires a gradient, keeps y in the graph even if neither x nor probs requires one.
    Saved: x, h, probs, the ranges (on a GPU also as tiles, a byte a row) and the weights, each only where a wanted
    gradient needs it; routed also two integers a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | Quantized,
        probs: Tensor | None,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_bias: Tensor | None,
        anchor: Tensor | None,
        rows: RowRanges,
        tiles: Tensor | None,
        routing: Routing | None,
        activation: str,
        products: Products,
        deferral: Deferral | None,
    ) -> Tensor:
        weights = Weights(fc1_weight, fc2_weight, fc1_bias, fc2_bias)
        with below_autograd():
            return _forward(ctx, x, probs, weights, rows, tiles, routing, activation, products, deferral)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        saved = Saved(*ctx.saved_tensors)  # which may run a forward again, under activation checkpointing
        with torch.no_grad(), below_autograd():
            dx, dprobs, pending = _backward(ctx, dy, saved)
            del saved  # copies, under some hooks: not to be held while the weights' gradients are computed
            d_weights: dict[str, Tensor] = {}
            d_anchor = None
            if ctx.deferral is None:
                d_weights = {p.name: p.gradient.compute() for p in pending}
            else:
                for gradient in pending:
                    gradient.note_origin()
                ctx.deferral.found[:] = pending
                d_anchor = torch.empty(0, device=dy.device) if ctx.needs_input_grad[6] else None
        gradients = (dx, dprobs, *(d_weights.get(name) for name in Weights._fields))
        if create_graph:
            gradients = _refuse_double_backward(gradients)
        return *gradients, d_anchor, None, None, None, None, None, None


def apply_experts(
    x: Tensor | Quantized,
    probs: Tensor | None,
    rows: RowRanges,
    tiles: Tensor | None,
    routing: Routing | None,
    weights: Weights,
    activation: str,
    products: Products,
    anchor: Tensor | None = None,
    deferral: Deferral | None = None,
) -> Tensor:
    """`GroupedMLPFunction` with its arguments by name."""
    return GroupedMLPFunction.apply(  # type: ignore[no-untyped-call]
        x, probs, *weights, anchor, rows, tiles, routing, activation, products, deferral
    )


def _forward(
    ctx: Any,
    x: Tensor | Quantized,
    probs: Tensor | None,
    weights: Weights,
    rows: RowRanges,
    tiles: Tensor | None,
    routing: Routing | None,
    activation: str,
    products: Products,
    deferral: Deferral | None,
) -> Tensor:
    """y, with what the wanted gradients need saved in ctx."""
    need_x, need_probs = ctx.needs_input_grad[:2]
    needs = Needs(*ctx.needs_input_grad[2:6]) if deferral is None else deferral.weights.need_grad()
    x_in, x_scales = x if isinstance(x, Quantized) else (cast(x, products.dtype), None)
    fc1_weight, fc2_weight, fc1_bias, fc2_bias = weights
    starts, ends = rows.starts, rows.ends
    slot_to_row = row_index = None
    if routing is not None:
        slot_to_row, row_index = routing.slot_to_row, routing.row_to_token()
        probs = None if probs is None else _rows_of_slots(probs, routing)
    if tiles is None:
        rows_of_all = num_rows(x_in, row_index)
        tiles = tile_schedule_op(starts, ends, rows_of_all, products.dtype, products.expected_rows)
    of_products = Rows(starts, ends, tiles, row_index)
    operand = x_in if x_scales is None else Quantized(x_in, x_scales)
    h, a = products.fc1_activation(operand, fc1_weight, of_products, fc1_bias, probs, activation)
    y = products.fc2(a, fc2_weight, of_products.themselves(), fc2_bias, probs, routing is None)
    if routing is not None:
        y = unpermute_op(y, slot_to_row, row_index)

    need_dh = need_x or needs.fc1_weight or needs.fc1_bias
    need_da = need_dh or need_probs
    saved = Saved(
        x=x_in if needs.fc1_weight else None,
        x_scales=x_scales if needs.fc1_weight else None,
        h=h if need_da or needs.fc2_weight else None,
        probs=probs if need_da or needs.fc2_weight or needs.fc2_bias else None,
        fc1_weight=fc1_weight if need_x else None,
        fc2_weight=fc2_weight if need_da else None,
        fc2_bias=fc2_bias if need_probs else None,
        starts=starts,
        ends=ends,
        tiles=tiles if need_da else None,
        slot_to_row=slot_to_row if need_x or need_probs else None,
        row_index=row_index if need_da or any(needs) else None,
    )
    ctx.save_for_backward(*saved)
    ctx.needs, ctx.need_dh, ctx.need_da = needs, need_dh, need_da
    ctx.x_dtype = None if isinstance(x, Quantized) else x.dtype
    ctx.products, ctx.activation, ctx.deferral = products, activation, deferral
    ctx.weight_dtypes = tuple(None if w is None else w.dtype for w in weights)
    return y


def _rows_of_slots(probs: Tensor, routing: Routing) -> Tensor:
    """The prob of every row, (T * k,): those of slots as one column whose tokens are the slots themselves."""
    if routing.row_probs is not None:
        return routing.row_probs
    slots = routing.slot_to_row.reshape(-1, 1)
    return permute_op(probs.reshape(-1, 1), slots, routing.row_to_slot)[:, 0]


def _backward(ctx: Any, dy: Tensor, saved: Saved) -> tuple[Tensor | None, Tensor | None, list[PendingGradient]]:
    """dx, dprobs, and the wanted weight gradients as work to be done, fc2 before fc1."""
    x, x_scales, h, probs, fc1_weight, fc2_weight, fc2_bias, starts, ends, tiles, slot_to_row, row_index = saved
    if ctx.deferral is not None:  # what waits keeps no graph alive
        detached: Any = (None if t is None else t.detach() for t in (dy, x, probs))
        dy, x, probs = detached
    fc1_right = x if x_scales is None else Quantized(x, x_scales)
    needs, products, rows, dy_index = ctx.needs, ctx.products, RowRanges(starts, ends), row_index
    of_products = Rows(starts, ends, tiles)
    need_x, need_probs = ctx.needs_input_grad[:2]
    # What waits keeps dy alone, not k rows of each token.
    once = row_index is not None and needs.fc2_weight and ctx.need_da and ctx.deferral is None
    if once and (products.copies_rows or copy_pays(dy, fc2_weight)):
        dy, dy_index = gather_rows_op(dy, row_index), None
    fc2_left: Any = dy  # of fc2's weight gradient, as a is its right
    dh: Any = None  # stays None where nothing below wants it, as a does
    a: Any = None
    dx = dprobs = None
    if ctx.need_da:
        fc2_left, dh, a, dprobs = products.fc2_dgrad_activation(
            dy,
            fc2_weight,
            h,
            of_products._replace(row_index=dy_index),
            fc2_bias,
            probs,
            ctx.activation,
            Wanted(need_x, need_probs, needs.fc1_weight, needs.fc2_weight),
        )
    elif needs.fc2_weight:
        a = scaled_activation_op(h, probs, starts, ends, ctx.activation)
    if need_x:
        dx = products.fc1_dgrad(dh, fc1_weight, of_products, row_index is None)
    if slot_to_row is not None and row_index is not None:
        dx, dprobs = _of_tokens(dx, dprobs if need_probs else None, slot_to_row, row_index)
    dx = None if dx is None else cast(dx, ctx.x_dtype)
    dprobs = cast(dprobs, probs.dtype) if probs is not None and dprobs is not None and need_probs else None

    live = Weights(None, None) if ctx.deferral is None else ctx.deferral.weights  # type: ignore[arg-type]
    fc1_dtype, fc2_dtype, fc1_bias_dtype, fc2_bias_dtype = ctx.weight_dtypes
    pending = []
    if needs.fc2_weight:
        gradient = products.weight_gradient(fc2_left, a, rows, fc2_dtype, dy_index)
        pending.append(PendingGradient("fc2_weight", live.fc2_weight, gradient))
    if needs.fc2_bias:
        bias_gradient = BiasGradient(dy, probs, rows, fc2_bias_dtype, dy_index)
        pending.append(PendingGradient("fc2_bias", live.fc2_bias, bias_gradient))
    if needs.fc1_weight:
        gradient = products.weight_gradient(dh, fc1_right, rows, fc1_dtype, None, row_index)
        pending.append(PendingGradient("fc1_weight", live.fc1_weight, gradient))
    if needs.fc1_bias:
        pending.append(PendingGradient("fc1_bias", live.fc1_bias, BiasGradient(dh, None, rows, fc1_bias_dtype)))
    return dx, dprobs, pending


def _of_tokens(
    dx: Tensor | None, dprobs: Tensor | None, slot_to_row: Tensor, row_index: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """From those of rows. No gradient goes through here: which slots the rows are is not asked for."""
    if dx is not None and dprobs is not None:
        return unpermute_with_values_op(dx, dprobs, slot_to_row, row_index)
    if dx is not None:
        return unpermute_op(dx, slot_to_row, row_index), None
    if dprobs is not None:  # those of slots are rows whose tokens are the rows
        return None, permute_op(dprobs[:, None], row_index[:, None], slot_to_row.view(-1)).view(slot_to_row.shape)
    return None, None


def copy_pays(dy: Tensor, fc2_weight: Tensor) -> bool:
    """Whether one copy of dy in the experts' order is faster than to gather it twice, in fc2 dgrad and fc2 wgrad.

    On an H200 both products with the copy take 1.2 times as long at I = 256, 0.95 to 0.98 at I = 768 and 1024.
    """
    return dy.device.type == "cpu" or fc2_weight.shape[2] > GATHERED_COLUMNS


def _refuse_double_backward(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients, in a graph whose backward raises.

    `once_differentiable` would not do: where dy needs no gradient it silently drops a gradient penalty.
    """
    present = [g for g in gradients if g is not None]
    if not present:
        return gradients
    anchor = torch.empty(0, requires_grad=True)
    guarded = iter(_NoDoubleBackward.apply(anchor, *present))  # type: ignore[no-untyped-call]
    return tuple(None if g is None else next(guarded) for g in gradients)


class _NoDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            "GroupedMLP: double backward is not supported: its gradients cannot be differentiated again "
            "(create_graph=True followed by a backward through them)"
        )
