"""GroupedMLP: the experts of a Mixture-of-Experts layer as one module."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from grouped_experts.activations import get_activation
from grouped_experts.nn.deferred import WgradQueue, deliver
from grouped_experts.nn.few_tokens import apply_to_few_tokens, is_of_few_tokens
from grouped_experts.nn.fp8 import FP8Recipe, QuantizedWeights, quantize_weights, recipe_of
from grouped_experts.nn.function import Deferral, Weights, apply_experts
from grouped_experts.nn.inputs import (
    check_choices,
    check_quantized_weights,
    check_quantized_x,
    check_weights,
    compute_dtype,
    is_dtensor,
    routed_ranges,
)
from grouped_experts.nn.products import Products
from grouped_experts.ops.checks import check_expected_rows, check_float, check_row_vector, check_rows, check_shape
from grouped_experts.ops.permute import Routing
from grouped_experts.ops.quantize import Quantized
from grouped_experts.ops.schedule import scheduled_ranges
from grouped_experts.rows import Counts, RowRanges


class GroupedMLP(nn.Module):
    """y[r] = W2_e (p[r] * act(W1_e x[r] + b1_e)) + p[r] * b2_e for every row r of expert e; zero for rows of no expert.

    T rows, H hidden size, I intermediate size, E experts. Parameters: fc1_weight (E, 2I, H), whose first I rows are the
    gate and last I rows the up projection, or (E, I, H) for an activation without a gate; fc2_weight (E, H, I); with
    bias=True also fc1_bias (E, 2I) or (E, I), and fc2_bias (E, H).

    activation: "swiglu", "geglu", "clamped_swiglu" (gpt-oss) or "squared_relu" (no gate).
    precision: None for products in the dtype of x; "fp8" or an `FP8Recipe` for blockwise FP8, without biases. What is
    kept for the backward, parameters and gradients are as without it.
    defer_wgrad: the backward computes the gradients of x and probs only and queues the rest for `backward_dw()`. A
    backward that names its `inputs` queues nothing. Of DDP's options, `static_graph` and `find_unused_parameters` do
    not go with it: the first would let ranks drift apart in silence, the second raises.

    A copy (deepcopy, pickle) takes no pending gradients along, and `zero_grad` does not discard them.
    Raises ValueError for a size below 1, an unknown activation or precision, or biases in FP8, TypeError for a size
    that is no int.
    """

    fc1_bias: nn.Parameter | None
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        defer_wgrad: bool = False,
        precision: str | FP8Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts}
        for name, size in sizes.items():
            if type(size) is not int:
                raise TypeError(f"{name}: wanted an int >= 1, got {size!r}")
            if size < 1:
                raise ValueError(f"{name}: wanted an int >= 1, got {size}")
        self.hidden_size, self.intermediate_size, self.num_experts = hidden_size, intermediate_size, num_experts
        self.activation, self.defer_wgrad, self.precision = activation, defer_wgrad, recipe_of(precision)
        if bias and self.precision is not None:
            raise ValueError("bias: wanted False with a precision, got True")
        width = get_activation(activation).width(intermediate_size)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.fc1_weight = parameter(width, hidden_size)
        self.fc2_weight = parameter(hidden_size, intermediate_size)
        self.register_parameter("fc1_bias", parameter(width) if bias else None)
        self.register_parameter("fc2_bias", parameter(hidden_size) if bias else None)
        self._wgrad_queue = WgradQueue()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in +-1 / sqrt(fan-in), expert by expert what `nn.Linear` draws."""
        for weight, bias in ((self.fc1_weight, self.fc1_bias), (self.fc2_weight, self.fc2_bias)):
            bound = 1 / math.sqrt(weight.shape[2])
            weight.uniform_(-bound, bound)
            if bias is not None:
                bias.uniform_(-bound, bound)

    def forward(
        self,
        x: Tensor | Quantized,
        tokens_per_expert: Counts | RowRanges | Routing,
        probs: Tensor | None = None,
        *,
        weights: QuantizedWeights | None = None,
        expected_rows: int | None = None,
    ) -> Tensor:
        """x (T, H), its rows sorted by expert, or (E, C, H) with capacity C (masked layout) -> y, the shape of x.

        tokens_per_expert: rows of each expert, a list of int or an integer tensor (E,) on the CPU or on the device of
        x; or a RowRanges of the rows of x, (E, C, H) counted as E * C rows. Their sum may be below T: the rows behind
        belong to no expert.
        probs: (T,), or (E, C), the router prob of each row in any floating dtype; ones if not given.

        With a Routing (`grouped_experts.ops.route`), x (T, H) are tokens in any order and probs (T, k) those of their
        choices: y_t = sum_j p_tj MLP_e(x_t) over the experts e that the token chose, as `routed_experts` does it.

        With a precision, x may be in FP8 already, as dispatchers send it: a Quantized, data (T, H) and scales (T,
        ceil(H / 128)), or (E, C, ..). It gets no gradient; fc1_weight's casts by columns the numbers that it stands
        for. y is in bf16 then, in fp16 with weights of fp16, or in autocast's dtype.
        weights: of `quantize_weights`, with a precision; without, the layer's weights are cast at every call.
        expected_rows: how many rows an expert will have on average, where it is known to be less than T / E or C, as
        when decoding into a large buffer. The kernels take tiles for as many; y is right whatever comes. Not with a
        Routing, which has no other rows.

        Under autocast, computes in and returns autocast's dtype (but for fp64). Outside, in the dtype of x, to which
        weights of a wider dtype are converted; their gradients come in their own dtype.
        Raises ValueError for counts, shapes or devices and TypeError for dtypes that do not fit.
        """
        own = Weights(self.fc1_weight, self.fc2_weight, self.fc1_bias, self.fc2_bias)
        data = x.data if isinstance(x, Quantized) else x
        if isinstance(x, Quantized):
            check_quantized_x(x, self.precision)
        else:
            check_float("x", x)
        masked = data.dim() == 3 and not isinstance(tokens_per_expert, Routing)
        shape = (self.num_experts, None, self.hidden_size) if masked else (None, self.hidden_size)
        check_shape("x", data, shape, "(E, C, H)" if masked else "(T, H)")
        check_weights(own, self.activation, self.num_experts, self.hidden_size, self.intermediate_size, like=data)
        products = self._products(x, own, weights, check_expected_rows(expected_rows))
        if isinstance(tokens_per_expert, Routing):
            return self._of_tokens(x, tokens_per_expert, probs, own, products)
        return self._of_rows(x, tokens_per_expert, probs, own, products)

    def _products(
        self, x: Tensor | Quantized, own: Weights, casts: QuantizedWeights | None, expected_rows: int
    ) -> Products:
        dtype = compute_dtype(x, own)
        if self.precision is None:
            if casts is not None:
                raise ValueError("weights: wanted None without a precision, got QuantizedWeights")
            return Products(dtype, expected_rows=expected_rows)
        if casts is not None:
            check_quantized_weights(casts, own)
        if own.fc1_bias is not None or own.fc2_bias is not None:
            raise ValueError("precision: wanted None with biases, got one")
        return self.precision.products(own.fc1_weight.device, dtype, casts, expected_rows)

    def _of_tokens(
        self, x: Tensor | Quantized, routing: Routing, probs: Tensor | None, own: Weights, products: Products
    ) -> Tensor:
        if products.expected_rows:
            raise ValueError(f"expected_rows: wanted None with a Routing, got {products.expected_rows}")
        if routing.num_experts != self.num_experts:
            raise ValueError(f"routing: wanted one of {self.num_experts} experts, got one of {routing.num_experts}")
        tokens = x.data if isinstance(x, Quantized) else x
        check_choices(routing.slot_to_row, tokens, probs, "routing.slot_to_row", "probs")
        ids = routing.top_k_ids if self.precision is None else None  # in FP8 few tokens are as many
        if ids is not None and isinstance(x, Tensor) and is_of_few_tokens(x, ids, probs, own):
            return apply_to_few_tokens(x, ids, probs, own, self.activation, products.dtype)
        return self._run(x, probs, *routed_ranges(routing, products.dtype), routing, own, products)

    def _of_rows(
        self,
        x: Tensor | Quantized,
        counts: Counts | RowRanges,
        probs: Tensor | None,
        own: Weights,
        products: Products,
    ) -> Tensor:
        data = x.data if isinstance(x, Quantized) else x
        masked = data.dim() == 3
        num_rows = math.prod(data.shape[:-1])  # `Size.numel` would make a constant of a dynamic shape
        if probs is not None:
            check_float("probs", probs)
            check_shape("probs", probs, tuple(data.shape[:-1]), "(E, C)" if masked else "(T,)")
            probs = probs.flatten() if masked else probs
            check_row_vector("probs", probs, num_rows, like=data)
        rows, tiles = self._row_ranges(data, counts, num_rows, products)
        y = self._run(_flattened(x) if masked else x, probs, rows, tiles, None, own, products)
        return y.view(data.shape) if masked else y  # no view where none is needed: y may be changed in place

    def _run(
        self,
        x: Tensor | Quantized,
        probs: Tensor | None,
        rows: RowRanges,
        tiles: Tensor | None,
        routing: Routing | None,
        own: Weights,
        products: Products,
    ) -> Tensor:
        if self.defer_wgrad and torch.is_grad_enabled() and any(own.need_grad()):
            # The queue is a side effect. Not as a decorator: that loads the compiler, and Triton, at import (1 s).
            deferred = torch.compiler.disable(self._deferred) if torch.compiler.is_compiling() else self._deferred
            return deferred(x, probs, rows, tiles, routing, own, products)
        return apply_experts(x, probs, rows, tiles, routing, own, self.activation, products)

    def _deferred(
        self,
        x: Tensor | Quantized,
        probs: Tensor | None,
        rows: RowRanges,
        tiles: Tensor | None,
        routing: Routing | None,
        weights: Weights,
        products: Products,
    ) -> Tensor:
        detached = weights.detached()
        deferral = Deferral(self._wgrad_queue, weights)
        anchor = deferral.anchor(rows.starts.device)
        return apply_experts(x, probs, rows, tiles, routing, detached, self.activation, products, anchor, deferral)

    def _row_ranges(
        self, x: Tensor, counts: Counts | RowRanges, num_rows: int, products: Products
    ) -> tuple[RowRanges, Tensor | None]:
        """The ranges, and their tiles where these come from the same kernel."""
        if isinstance(counts, RowRanges):
            check_rows(counts, self.num_experts, like=x)
            return counts, None
        given = counts.shape[0] if isinstance(counts, Tensor) and counts.dim() == 1 else None
        given = len(counts) if isinstance(counts, (list, tuple)) else given
        if given is not None and given != self.num_experts:
            raise ValueError(f"tokens_per_expert: wanted {self.num_experts} counts, one an expert, got {given}")
        if isinstance(counts, Tensor) and counts.device == x.device and counts.device.type != "cpu":
            capacity = x.shape[1] if x.dim() == 3 else None
            return scheduled_ranges(counts, num_rows, capacity, products.dtype, products.expected_rows)
        if x.dim() == 3:
            return RowRanges.masked(counts, x.shape[1], device=x.device), None
        return RowRanges.contiguous(counts, num_rows=num_rows, device=x.device), None

    def quantize_weights(self, into: QuantizedWeights | None = None) -> QuantizedWeights:
        """The weights' casts, for `forward` calls that are to share them: those of one optimizer step, or of inference.

        Nothing follows a change of the weights by itself: cast anew after it, with `into` in the memory that is there,
        as CUDA graphs want it. A backward takes what they are then, so not between a forward and its backward. Between
        both orientations they hold two bytes a number.
        Raises RuntimeError without a precision, TypeError or ValueError for an `into` that is not of such weights.
        """
        if self.precision is None:
            raise RuntimeError("quantize_weights: wanted a layer with a precision, got one without")
        own = Weights(self.fc1_weight, self.fc2_weight)
        check_weights(
            own, self.activation, self.num_experts, self.hidden_size, self.intermediate_size, like=self.fc1_weight
        )
        if into is not None:
            check_quantized_weights(into, own, "into")
        made = quantize_weights(self.fc1_weight, self.fc2_weight, self.precision)
        if into is None:
            return made
        with torch.no_grad():
            for kept, new in zip(into, made, strict=True):
                kept.data.copy_(new.data)
                kept.scales.copy_(new.scales)
        return into

    @property
    def pending_wgrads(self) -> int:
        """Micro-batches whose weight gradients wait for `backward_dw()`."""
        return len(self._wgrad_queue)

    def backward_dw(self) -> None:
        """Compute the pending weight gradients and deliver each sum through autograd's accumulation into `.grad`.

        Runs on the current stream, which must have been made to wait for the backward's. Does nothing if nothing is
        pending. Where several layers share a weight, or their weights share a graph, deliver for all of them at once:
        `grouped_experts.backward_dw(model)`.
        """
        backward_dw(self)

    def discard_wgrads(self) -> None:
        """Forget the pending weight gradients, as after a step that is to be skipped."""
        self._wgrad_queue.clear()

    def extra_repr(self) -> str:
        text = f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        text += f", num_experts={self.num_experts}, activation={self.activation!r}"
        text += f", bias={self.fc1_bias is not None}"
        text += ", defer_wgrad=True" if self.defer_wgrad else ""
        return text + (f", precision={self.precision}" if self.precision is not None else "")


def _flattened(x: Tensor | Quantized) -> Tensor | Quantized:
    """(E * C, ..) of (E, C, ..)."""
    return Quantized(*(t.flatten(0, 1) for t in x)) if isinstance(x, Quantized) else x.flatten(0, 1)


def backward_dw(model: nn.Module) -> None:
    """`GroupedMLP.backward_dw` of every layer in `model`, delivered at once.

    Needed where layers share a weight (a leaf tied over two layers under DDP is ready only once) or where their weights
    are outputs of one graph, which can be walked once only.
    Raises RuntimeError if a weight became a DTensor since its forward (FSDP2 after its post-backward): the gradient
    would land on a plain copy and be lost.
    """
    layers = list(_deferred_layers(model))
    for layer in layers:
        for pending in layer._wgrad_queue.pending():
            # The registered parameter: reading the attribute would run its parametrization.
            now = layer._parameters.get(pending.name)
            if is_dtensor(now) and not is_dtensor(pending.weight):
                raise RuntimeError(
                    f"backward_dw: {pending.name} is a DTensor now but was a plain tensor in its forward: FSDP2 has "
                    "already reduced this backward's gradients. Call backward_dw before that, from a tensor hook on an "
                    "input of the layer that is registered inside the wrapped forward or in a forward pre-hook"
                )
    deliver([layer._wgrad_queue for layer in layers])


def check_no_pending_wgrads(model: nn.Module) -> None:
    """Raise RuntimeError if a layer in `model` still has weight gradients waiting, as before an optimizer step.

    To have every step checked: `optimizer.register_step_pre_hook(lambda *_: check_no_pending_wgrads(model))`.
    """
    waiting = {
        name: module.pending_wgrads
        for name, module in model.named_modules()
        if isinstance(module, GroupedMLP) and module.pending_wgrads
    }
    if waiting:
        listed = ", ".join(f"{name or 'the layer'} ({count})" for name, count in waiting.items())
        raise RuntimeError(f"weight gradients are pending, call backward_dw first; micro-batches waiting: {listed}")


def _deferred_layers(model: nn.Module) -> Iterator[GroupedMLP]:
    return (m for m in model.modules() if isinstance(m, GroupedMLP) and m.pending_wgrads)
