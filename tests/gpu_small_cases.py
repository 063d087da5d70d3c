"""Every kernel at small odd sizes, for compute-sanitizer; the results are checked, loosely.

A script, not a test (`test_gpu_execution.py` runs it without the sanitizer), and likewise with `--tool racecheck`:

    PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu_small_cases.py

Without torch's cache every tensor is an allocation of its own, so that a step across its end is seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from exact import (
    eager_k_grouped,
    eps,
    exact_k_grouped,
    exact_k_grouped_sum,
    exact_m_grouped,
    exact_route,
    exact_scaled_activation,
    exact_scaled_activation_backward,
    plain_activation,
)
from inputs import Layout, contiguous, masked, padded, randn, random_rows
from layer import by_layer, by_loop
from torch import Tensor

from grouped_experts import GroupedMLP, RowRanges, routed_experts
from grouped_experts.activations import ACTIVATIONS
from grouped_experts.ops import (
    Quantized,
    dequantize_fp4,
    fc1_activation,
    fc1_activation_fp8,
    fc2_dgrad_activation,
    fc2_dgrad_activation_fp8,
    k_grouped_gemm,
    k_grouped_gemm_accumulate,
    k_grouped_gemm_fp8,
    k_grouped_gemm_fp8_accumulate,
    k_grouped_sum,
    m_grouped_gemm,
    m_grouped_gemm_fp8,
    m_grouped_gemm_fp8_fp4,
    permute,
    quantize_blocks,
    quantize_columns,
    quantize_fp4,
    quantize_rows,
    quantize_rows_and_columns,
    scaled_activation,
    scaled_activation_backward,
    unpermute,
)
from grouped_experts.ops.reference.quantize import dequantize_blocks, dequantize_rows

BF16, FP32 = torch.bfloat16, torch.float32


def close(name: str, actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within 16 roundings to `dtype`, in the norm; finite."""
    error = float((actual.detach().cpu().double() - exact).norm())
    assert error <= 16 * eps(dtype) * float(exact.norm()), f"{name}: error {error:.3g} of {float(exact.norm()):.3g}"


def every_product(
    layout: Layout,
    rows_of: Callable[[Tensor], RowRanges],
    dtype: torch.dtype,
    hidden: int,
    inner: int,
    activation: str,
    device: str,
) -> None:
    """Each op once, on the rows of a layout that is made from counts on the device."""
    bounds, num_experts = layout.bounds, layout.num_experts
    rows = rows_of(torch.tensor([end - start for start, end in bounds], device=device))
    assert list(zip(rows.starts.tolist(), rows.ends.tolist(), strict=True)) == bounds
    owned = torch.cat([torch.arange(start, end) for start, end in bounds])
    width = inner if activation == "squared_relu" else 2 * inner

    def on_cpu(*shape: int) -> Tensor:
        return randn(*shape, dtype=dtype, device="cpu")

    x, dy, h, da = (random_rows(layout, n, dtype=dtype, device="cpu") for n in (hidden, hidden, width, inner))
    probs = random_rows(layout, 1, dtype=FP32, device="cpu")[:, 0].abs()
    w1, w2 = on_cpu(num_experts, width, hidden), on_cpu(num_experts, hidden, inner)
    b1, b2 = on_cpu(num_experts, width), on_cpu(num_experts, hidden)
    x_, dy_, h_, da_, probs_, w1_, w2_, b1_, b2_ = (t.to(device) for t in (x, dy, h, da, probs, w1, w2, b1, b2))

    y = m_grouped_gemm(x_, w1_, rows, b1_, bias_scale=probs_)
    close("m_grouped_gemm nt", y, exact_m_grouped(x, w1, bounds, b1, probs), dtype)
    y = m_grouped_gemm(dy_, w2_, rows, transpose_w=False)
    close("m_grouped_gemm nn", y, exact_m_grouped(dy, w2, bounds, transpose_w=False), dtype)

    product = exact_k_grouped(dy, da, bounds)
    close("k_grouped_gemm", k_grouped_gemm(dy_, da_, rows), product, dtype)
    c = torch.ones(num_experts, hidden, inner, device=device)
    k_grouped_gemm_accumulate(c, dy_, da_, rows)
    close("k_grouped_gemm_accumulate", c, product + 1, FP32)
    total = k_grouped_sum(dy_, rows, scale=probs_)
    close("k_grouped_sum", total, exact_k_grouped_sum(dy, bounds, probs), dtype)

    a = scaled_activation(h_, probs_, rows, activation=activation)
    close("scaled_activation", a, exact_scaled_activation(h, probs, bounds, activation), dtype)
    actual = scaled_activation_backward(da_, h_, probs_, rows, activation=activation)
    exact = exact_scaled_activation_backward(da, h, probs, bounds, activation)
    for name, result, value in zip(("dh", "a", "dprobs"), actual, exact, strict=True):
        close(f"scaled_activation_backward {name}", result, value, dtype)

    # dh, h and a of the fused products are undefined in rows of no expert.
    h_out, a_out = fc1_activation(x_, w1_, rows, probs_, b1_, activation=activation)
    close("fc1_activation h", h_out.cpu()[owned], exact_m_grouped(x, w1, bounds, b1)[owned], dtype)
    a = exact_scaled_activation(h_out.cpu(), probs, bounds, activation)
    close("fc1_activation a", a_out.cpu()[owned], a[owned], dtype)
    dh, a, dprobs = fc2_dgrad_activation(dy_, w2_, h_, rows, probs_, b2_, activation=activation)
    da = exact_m_grouped(dy, w2, bounds, transpose_w=False)
    exact_dh, exact_a, exact_dprobs = exact_scaled_activation_backward(da, h, probs, bounds, activation)
    for expert, (start, end) in enumerate(bounds):
        exact_dprobs[start:end] += dy[start:end].double() @ b2[expert].double()
    close("fc2_dgrad_activation dh", dh.cpu()[owned], exact_dh[owned], dtype)
    close("fc2_dgrad_activation a", a.cpu()[owned], exact_a[owned], dtype)
    close("fc2_dgrad_activation dprobs", dprobs, exact_dprobs, dtype)


def sums(counts: list[int], device: str) -> None:
    """k-grouped products of many rows an expert, fresh and added to fp32, which is where Gluon's kernels add."""
    layout = contiguous(counts, spare=3)
    a, b = (random_rows(layout, n, dtype=BF16, device="cpu") for n in (1032, 1048))
    rows = layout.rows(device)
    product = eager_k_grouped(a.double(), b.double(), layout.bounds)
    close("k_grouped_gemm", k_grouped_gemm(a.to(device), b.to(device), rows), product, BF16)
    c = torch.ones(product.shape, device=device)
    k_grouped_gemm_accumulate(c, a.to(device), b.to(device), rows)
    error = float((c.cpu() - product - 1).norm())
    assert error <= 2**-18 * float(product.norm()), f"k_grouped_gemm_accumulate: error {error:.3g}"


def rows_of_an_index(layout: Layout, num_source: int, hidden: int, inner: int, device: str) -> None:
    """The ops whose rows are among those of a source, at its ends too; anything stands for rows of no expert."""
    bounds, rows = layout.bounds, layout.rows(device)
    index = torch.randint(0, num_source, (layout.num_rows,), dtype=torch.int32)
    index[[start for start, end in bounds if start < end]] = torch.tensor([0, num_source - 1], dtype=torch.int32)
    index[layout.unowned()] = 2**31 - 1
    x, da = (randn(num_source, n, dtype=BF16, device="cpu") for n in (hidden, inner))
    w = randn(layout.num_experts, inner, hidden, dtype=BF16, device="cpu")
    x_, da_, w_, index_ = (t.to(device) for t in (x, da, w, index))
    x, da = (t[index.long().clamp(max=num_source - 1)] for t in (x, da))
    y = m_grouped_gemm(x_, w_, rows, row_index=index_)
    close("m_grouped_gemm of an index", y, exact_m_grouped(x, w, bounds), BF16)
    product = eager_k_grouped(x.double(), da.double(), bounds)
    c = torch.ones(product.shape, device=device)
    k_grouped_gemm_accumulate(c, x_, da_, rows, a_index=index_, b_index=index_)
    error = float((c.cpu() - product - 1).norm())
    assert error <= 2**-16 * float(product.norm()), f"k_grouped_gemm_accumulate of an index: error {error:.3g}"
    c = k_grouped_gemm(x_, da_, rows, a_index=index_, b_index=index_)
    close("k_grouped_gemm of an index", c, product, BF16)
    total = k_grouped_sum(x_, rows, row_index=index_)
    close("k_grouped_sum of an index", total, exact_k_grouped_sum(x, bounds), BF16)


def routed(tokens: int, hidden: int, inner: int, choices: int, num_experts: int, device: str) -> None:
    """A step of the routed layer, with biases; the id num_experts is nobody's, and the last expert is idle."""
    ids = torch.randint(0, num_experts, (tokens, choices))
    ids[ids == num_experts - 1] = num_experts
    shapes = ((2 * inner, hidden), (hidden, inner), (2 * inner,), (hidden,))
    weights = [0.3 * randn(num_experts, *shape, dtype=FP32, device="cpu") for shape in shapes]
    x, dy, probs = (randn(tokens, n, dtype=FP32, device="cpu") for n in (hidden, hidden, choices))
    given = [t.to(BF16) for t in (x, *weights)] + [probs]
    leaves = [t.to(device).requires_grad_() for t in given]
    y = routed_experts(leaves[0], ids.to(device), leaves[-1], *leaves[1:-1])
    actual = [y, *torch.autograd.grad(y, leaves, dy.to(device, BF16))]
    exact = [t.double().requires_grad_() for t in given]
    x, w1, w2, b1, b2, probs = exact
    total = torch.zeros_like(x)
    for e in range(num_experts):
        a = plain_activation(x @ w1[e].T + b1[e], "swiglu")
        total = total + torch.where(ids == e, probs, 0).sum(1, keepdim=True) * (a @ w2[e].T + b2[e])
    expected = [total.detach(), *torch.autograd.grad(total, exact, dy.to(BF16).double())]
    with torch.no_grad():
        alone = routed_experts(leaves[0], ids.to(device), leaves[-1], *leaves[1:-1])
    close("routed_experts without gradients", alone, expected[0], BF16)
    names = ("y", "x", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias", "probs")
    for name, result, value in zip(names, actual, expected, strict=True):
        close(f"routed_experts {name}", result, value, BF16)


def layer(
    layout: Layout,
    counts: list[int],
    hidden: int,
    inner: int,
    capacity: int,
    device: str,
    bias: bool = True,
    activation: str = "swiglu",
) -> None:
    """A step of the layer in the masked layout, and a forward of it with counts beyond the rows there are."""
    mlp = GroupedMLP(hidden, inner, layout.num_experts, activation=activation, bias=bias, dtype=BF16)
    x, dy = (random_rows(layout, hidden, dtype=BF16, device="cpu") for _ in range(2))
    probs = random_rows(layout, 1, dtype=FP32, device="cpu")[:, 0].abs()
    for t in (x, probs, *mlp.parameters()):
        t.requires_grad_()
    exact = by_loop(mlp, x, layout.bounds, probs, dy, torch.float64)
    on_device = copy.deepcopy(mlp).to(device)
    x_, probs_ = (t.detach().clone().to(device).requires_grad_() for t in (x, probs))
    rows = RowRanges.masked(torch.tensor(counts, device=device, dtype=torch.int32), capacity)
    for name, result in by_layer(on_device, x_, rows, probs_, dy.to(device)).items():
        close(f"GroupedMLP {name}", result, exact[name], BF16)

    if device == "cpu":  # where such counts are refused
        return
    with torch.no_grad():
        x = randn(layout.num_rows, hidden, dtype=BF16, device=device)
        wrong = torch.tensor([layout.num_rows - 1] * layout.num_experts, device=device)
        expected = on_device(x, [layout.num_rows - 1, 1] + [0] * (layout.num_experts - 2))
        assert torch.equal(on_device(x, wrong), expected)


def there_and_back(tokens: int, hidden: int, choices: int, num_experts: int, device: str) -> None:
    """Route, permute and unpermute with their gradients; the id num_experts is nobody's."""
    ids = torch.randint(0, num_experts + 1, (tokens, choices))
    x, probs = randn(tokens, hidden, dtype=BF16, device="cpu"), torch.rand(tokens, choices)
    x_, probs_ = (t.clone().to(device).requires_grad_() for t in (x, probs))
    permuted = permute(x_, ids.to(device), probs_, num_experts)
    out = unpermute(permuted.x, permuted.routing)
    counts, _, row_to_slot = exact_route(ids.tolist(), num_experts)
    assert permuted.counts.tolist() == counts
    slots = torch.tensor(row_to_slot)
    kept = (slots >= 0).double()
    close("permute x", permuted.x, x.double()[slots.clamp(min=0) // choices] * kept[:, None], BF16)
    close("permute probs", permuted.probs, probs.double().flatten()[slots.clamp(min=0)] * kept, FP32)
    chosen = (ids < num_experts).double()
    close("unpermute", out, x.double() * chosen.sum(1, keepdim=True), BF16)
    dx, dprobs = torch.autograd.grad(out.sum() + permuted.probs.sum(), (x_, probs_))
    close("gradient of x", dx, chosen.sum(1, keepdim=True).expand(tokens, hidden), BF16)
    close("gradient of probs", dprobs, chosen, FP32)


def in_fp8(layout: Layout, columns: int, depth: int, device: str) -> None:
    """Casts, bit for bit as the reference's on the CPU, and products of them; NaN in rows of no expert."""
    x, dy = (randn(layout.num_rows, n, dtype=BF16, device="cpu") for n in (depth, columns))
    x[layout.unowned()] = dy[layout.unowned()] = torch.nan
    w = randn(layout.num_experts, columns, depth, dtype=BF16, device="cpu")
    rows, rows_ = layout.rows("cpu"), layout.rows(device)
    x_, dy_, w_ = (t.to(device) for t in (x, dy, w))
    quantized, (of_rows, of_columns) = quantize_blocks(w_), quantize_rows_and_columns(x_, rows_)
    of_dy = quantize_columns(dy_, rows_, dtype=torch.float8_e5m2, power_of_two=True)
    owned = [row for start, end in layout.bounds for row in range(start, end)]
    numbers, weight = dequantize_rows(*quantize_rows(x)), dequantize_blocks(*quantize_blocks(w))
    assert torch.equal(dequantize_rows(*of_rows).cpu()[owned], numbers[owned])
    assert torch.equal(dequantize_rows(*quantize_rows(x_)).cpu()[owned], numbers[owned])
    assert torch.equal(dequantize_blocks(*quantized).cpu(), weight)
    assert torch.equal(dequantize_blocks(*quantize_blocks(w_, transpose=True)).cpu(), weight.mT)
    numbers[layout.unowned()] = 0
    close(
        "m_grouped_fp8",
        m_grouped_gemm_fp8(of_rows, quantized, rows_),
        exact_m_grouped(numbers, weight, layout.bounds),
        BF16,
    )
    row, exact = 0, torch.zeros(layout.num_experts, columns, depth, dtype=torch.float64)
    columns_of_x = quantize_columns(x, rows)
    columns_of_dy = quantize_columns(dy, rows, dtype=torch.float8_e5m2, power_of_two=True)
    left, right = dequantize_rows(*columns_of_dy).double(), dequantize_rows(*columns_of_x).double()
    for e, (start, end) in enumerate(layout.bounds):
        behind = row + -(-(end - start) // 128) * 128
        exact[e] = left[:, row:behind] @ right[:, row:behind].t()
        row = behind
    close("k_grouped_fp8", k_grouped_gemm_fp8(of_dy, of_columns, rows_), exact, BF16)
    again = dequantize_rows(*quantize_columns(of_rows, rows_)).cpu()
    sent = quantize_columns(Quantized(*(t.cpu() for t in of_rows)), rows)
    padded_rows = sum(-(-(end - start) // 128) * 128 for start, end in layout.bounds)
    assert torch.equal(again[:, :padded_rows], dequantize_rows(*sent)[:, :padded_rows])
    for activation, inner in (("swiglu", columns), ("swiglu", 256), ("squared_relu", columns)):
        fused_in_fp8(of_rows, layout, activation, inner, device)
    total = torch.ones(layout.num_experts, columns, depth, device=device)
    k_grouped_gemm_fp8_accumulate(total, of_dy, of_columns, rows_)
    close("k_grouped_fp8, accumulated", total, exact + 1, BF16)


def fused_in_fp8(x: Quantized, layout: Layout, activation: str, inner: int, device: str) -> None:
    """A product, the activation and the casts: the casts bit for bit as of what is made one by one."""
    rows, owned = layout.rows(device), [row for start, end in layout.bounds for row in range(start, end)]
    width, depth = ACTIVATIONS[activation].width(inner), x.data.shape[1]
    w1, w2 = (
        quantize_blocks(randn(layout.num_experts, n, depth, dtype=BF16, device=device) / depth**0.5)
        for n in (width, inner)
    )
    probs = random_rows(layout, dtype=FP32, device=device)
    h, a = fc1_activation_fp8(x, w1, rows, probs, activation=activation)
    expected = dequantize_rows(*quantize_rows(scaled_activation(h, probs, rows, activation=activation)))
    assert torch.equal(dequantize_rows(*a)[owned], expected[owned])
    by_rows, by_columns, a, dprobs = fc2_dgrad_activation_fp8(x, w2, h, rows, probs, activation=activation)
    da = m_grouped_gemm_fp8(x, w2, rows, out_dtype=BF16).float()
    backward = torch.ops.grouped_experts.scaled_activation_backward
    dh, a_again, dp = backward(da, h, probs, rows.starts, rows.ends, activation)
    assert torch.equal(dequantize_rows(*by_rows)[owned], dequantize_rows(*quantize_rows(dh))[owned])
    padded_rows = sum(-(-(end - start) // 128) * 128 for start, end in layout.bounds)
    for actual, numbers in ((by_columns, dh), (a, a_again.to(BF16))):
        expected = dequantize_rows(*quantize_columns(numbers, rows))
        assert torch.equal(dequantize_rows(*actual)[:, :padded_rows], expected[:, :padded_rows])
    close("dprobs of fc2_dgrad_activation_fp8", dprobs, dp.cpu().double(), FP32)


def in_fp4(layout: Layout, columns: int, depth: int, device: str) -> None:
    """FP4 weights, bit for bit as they are cast on the CPU, and their product; NaN in rows of no expert."""
    x = randn(layout.num_rows, depth, dtype=BF16, device="cpu")
    x[layout.unowned()] = torch.nan
    w = randn(layout.num_experts, columns, depth, dtype=BF16, device="cpu")
    quantized, weight = quantize_fp4(w.to(device)), dequantize_fp4(quantize_fp4(w))
    assert torch.equal(dequantize_fp4(quantized).cpu(), weight)
    for fp8_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        y = m_grouped_gemm_fp8_fp4(quantize_rows(x.to(device), dtype=fp8_dtype), quantized, layout.rows(device))
        numbers = dequantize_rows(*quantize_rows(x, dtype=fp8_dtype))
        numbers[layout.unowned()] = 0
        close("m_grouped_fp8_fp4", y, exact_m_grouped(numbers, weight, layout.bounds), BF16)
        assert not y[layout.unowned()].any()


def main(device: str = "cuda") -> None:
    torch.manual_seed(0)
    # Sizes that TMA does not suit, tiles of 16 rows.
    layout = contiguous([5, 0, 18, 1], spare=3)
    every_product(layout, lambda c: RowRanges.contiguous(c, num_rows=27), BF16, 33, 7, "swiglu", device)
    # Sizes that it suits, none of them a multiple of a tile, tiles of 64 rows.
    layout = padded([3, 0, 150, 9], 8, spare=5)
    rows = layout.num_rows
    every_product(layout, lambda c: RowRanges.padded(c, 8, num_rows=rows), FP32, 36, 20, "squared_relu", device)
    # Tiles of 128 rows, which are Gluon's kernels on a Hopper GPU: narrow ones and wide ones, with a gate and without.
    layer(masked([130, 0, 199], 201), [130, 0, 199], 40, 24, 201, device)
    layer(masked([130, 0, 199], 201), [130, 0, 199], 72, 40, 201, device, bias=False)
    layer(masked([130, 0, 199], 201), [130, 0, 199], 264, 136, 201, device)
    layer(masked([130, 0, 199], 201), [130, 0, 199], 264, 136, 201, device, activation="squared_relu")
    sums([2100, 0, 900], device)  # on 132 processors one expert is in two pieces, and tiles are claimed
    there_and_back(tokens=13, hidden=33, choices=3, num_experts=4, device=device)
    there_and_back(tokens=1401, hidden=8, choices=3, num_experts=70, device=device)  # more slots than one kernel sorts
    rows_of_an_index(contiguous([0, 18, 1], spare=3), 7, 33, 9, device)
    rows_of_an_index(contiguous([700, 0, 1300], spare=3), 500, 72, 40, device)  # a row in the loads of Gluon's kernels
    rows_of_an_index(contiguous([700, 0, 1300], spare=3), 5000, 72, 520, device)  # or copied before
    routed(13, 33, 7, 3, 4, device)
    routed(1, 528, 272, 3, 4, device)  # without gradients the kernels of few tokens, aligned rows and others
    routed(2, 33, 7, 2, 16, device)
    routed(403, 40, 24, 2, 5, device)
    routed(403, 264, 136, 2, 5, device)
    routed(403, 72, 520, 2, 5, device)
    in_fp8(padded([3, 0, 150, 9], 8, spare=5), 36, 20, device)
    in_fp8(contiguous([130, 0, 1], spare=3), 150, 270, device)
    in_fp8(contiguous([130, 0, 1, 300], spare=3), 136, 272, device)  # Gluon's on a Hopper GPU
    in_fp4(contiguous([5, 0, 18, 1], spare=3), 33, 96, device)  # one case for every tile
    in_fp4(contiguous([30, 0, 60], spare=3), 129, 32, device)
    in_fp4(padded([3, 0, 150, 9], 8, spare=5), 36, 160, device)
    in_fp4(contiguous([130, 0, 1, 300], spare=3), 150, 288, device)
    if device == "cuda":
        torch.cuda.synchronize()
    print("ok")


if __name__ == "__main__":
    main()
