"""Weight gradients as work that can wait: the queue behind `backward_dw`.

The backward of a deferred layer puts here what its weight gradients are made of. `backward_dw` runs the products later
and delivers each sum through autograd's own accumulation, so that `.grad`, hooks, DDP's reducer, tied weights and
weights that are outputs of other operations see exactly what a plain backward would have shown them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grouped_experts.ops.k_grouped import k_grouped_gemm_accumulate_op, k_grouped_gemm_op, k_grouped_sum_op
from grouped_experts.rows import RowRanges


@dataclass(frozen=True, slots=True, eq=False)
class WeightGradient:
    """dW_e = left_r^T right_r, in `dtype`."""

    left: Tensor
    right: Tensor
    rows: RowRanges
    dtype: torch.dtype

    def compute(self) -> Tensor:
        return k_grouped_gemm_op(self.left, self.right, self.rows.starts, self.rows.ends, self.dtype)

    def accumulate(self, total: Tensor) -> None:
        k_grouped_gemm_accumulate_op(total, self.left, self.right, self.rows.starts, self.rows.ends)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.left, self.right, self.rows.starts, self.rows.ends


@dataclass(frozen=True, slots=True, eq=False)
class BiasGradient:
    """db_e = sum of scale_r * left_r, in `dtype`; scale None means ones."""

    left: Tensor
    scale: Tensor | None
    rows: RowRanges
    dtype: torch.dtype

    def compute(self) -> Tensor:
        return k_grouped_sum_op(self.left, self.rows.starts, self.rows.ends, self.scale, self.dtype)

    def accumulate(self, total: Tensor) -> None:
        total += self.compute()

    def tensors(self) -> tuple[Tensor, ...]:
        scale = () if self.scale is None else (self.scale,)
        return self.left, *scale, self.rows.starts, self.rows.ends


class PendingGradient:
    """One gradient of one micro-batch, and the live weight that is to receive it (None where it is returned now)."""

    __slots__ = ("gradient", "name", "versions", "weight")

    def __init__(self, name: str, weight: Tensor | None, gradient: WeightGradient | BiasGradient) -> None:
        self.name, self.weight, self.gradient = name, weight, gradient
        self.versions: tuple[int, ...] = ()

    def note_versions(self) -> None:
        self.versions = tuple(tensor._version for tensor in self.gradient.tensors())

    def check_versions(self) -> None:
        """What autograd checks of saved tensors, for tensors that wait here."""
        if self.versions != tuple(tensor._version for tensor in self.gradient.tensors()):
            raise RuntimeError(
                f"backward_dw: a tensor that the pending gradient of {self.name} is made of (x, the gradient of the "
                "output, or a range) was modified in place after the backward"
            )


class WgradQueue:
    """The micro-batches of one layer whose weight gradients are pending, oldest first."""

    def __init__(self) -> None:
        self.micro_batches: list[list[PendingGradient]] = []
        self._streams: set[torch.cuda.Stream] = set()

    def put(self, gradients: list[PendingGradient]) -> None:
        """Called by the backward; a micro-batch that wants no gradient leaves nothing."""
        if gradients:
            for pending in gradients:
                pending.note_versions()
            self.micro_batches.append(gradients)
            device = gradients[0].gradient.left.device
            if device.type == "cuda":
                self._streams.add(torch.cuda.current_stream(device))

    def clear(self) -> None:
        self.micro_batches.clear()
        self._streams.clear()

    def keep_alive_on_current_stream(self) -> None:
        """Tell the allocator where queued memory is used, if that is not the stream it came from."""
        for pending in self.pending():
            for tensor in pending.gradient.tensors():
                if tensor.device.type == "cuda":
                    stream = torch.cuda.current_stream(tensor.device)
                    if self._streams != {stream}:
                        tensor.record_stream(stream)

    def pending(self) -> list[PendingGradient]:
        return [pending for micro_batch in self.micro_batches for pending in micro_batch]

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __deepcopy__(self, memo: dict[int, Any]) -> WgradQueue:
        return WgradQueue()  # pending work belongs to one layer only

    def __reduce__(self) -> tuple[type[WgradQueue], tuple[()]]:
        return WgradQueue, ()


def deliver(queues: Iterable[WgradQueue]) -> None:
    """Compute all that is pending, fc2 before fc1, one sum per live weight, and hand the sums to autograd at once.

    The queues are emptied once every sum stands and before any hook runs: a failing product loses nothing, and a hook
    may use the layers again.
    """
    queues = [queue for queue in queues if len(queue)]
    pending = [p for queue in queues for p in queue.pending()]
    pending.sort(key=lambda p: p.name.startswith("fc1"))  # stable
    with torch.no_grad():
        for queue in queues:
            queue.keep_alive_on_current_stream()
        weights: list[Tensor] = []
        sums: dict[int, Tensor] = {}
        for p in pending:
            if p.weight is None or not p.weight.requires_grad:  # frozen since its forward
                continue
            p.check_versions()
            if id(p.weight) in sums:
                p.gradient.accumulate(sums[id(p.weight)])
            else:
                weights.append(p.weight)
                sums[id(p.weight)] = p.gradient.compute()
    for queue in queues:
        queue.clear()
    box = [list(sums.values())]
    del sums, pending
    if weights:
        with torch.enable_grad():
            root = _Deliver.apply(box, *weights)  # type: ignore[no-untyped-call]
        torch.autograd.backward(root, torch.empty_like(root))


class _Deliver(torch.autograd.Function):
    """A root over the live weights whose backward returns the sums.

    The box holds the only reference to them, so that AccumulateGrad can keep each buffer as `.grad`;
    `torch.autograd.backward(weights, sums)` would clone every one.
    """

    @staticmethod
    def forward(ctx: Any, box: list[list[Tensor]], *weights: Tensor) -> Tensor:
        ctx.box = box
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.box.pop()
