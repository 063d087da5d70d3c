"""Weight gradients as work that can wait: the queue behind `backward_dw`.

The backward of a deferred layer puts here what its weight gradients are made of. `backward_dw` runs the products later
and delivers each sum through autograd's own accumulation, so that `.grad`, hooks, DDP's reducer, tied weights and
weights that are outputs of other operations see exactly what a plain backward would have shown them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from grouped_experts.ops.k_grouped import k_grouped_gemm_accumulate_op, k_grouped_gemm_op, k_grouped_sum_op
from grouped_experts.rows import RowRanges


class Gradient(Protocol):
    """The gradient of one weight as work to be done, and what it is made of."""

    @property
    def rows(self) -> RowRanges: ...

    def compute(self) -> Tensor: ...

    def accumulate(self, total: Tensor) -> None: ...

    def tensors(self) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class WeightGradient:
    """dW_e = left_r^T right_r, in `dtype`. With an index, row r of an operand is its row index[r]."""

    left: Tensor
    right: Tensor
    rows: RowRanges
    dtype: torch.dtype
    left_index: Tensor | None = None
    right_index: Tensor | None = None

    def compute(self) -> Tensor:
        starts, ends = self.rows.starts, self.rows.ends
        return k_grouped_gemm_op(
            self.left, self.right, starts, ends, self.dtype, self.left_index, self.right_index
        )  # fmt: skip

    def accumulate(self, total: Tensor) -> None:
        starts, ends = self.rows.starts, self.rows.ends
        k_grouped_gemm_accumulate_op(total, self.left, self.right, starts, ends, self.left_index, self.right_index)

    def tensors(self) -> tuple[Tensor, ...]:
        return _present(self.left, self.right, self.rows.starts, self.rows.ends, self.left_index, self.right_index)


@dataclass(frozen=True, slots=True, eq=False)
class BiasGradient:
    """db_e = sum of scale_r * left_r, in `dtype`; scale None means ones, left_index as in `WeightGradient`."""

    left: Tensor
    scale: Tensor | None
    rows: RowRanges
    dtype: torch.dtype
    left_index: Tensor | None = None

    def compute(self) -> Tensor:
        return self._sum(self.dtype)

    def accumulate(self, total: Tensor) -> None:
        total += self._sum(torch.promote_types(torch.float32, self.dtype))  # rounded once, with the sum

    def _sum(self, dtype: torch.dtype) -> Tensor:
        return k_grouped_sum_op(self.left, self.rows.starts, self.rows.ends, self.scale, dtype, self.left_index)

    def tensors(self) -> tuple[Tensor, ...]:
        return _present(self.left, self.rows.starts, self.rows.ends, self.scale, self.left_index)


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t is not None)


class PendingGradient:
    """One gradient of one micro-batch, and the live weight that waits for it; None where it is returned at once."""

    __slots__ = ("gradient", "name", "stream", "versions", "weight")

    def __init__(self, name: str, weight: Tensor | None, gradient: Gradient) -> None:
        self.name, self.weight, self.gradient = name, weight, gradient
        self.versions: tuple[int, ...] = ()
        self.stream: torch.cuda.Stream | None = None

    def note_origin(self) -> None:
        """Called where the gradient begins to wait: what it is made of, and on which stream."""
        self.versions = tuple(tensor._version for tensor in self.gradient.tensors())
        device = self.gradient.rows.starts.device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def check_versions(self) -> None:
        """What autograd checks of saved tensors, for tensors that wait here."""
        if self.versions != tuple(tensor._version for tensor in self.gradient.tensors()):
            raise RuntimeError(
                f"backward_dw: a tensor that the pending gradient of {self.name} is made of (x, the gradient of the "
                "output, probs, a range or a routing) was modified in place after the backward"
            )

    def keep_alive_on_current_stream(self) -> None:
        """Tell the allocator where the operands are read, if that is not the stream they come from."""
        if self.stream is None:
            return
        stream = torch.cuda.current_stream(self.stream.device)
        if stream != self.stream:
            for tensor in self.gradient.tensors():
                tensor.record_stream(stream)


class WgradQueue:
    """The micro-batches of one layer whose weight gradients are pending, oldest first."""

    def __init__(self) -> None:
        self.micro_batches: list[list[PendingGradient]] = []
        self._lock = threading.Lock()  # autograd's threads put while another takes

    def put(self, gradients: list[PendingGradient]) -> None:
        """Called by the backward; a micro-batch that wants no gradient leaves nothing."""
        if gradients:
            with self._lock:
                self.micro_batches.append(gradients)

    def take(self) -> list[list[PendingGradient]]:
        with self._lock:
            taken, self.micro_batches = self.micro_batches, []
        return taken

    def put_back(self, taken: list[list[PendingGradient]]) -> None:
        with self._lock:
            self.micro_batches = taken + self.micro_batches

    def clear(self) -> None:
        self.take()

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

    What is pending leaves its queue first, so that other threads and hooks may queue more; if a product fails, it goes
    back.
    """
    taken = [(queue, queue.take()) for queue in queues]
    try:
        weights, sums = _sums([pending for _, batches in taken for batch in batches for pending in batch])
    except BaseException:
        for queue, batches in taken:
            queue.put_back(batches)
        raise
    del taken  # the operands are done with
    if weights:
        box = [sums]
        del sums
        with torch.enable_grad():
            root = _Deliver.apply(box, *weights)  # type: ignore[no-untyped-call]
        torch.autograd.backward(root, torch.empty_like(root))


@torch.no_grad()
def _sums(pending: list[PendingGradient]) -> tuple[list[Tensor], list[Tensor]]:
    """The live weights that still require a gradient, and the sum for each."""
    weights: list[Tensor] = []
    sums: dict[int, Tensor] = {}
    for p in sorted(pending, key=lambda p: p.name.startswith("fc1")):  # stable
        if p.weight is None or not p.weight.requires_grad:  # frozen since its forward
            continue
        p.check_versions()
        p.keep_alive_on_current_stream()
        if id(p.weight) in sums:
            p.gradient.accumulate(sums[id(p.weight)])
        else:
            weights.append(p.weight)
            sums[id(p.weight)] = p.gradient.compute()
    return weights, list(sums.values())


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
