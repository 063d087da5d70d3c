"""From tokens with top-k expert ids to rows sorted by expert, and back. Both are deterministic, without atomics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouped_experts.ops import reference
from grouped_experts.ops.checks import check_device, check_float, check_ids, check_shape, check_values_of_ids
from grouped_experts.ops.families import by_family
from grouped_experts.ops.schedule import unscheduled_ranges, unwritten_schedule
from grouped_experts.registration import define_gradient, define_op, refuse_gradient
from grouped_experts.rows import RowRanges


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where every (token, choice) slot went. T tokens, k choices a token, E experts, all int32.

    counts (E,): rows of each expert. slot_to_row (T, k): the row of a slot, -1 for an id that is no expert.
    row_to_slot (T * k,): the slot t * k + j of a row, -1 behind the last expert's rows.
    What a layer goes on with may be known as well: tokens, what `row_to_token` returns; the rows of the experts, and
    their tiles for kernels; the ids themselves, not to be changed before the layer has run; and row_probs (T * k,).
    """

    counts: Tensor
    slot_to_row: Tensor
    row_to_slot: Tensor
    tokens: Tensor | None = None
    rows: RowRanges | None = None
    tiles: Tensor | None = None
    top_k_ids: Tensor | None = None
    row_probs: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.counts.shape[0]

    def row_to_token(self) -> Tensor:
        """(T * k,) int32: the token of a row, -1 behind the last expert's rows."""
        if self.tokens is not None:
            return self.tokens
        return torch.div(self.row_to_slot, max(1, self.slot_to_row.shape[1]), rounding_mode="floor")


@dataclass(frozen=True, slots=True, eq=False)
class Permuted:
    """Rows sorted by expert: x (T * k, H), their probs (T * k,) and how to come back."""

    x: Tensor
    probs: Tensor
    routing: Routing

    @property
    def counts(self) -> Tensor:
        return self.routing.counts


def route(top_k_ids: Tensor, num_experts: int) -> Routing:
    """Sort the slots of top_k_ids by expert, those of one expert in the order of their tokens.

    top_k_ids (T, k) int32 | int64, any strides. An id equal to num_experts marks a choice that is not computed here
    ("not on this rank"): it gets no row. Ids outside 0..num_experts raise ValueError where they are on the CPU; on a
    device, where they are not read, they count as such a mark. Raises TypeError for another dtype, ValueError for
    another dimension or num_experts < 1.
    """
    check_ids(top_k_ids, num_experts)
    counts, slot_to_row, row_to_slot = route_op(top_k_ids, num_experts)
    return Routing(counts, slot_to_row, row_to_slot, top_k_ids=top_k_ids)


def route_rows(top_k_ids: Tensor, num_experts: int, dtype: torch.dtype, top_k_probs: Tensor | None = None) -> Routing:
    """`route`, with all that a layer goes on with, for products in `dtype`: on a GPU in one kernel for few slots.

    top_k_probs (T, k), if given, become the rows' probs; no gradient goes that way.
    """
    check_ids(top_k_ids, num_experts)
    probs = None if top_k_probs is None else top_k_probs.detach()
    counts, slot_to_row, row_to_slot, tokens, row_probs, starts, ends, tiles = route_rows_op(
        top_k_ids, num_experts, dtype, probs
    )
    return Routing(
        counts,
        slot_to_row,
        row_to_slot,
        tokens,
        RowRanges(starts, ends),
        None if dtype == torch.float64 else tiles,  # for which there are no kernels
        top_k_ids,
        None if probs is None else row_probs,
    )


def permute(x: Tensor, top_k_ids: Tensor, top_k_probs: Tensor, num_experts: int) -> Permuted:
    """rows[r] = x[t] and row_probs[r] = top_k_probs[t, j] for the slot (t, j) that `route` puts in row r.

    x (T, H) and top_k_probs (T, k) in any floating dtype, top_k_ids (T, k) as in `route`. Rows behind the last
    expert's (there are as many as ids equal to num_experts) are zero. Differentiable in x and top_k_probs.
    Raises ValueError for a shape, id or device, TypeError for a dtype that does not fit.
    """
    check_float("x", x)
    check_shape("x", x, (None, None), "(T, H)")
    check_float("top_k_probs", top_k_probs)
    check_device("top_k_probs", top_k_probs, like=x)
    routing = route(top_k_ids, num_experts)
    check_shape("top_k_ids", top_k_ids, (x.shape[0], None), "(T, k)")
    check_device("top_k_ids", top_k_ids, like=x)
    check_shape("top_k_probs", top_k_probs, tuple(top_k_ids.shape), "(T, k)")
    rows = permute_op(x, routing.slot_to_row, routing.row_to_slot)
    # The probs are one column whose tokens are the slots themselves.
    slots = routing.slot_to_row.reshape(-1, 1)
    row_probs = permute_op(top_k_probs.reshape(-1, 1), slots, routing.row_to_slot)[:, 0]
    return Permuted(rows, row_probs, routing)


def unpermute(y: Tensor, routing: Routing) -> Tensor:
    """out[t] = sum over j of y[row of slot (t, j)], in fp32 with j ascending, rounded once.

    y (T * k, H), not scaled here: the experts' rows already carry the router prob. routing: what `route` or `permute`
    made. Returns (T, H) in the dtype of y.
    Differentiable in y. Raises ValueError for a shape or device, TypeError for a dtype that does not fit.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"routing: wanted a Routing, got {type(routing).__name__}")
    check_float("y", y)
    check_shape("y", y, (routing.row_to_slot.shape[0], None), "(T * k, H)")
    check_device("y", y, like=routing.row_to_slot)
    return unpermute_op(y, routing.slot_to_row, routing.row_to_slot)


def _with_ids_checked(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def checked(top_k_ids: Tensor, num_experts: int, *rest: Any) -> Any:
        check_values_of_ids(top_k_ids, num_experts)
        return call(top_k_ids, num_experts, *rest)

    return checked


def _reference_route_rows(
    top_k_ids: Tensor, num_experts: int, dtype: torch.dtype, top_k_probs: Tensor | None
) -> tuple[Tensor, ...]:
    counts, slot_to_row, row_to_slot = reference.route(top_k_ids, num_experts)
    tokens = Routing(counts, slot_to_row, row_to_slot).row_to_token()
    row_probs = tokens.new_empty(0)
    if top_k_probs is not None:
        row_probs = reference.permute(top_k_probs.reshape(-1, 1), slot_to_row.view(-1, 1), row_to_slot)[:, 0]
    ranges = unscheduled_ranges(counts, 0, row_to_slot.shape[0], dtype)
    return counts, slot_to_row, row_to_slot, tokens, row_probs, *ranges


def _fake_route(top_k_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, choices = top_k_ids.shape
    return (
        top_k_ids.new_empty(num_experts, dtype=torch.int32),
        top_k_ids.new_empty(num_tokens, choices, dtype=torch.int32),
        top_k_ids.new_empty(num_tokens * choices, dtype=torch.int32),
    )


def _fake_route_rows(
    top_k_ids: Tensor, num_experts: int, dtype: torch.dtype, top_k_probs: Tensor | None
) -> tuple[Tensor, ...]:
    counts, slot_to_row, row_to_slot = _fake_route(top_k_ids, num_experts)
    num_rows = row_to_slot.shape[0]
    starts, ends, tokens = torch.empty_like(counts), torch.empty_like(counts), torch.empty_like(row_to_slot)
    row_probs = tokens.new_empty(0) if top_k_probs is None else top_k_probs.new_empty(num_rows)
    tiles = unwritten_schedule(starts, ends, num_rows, dtype)
    return counts, slot_to_row, row_to_slot, tokens, row_probs, starts, ends, tiles


route_op = define_op(
    "route(Tensor top_k_ids, SymInt num_experts) -> (Tensor, Tensor, Tensor)",
    implementation=_with_ids_checked(by_family("route")),
    fake=_fake_route,
)
route_rows_op = define_op(
    "route_rows(Tensor top_k_ids, SymInt num_experts, ScalarType dtype, Tensor? top_k_probs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    implementation=_with_ids_checked(by_family("route_rows", reference=_reference_route_rows, operands=0)),
    fake=_fake_route_rows,
)
permute_op = define_op(
    "permute(Tensor x, Tensor slot_to_row, Tensor row_to_slot) -> Tensor",
    implementation=by_family("permute"),
    fake=lambda x, slot_to_row, row_to_slot: x.new_empty(row_to_slot.shape[0], x.shape[1]),
)
unpermute_op = define_op(
    "unpermute(Tensor y, Tensor slot_to_row, Tensor row_to_slot) -> Tensor",
    implementation=by_family("unpermute"),
    fake=lambda y, slot_to_row, row_to_slot: y.new_empty(slot_to_row.shape[0], y.shape[1]),
)
# `unpermute` together with numbers that rows have: those of the slots, (T, k), zero for a slot without a row.
unpermute_with_values_op = define_op(
    "unpermute_with_values(Tensor y, Tensor row_values, Tensor slot_to_row, Tensor row_to_slot) -> (Tensor, Tensor)",
    implementation=by_family("unpermute_with_values"),
    fake=lambda y, row_values, slot_to_row, row_to_slot: (
        y.new_empty(slot_to_row.shape[0], y.shape[1]),
        row_values.new_empty(slot_to_row.shape),
    ),
)
refuse_gradient(unpermute_with_values_op)
# Row r is x[row_index[r]]; what an index that is no row of x makes is undefined.
gather_rows_op = define_op(
    "gather_rows(Tensor x, Tensor row_index) -> Tensor",
    implementation=by_family("gather_rows"),
    fake=lambda x, row_index: x.new_empty(row_index.shape[0], x.shape[1]),
)
refuse_gradient(gather_rows_op)


def _save_routing(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


# Each is the other's adjoint.
define_gradient(permute_op, lambda ctx, dy: (unpermute_op(dy, *ctx.saved_tensors), None, None), _save_routing)
define_gradient(unpermute_op, lambda ctx, dx: (permute_op(dx, *ctx.saved_tensors), None, None), _save_routing)
