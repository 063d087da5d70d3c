"""What is bound by memory, against a copy that moves as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_inputs import COUNTS, DEVICE, DTYPE, Shape, check, normal, path, uneven_choices
from benchmarks.records import Record, record
from benchmarks.timing import event_ms
from grouped_experts.ops import route, scaled_activation, scaled_activation_backward, unpermute
from grouped_experts.ops.permute import permute_op

COPY = "copy_ that moves as many bytes"
LIMIT = 5e-3  # one rounding to bf16


def activations(shape: Shape, rounds: int) -> list[Record]:
    """SwiGLU times the probs, forward and backward, over M rows.

    Bytes of the forward:  M (2 (2I + I) + 4)             h read, a written; a prob read
    Bytes of the backward: M (2 (I + 2I + 2I + I) + 8)    da and h read, dh and a written; a prob read, dprobs written
    """
    rows, width = shape["M"], shape["I"]
    h, da = normal(rows, 2 * width), normal(rows, width)
    probs = torch.rand(rows, device=DEVICE)
    check("activation", [scaled_activation(h, probs)], [_exact_activation(h, probs)], LIMIT)
    check("activation_backward", scaled_activation_backward(da, h, probs), _exact_backward(da, h, probs), LIMIT)
    forward, backward = rows * (2 * 3 * width + 4), rows * (2 * 6 * width + 8)
    return [
        beside_copy("activation", None, shape, "all rows", lambda: scaled_activation(h, probs), forward, rounds),
        beside_copy(
            "activation",
            "backward",
            shape,
            "all rows",
            lambda: scaled_activation_backward(da, h, probs),
            backward,
            rounds,
        ),
    ]


def permutations(shape: Shape, rounds: int) -> list[Record]:
    """The rows of T tokens to those of their k experts and back; where they go (`route`) is known.

    Bytes of both: 2 H (T + T k): permute reads each of T rows once, though k rows are made of it, and writes T k;
    unpermute reads T k rows and writes T. The indices, 4 bytes a row, are not counted.
    """
    tokens, hidden, top_k = shape["T"], shape["H"], shape["top_k"]
    routing = route(uneven_choices(tokens, shape["E"], top_k), shape["E"])
    x, y = normal(tokens, hidden), normal(tokens * top_k, hidden)

    def permuted() -> Tensor:
        return permute_op(x, routing.slot_to_row, routing.row_to_slot)

    check("permute", [permuted()], [x.index_select(0, routing.row_to_slot // top_k)], limit=0)
    summed = y.index_select(0, routing.slot_to_row.flatten()).view(tokens, top_k, hidden).float().sum(1)
    check("unpermute", [unpermute(y, routing)], [summed], LIMIT)
    del summed
    num_bytes = 2 * hidden * (tokens + tokens * top_k)
    return [
        beside_copy("permute", None, shape, COUNTS, permuted, num_bytes, rounds),
        beside_copy("permute", "unpermute", shape, COUNTS, lambda: unpermute(y, routing), num_bytes, rounds),
    ]


def beside_copy(
    op: str,
    variant: str | None,
    shape: Shape,
    counts: str,
    run: Callable[[], object],
    num_bytes: int,
    rounds: int,
    dtype: str = DTYPE,
    family: str | None = None,
) -> Record:
    """family: the kernels that run, if those are not the ones for `DTYPE`."""
    source = normal(num_bytes // 4)  # of 2 bytes each: half of the bytes are read, half are written
    target = torch.empty_like(source)
    times = event_ms(run, lambda: target.copy_(source), rounds)
    made = record(op, shape, counts, dtype, family or path(), COPY, times, num_bytes=num_bytes, variant=variant)
    print(f"{op} {variant or '':10} {made.tbps:5.2f} TB/s  {made.ratio:5.2f}x a copy", flush=True)
    return made


def _exact_activation(h: Tensor, probs: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, dim=-1)
    return F.silu(gate) * up * probs[:, None]


def _exact_backward(da: Tensor, h: Tensor, probs: Tensor) -> Sequence[Tensor]:
    """dh, a and dprobs by autograd, in fp32."""
    h, probs = h.float().requires_grad_(), probs.clone().requires_grad_()
    a = _exact_activation(h, probs)
    dh, dprobs = torch.autograd.grad(a, (h, probs), da.float())
    return dh, a.detach(), dprobs
