"""m_grouped_gemm: values, gradients, refusals, registration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import needs_cuda
from exact import (
    assert_as_accurate_as_eager,
    assert_rounded_once,
    eager_k_grouped,
    eager_k_grouped_sum,
    eager_m_grouped,
    exact_k_grouped,
    exact_k_grouped_sum,
    exact_m_grouped,
)
from hypothesis import given
from hypothesis import strategies as st
from inputs import (
    DTYPES,
    EXPANDED,
    LAYOUTS,
    SIZES,
    STRIDES,
    Layout,
    contiguous,
    dtypes,
    layouts,
    masked,
    poison_unowned,
    randn,
    random_rows,
    seeds,
    sizes,
    strides,
    unchanged,
)
from torch import Tensor

from grouped_experts import RowRanges
from grouped_experts.ops import m_grouped_gemm

UNEVEN = contiguous([17, 1, 33, 0, 2], spare=3)


def weight(layout: Layout, k: int, n: int, transpose_w: bool, dtype: torch.dtype, device: str) -> Tensor:
    return randn(layout.num_experts, *((n, k) if transpose_w else (k, n)), dtype=dtype, device=device)


def check(
    x: Tensor,
    w: Tensor,
    layout: Layout,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    transpose_w: bool = True,
) -> Tensor:
    """The op against the fp64 loop, its contract of memory and dtype, and what it leaves alone."""
    rows = layout.rows(x.device.type)
    with unchanged(x, w, bias, scale, rows.starts, rows.ends):
        y = m_grouped_gemm(x, w, rows, bias, bias_scale=scale, transpose_w=transpose_w)
    arguments = layout.bounds, bias, scale, transpose_w
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    exact = exact_m_grouped(x, w, *arguments)
    magnitudes = (None if t is None else t.double().abs() for t in (bias, scale))
    magnitude = eager_m_grouped(x.double().abs(), w.double().abs(), layout.bounds, *magnitudes, transpose_w)
    assert_rounded_once(y, exact, magnitude, terms=x.shape[1] + 1)
    assert_as_accurate_as_eager(y, eager_m_grouped(x, w, *arguments), exact)
    assert not y[layout.unowned()].any()
    return y


# ---- values


@pytest.mark.parametrize("transpose_w", [True, False], ids=["nt", "nn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout: Layout, dtype: torch.dtype, transpose_w: bool, device: str) -> None:
    x = random_rows(layout, 40, dtype=dtype, device=device)
    w = weight(layout, 40, 24, transpose_w, dtype, device)
    scale = random_rows(layout, dtype=torch.float32, device=device)
    check(x, w, layout, transpose_w=transpose_w)
    check(x, w, layout, randn(layout.num_experts, 24, dtype=dtype, device=device), scale, transpose_w)


@pytest.mark.parametrize("transpose_w", [True, False], ids=["nt", "nn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_sizes(k: int, n: int, dtype: torch.dtype, transpose_w: bool, device: str) -> None:
    x = random_rows(UNEVEN, k, dtype=dtype, device=device)
    bias = randn(UNEVEN.num_experts, n, dtype=dtype, device=device)
    check(x, weight(UNEVEN, k, n, transpose_w, dtype, device), UNEVEN, bias, transpose_w=transpose_w)


@pytest.mark.parametrize("transpose_w", [True, False], ids=["nt", "nn"])
@pytest.mark.parametrize("w_strides", STRIDES)
@pytest.mark.parametrize("x_strides", STRIDES)
def test_strides(x_strides: str, w_strides: str, transpose_w: bool, device: str) -> None:
    for layout in (UNEVEN, masked([4, 4, 4], 6)):
        x = STRIDES[x_strides](random_rows(layout, 60, dtype=torch.bfloat16, device=device))
        w = STRIDES[w_strides](weight(layout, 60, 9, transpose_w, torch.bfloat16, device))
        check(x, w, layout, transpose_w=transpose_w)


@pytest.mark.parametrize("how", EXPANDED)
def test_expanded(how: str, device: str) -> None:
    for layout in (contiguous([3, 0, 5], spare=2), masked([4, 4], 6)):
        x = EXPANDED[how](randn(layout.num_rows, 6, dtype=torch.float32, device=device))
        w = EXPANDED[how](weight(layout, 6, 9, True, torch.float32, device))
        check(x, w, layout)
        one_weight_for_all = weight(layout, 6, 9, True, torch.float32, device)[:1].expand(layout.num_experts, 9, 6)
        check(x, one_weight_for_all, layout)


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_scale_in_every_dtype(dtype: torch.dtype, scale_dtype: torch.dtype, device: str) -> None:
    layout = LAYOUTS["m-indices-with-idle"]
    x, w = random_rows(layout, 5, dtype=dtype, device=device), weight(layout, 5, 3, True, dtype, device)
    bias = randn(layout.num_experts, 3, dtype=dtype, device=device)
    scale = random_rows(layout, dtype=scale_dtype, device=device)
    check(x, w, layout, bias, scale)
    check(x, w, layout, STRIDES["transposed"](bias), scale[1:2].expand(layout.num_rows))


def test_bias_scale_is_not_rounded_to_the_dtype_of_x(device: str) -> None:
    """1 + 2^-12 times 4096 is 4097, next to 4096 - 1: in bf16 the scale would be 1 and the sum 0."""
    rows = RowRanges.contiguous([2], device=device)
    x = torch.full((2, 1), -4096.0, dtype=torch.bfloat16, device=device)
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device)
    bias = torch.full((1, 1), 4096.0, dtype=torch.bfloat16, device=device)
    scale = torch.full((2,), 1 + 2**-12, dtype=torch.float32, device=device)
    assert m_grouped_gemm(x, one, rows, bias, bias_scale=scale).tolist() == [[1.0], [1.0]]


def test_every_row_meets_its_own_expert(device: str) -> None:
    """Expert e's weight is e + 1 throughout: a row of a neighbour's tile would show."""
    counts = [17, 1, 33, 0, 2]
    w = torch.arange(1.0, 6.0, device=device)[:, None, None].expand(5, 12, 8) / 8
    y = m_grouped_gemm(torch.ones(53, 8, device=device), w, RowRanges.contiguous(counts, device=device))
    assert y[:, 0].tolist() == [e + 1.0 for e, count in enumerate(counts) for _ in range(count)]
    assert torch.equal(y, y[:, :1].expand(53, 12))


def test_many_small_experts(device: str) -> None:
    layout = contiguous([1 + e % 15 for e in range(64)])
    x, w = (randn(*shape, dtype=torch.bfloat16, device=device) for shape in ((layout.num_rows, 16), (64, 8, 16)))
    check(x, w, layout)


@pytest.mark.parametrize("transpose_w", [True, False], ids=["nt", "nn"])
def test_empty_sizes(transpose_w: bool, device: str) -> None:
    for layout in (contiguous([]), contiguous([], spare=3), contiguous([0], spare=2), contiguous([0, 0, 0])):
        x = random_rows(layout, 4, dtype=torch.float16, device=device)
        check(x, weight(layout, 4, 3, transpose_w, torch.float16, device), layout, transpose_w=transpose_w)
    layout = contiguous([2, 0, 1], spare=1)
    bias = randn(3, 4, dtype=torch.float32, device=device)
    no_columns = random_rows(layout, 0, dtype=torch.float32, device=device)
    y = check(no_columns, weight(layout, 0, 4, transpose_w, torch.float32, device), layout, bias, None, transpose_w)
    assert torch.equal(y, torch.stack([bias[0], bias[0], bias[2], torch.zeros_like(bias[0])]))
    x = random_rows(layout, 4, dtype=torch.float32, device=device)
    check(x, weight(layout, 4, 0, transpose_w, torch.float32, device), layout, transpose_w=transpose_w)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_identical_from_run_to_run(dtype: torch.dtype, device: str) -> None:
    x, w = random_rows(UNEVEN, 65, dtype=dtype, device=device), weight(UNEVEN, 65, 33, True, dtype, device)
    rows = UNEVEN.rows(device)
    first = m_grouped_gemm(x, w, rows)
    assert all(torch.equal(m_grouped_gemm(x, w, rows), first) for _ in range(5))


def test_fp32_is_true_fp32(device: str) -> None:
    """Unless the TF32 switch says otherwise, whose products err by 2^-11."""
    layout = contiguous([70, 0, 58])
    x = randn(128, 256, dtype=torch.float32, device=device)
    w = randn(3, 256, 256, dtype=torch.float32, device=device) / 16
    y = m_grouped_gemm(x, w, layout.rows(device))
    exact = exact_m_grouped(x, w, layout.bounds)
    assert (y.double() - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("enabled", [True, False], ids=["inside", "outside"])
def test_autocast_leaves_the_dtype_alone(enabled: bool, device: str) -> None:
    layout = contiguous([5, 3], spare=1)
    x = random_rows(layout, 9, dtype=torch.float32, device=device)
    w = weight(layout, 9, 4, True, torch.float32, device)
    bias, scale = (randn(*shape, dtype=torch.float32, device=device) for shape in ((2, 4), (9,)))
    for tensor in (x, w, bias, scale):
        tensor.requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
        y = m_grouped_gemm(x, w, layout.rows(device), bias, bias_scale=scale)
        y.sum().backward()
    assert y.dtype == torch.float32
    arguments = layout.bounds, bias, scale
    assert_as_accurate_as_eager(y, eager_m_grouped(x, w, *arguments), exact_m_grouped(x, w, *arguments))
    dy = torch.ones_like(y)
    dw = exact_k_grouped(dy, x.detach(), layout.bounds)
    assert_as_accurate_as_eager(w.grad, eager_k_grouped(dy, x.detach(), layout.bounds), dw)


@pytest.mark.gpu
@needs_cuda
def test_offsets_beyond_int32() -> None:
    """Two elements of one x, of one w and of one y lie more than 2^31 elements apart."""
    free, _ = torch.cuda.mem_get_info()
    if free < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    flat = torch.zeros(2 * 2**30 + 2**20, dtype=torch.bfloat16, device="cuda")
    rows = RowRanges.contiguous([1, 0, 2], device="cuda")
    bounds = [(0, 1), (1, 1), (1, 3)]
    near = randn(3, 64, dtype=torch.bfloat16, device="cuda")
    weights = randn(3, 32, 64, dtype=torch.bfloat16, device="cuda")
    exact = exact_m_grouped(near, weights, bounds)
    eager = eager_m_grouped(near, weights, bounds)
    far = flat.as_strided((3, 64), (2**30, 1)).copy_(near)
    assert_as_accurate_as_eager(m_grouped_gemm(far, weights, rows), eager, exact)
    far = flat.as_strided((3, 32, 64), (2**30, 64, 1)).copy_(weights)
    assert_as_accurate_as_eager(m_grouped_gemm(near, far, rows), eager, exact)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    layout = contiguous([5, 0, 3], spare=1)
    x = random_rows(layout, 16, dtype=torch.bfloat16, device="cpu")
    w = weight(layout, 16, 8, True, torch.bfloat16, "cpu")
    results = []
    for device in ("cuda:0", "cuda:1"):
        leaves = x.to(device).requires_grad_(), w.to(device).requires_grad_()
        y = m_grouped_gemm(*leaves, layout.rows(device))
        assert y.device == torch.device(device)
        results.append([t.cpu() for t in (y, *torch.autograd.grad(y.sum(), leaves))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.cuda.current_device() == 0


@given(st.data(), layouts(), sizes, sizes, dtypes, strides, strides, st.booleans(), seeds)
def test_any_input(
    data: st.DataObject,
    layout: Layout,
    k: int,
    n: int,
    dtype: torch.dtype,
    x_strides: str,
    w_strides: str,
    transpose_w: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    bias = scale = None
    if data.draw(st.booleans(), label="bias"):
        bias = randn(layout.num_experts, n, dtype=dtype, device="cpu")
        if data.draw(st.booleans(), label="bias_scale"):
            scale = random_rows(layout, dtype=data.draw(dtypes, label="dtype of bias_scale"), device="cpu")
    x = STRIDES[x_strides](random_rows(layout, k, dtype=dtype, device="cpu"))
    w = STRIDES[w_strides](weight(layout, k, n, transpose_w, dtype, "cpu"))
    check(x, w, layout, bias, scale, transpose_w)


# ---- gradients

GRADCHECK_LAYOUTS = ["tail-rows", "middle-empty", "padded-evenly", "m-indices-with-idle", "no-rows", "one-expert"]


@pytest.mark.parametrize("transpose_w", [True, False], ids=["nt", "nn"])
@pytest.mark.parametrize("bias_and_scale", ["neither", "bias", "both"])
@pytest.mark.parametrize("layout", GRADCHECK_LAYOUTS)
def test_gradcheck(layout: str, bias_and_scale: str, transpose_w: bool, device: str) -> None:
    case = LAYOUTS[layout]
    rows = case.rows(device)
    inputs = [
        randn(case.num_rows, 3, dtype=torch.float64, device=device),
        weight(case, 3, 2, transpose_w, torch.float64, device),
    ]
    if bias_and_scale != "neither":
        inputs.append(randn(case.num_experts, 2, dtype=torch.float64, device=device))
    if bias_and_scale == "both":
        inputs.append(randn(case.num_rows, dtype=torch.float64, device=device))

    def function(x: Tensor, w: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        return m_grouped_gemm(x, w, rows, bias, bias_scale=scale, transpose_w=transpose_w)

    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in inputs])


GRADIENT_STRIDES = STRIDES | EXPANDED


@pytest.mark.parametrize("transpose_w", [True, False], ids=["nt", "nn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dy_strides", GRADIENT_STRIDES)
def test_gradients_one_by_one(dy_strides: str, dtype: torch.dtype, transpose_w: bool, device: str) -> None:
    """NaN and inf in rows of no expert, of x, bias_scale and dy, reach no gradient."""
    layout = LAYOUTS["padded-8"]
    rows = layout.rows(device)
    x = random_rows(layout, 12, dtype=dtype, device=device).requires_grad_()
    w = weight(layout, 12, 7, transpose_w, dtype, device).requires_grad_()
    bias = randn(layout.num_experts, 7, dtype=dtype, device=device).requires_grad_()
    scale = random_rows(layout, dtype=torch.float32, device=device).requires_grad_()
    dy = GRADIENT_STRIDES[dy_strides](randn(layout.num_rows, 7, dtype=dtype, device=device))
    if dy_strides in STRIDES:
        poison_unowned(dy, layout)
    y = m_grouped_gemm(x, w, rows, bias, bias_scale=scale, transpose_w=transpose_w)
    with unchanged(x, w, bias, scale, dy):
        dx, dw, dbias, dscale = torch.autograd.grad(y, (x, w, bias, scale), dy)
    for tensor, gradient in ((x, dx), (w, dw), (bias, dbias), (scale, dscale)):
        assert gradient.dtype == tensor.dtype
        assert gradient.shape == tensor.shape
    x, w, bias, scale = (t.detach() for t in (x, w, bias, scale))
    bounds = layout.bounds
    arguments = dy, w, bounds, None, None, not transpose_w
    assert_as_accurate_as_eager(dx, eager_m_grouped(*arguments), exact_m_grouped(*arguments))
    operands = (dy, x, bounds) if transpose_w else (x, dy, bounds)
    assert_as_accurate_as_eager(dw, eager_k_grouped(*operands), exact_k_grouped(*operands))
    assert_as_accurate_as_eager(dbias, eager_k_grouped_sum(dy, bounds, scale), exact_k_grouped_sum(dy, bounds, scale))
    column = dy, bias[:, None], bounds
    assert_as_accurate_as_eager(dscale, eager_m_grouped(*column)[:, 0], exact_m_grouped(*column)[:, 0])
    assert not dx[layout.unowned()].any()
    assert not dscale[layout.unowned()].any()
    for expert in layout.empty_experts():
        assert not dw[expert].any()
        assert not dbias[expert].any()


def test_gradients_of_an_idle_layer_are_zeros(device: str) -> None:
    for layout in (LAYOUTS["no-rows"], LAYOUTS["all-empty"], LAYOUTS["tail-rows-only"]):
        x = random_rows(layout, 4, dtype=torch.bfloat16, device=device).requires_grad_()
        w = weight(layout, 4, 3, True, torch.bfloat16, device).requires_grad_()
        y = m_grouped_gemm(x, w, layout.rows(device))
        assert y.requires_grad
        y.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))
        assert torch.equal(w.grad, torch.zeros_like(w))


def test_only_wanted_gradients_come(device: str) -> None:
    layout = LAYOUTS["tail-rows"]
    rows = layout.rows(device)
    shapes = {"x": (16, 4), "w": (2, 3, 4), "bias": (2, 3), "scale": (16,)}
    for wanted in shapes:
        tensors = {name: randn(*shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}
        tensors[wanted].requires_grad_()
        x, w, bias, scale = tensors.values()
        m_grouped_gemm(x, w, rows, bias, bias_scale=scale).sum().backward()
        assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [wanted]


def test_retained_graph_gives_the_same_gradients_twice(device: str) -> None:
    layout = LAYOUTS["uneven"]
    x = random_rows(layout, 5, dtype=torch.bfloat16, device=device).requires_grad_()
    w = weight(layout, 5, 3, True, torch.bfloat16, device).requires_grad_()
    y = m_grouped_gemm(x, w, layout.rows(device))
    first, second = (torch.autograd.grad(y.sum(), (x, w), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- refusals


def good_arguments() -> dict[str, object]:
    return {
        "x": torch.ones(4, 3),
        "w": torch.ones(2, 5, 3),
        "rows": RowRanges.contiguous([1, 3]),
        "bias": torch.ones(2, 5),
        "bias_scale": torch.ones(4),
    }


BAD_ARGUMENTS: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "x-list": ({"x": [[1.0]]}, TypeError, "x: wanted a tensor, got list"),
    "x-int": ({"x": torch.ones(4, 3).int()}, TypeError, "x: wanted a dtype of .*, got int32"),
    "x-1d": ({"x": torch.ones(4)}, ValueError, r"x: wanted shape \(T, K\) = \(any, any\), got \(4,\)"),
    "x-3d": ({"x": torch.ones(2, 2, 3)}, ValueError, r"x: wanted shape \(T, K\)"),
    "w-transposed": ({"w": torch.ones(2, 3, 5)}, ValueError, r"w: wanted shape \(E, N, K\) = .*3\), got \(2, 3, 5\)"),
    "w-not": ({"w": torch.ones(2, 5, 3), "transpose_w": False}, ValueError, r"w: wanted shape \(E, K, N\)"),
    "w-2d": ({"w": torch.ones(5, 3)}, ValueError, r"w: wanted shape \(E, N, K\)"),
    "w-dtype": ({"w": torch.ones(2, 5, 3).bfloat16()}, TypeError, "w: wanted the dtype .*float32, got torch.bfloat16"),
    "w-none": ({"w": None}, TypeError, "w: wanted a tensor, got NoneType"),
    "w-device": ({"w": torch.ones(2, 5, 3, device="meta")}, ValueError, "w: wanted a tensor on cpu, got one on meta"),
    "rows-list": ({"rows": [1, 3]}, TypeError, "rows: wanted a RowRanges, got list"),
    "rows-few": ({"rows": RowRanges.contiguous([4])}, ValueError, r"rows.starts: wanted shape \(E,\) = \(2,\), got"),
    "rows-int64": (
        {"rows": RowRanges(torch.tensor([0, 1]), torch.tensor([1, 4]))},
        TypeError,
        "rows.starts: wanted dtype int32, got torch.int64",
    ),
    "rows-strided": (
        {"rows": RowRanges(*torch.tensor([[0, 1], [1, 4]], dtype=torch.int32).unbind(1))},
        ValueError,
        r"rows.starts: wanted a contiguous tensor, got strides \(2,\)",
    ),
    "rows-uneven": (
        {"rows": RowRanges(torch.tensor([0, 1]).int(), torch.tensor([4]).int())},
        ValueError,
        r"rows.ends: wanted shape \(E,\)",
    ),
    "rows-device": (
        {"rows": RowRanges(*(torch.empty(2, dtype=torch.int32, device="meta") for _ in range(2)))},
        ValueError,
        "rows.starts: wanted a tensor on cpu, got one on meta",
    ),
    "rows-beyond": ({"rows": RowRanges.contiguous([1, 4])}, ValueError, "rows: .* within 4 rows, got 1:5 .*expert 1"),
    "bias-shape": ({"bias": torch.ones(2, 3)}, ValueError, r"bias: wanted shape \(E, N\) = \(2, 5\), got \(2, 3\)"),
    "bias-dtype": ({"bias": torch.ones(2, 5).double()}, TypeError, "bias: wanted the dtype .*, got torch.float64"),
    "scale-alone": ({"bias": None}, ValueError, "bias_scale: wanted a bias beside it, got none"),
    "scale-shape": ({"bias_scale": torch.ones(4, 1)}, ValueError, r"bias_scale: wanted shape \(T,\) = \(4,\)"),
    "scale-dtype": ({"bias_scale": torch.ones(4).int()}, TypeError, "bias_scale: wanted a dtype of .*, got int32"),
    "scale-device": ({"bias_scale": torch.ones(4, device="meta")}, ValueError, "bias_scale: wanted a tensor on cpu"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_arguments(changes: dict[str, object], error: type[Exception], message: str) -> None:
    m_grouped_gemm(**good_arguments())
    with pytest.raises(error, match=message):
        m_grouped_gemm(**good_arguments() | changes)


# ---- registration

OPCHECK_INPUTS: dict[str, Callable[[str], tuple[Layout, Tensor, Tensor, bool, bool]]] = {
    "plain": lambda d: (LAYOUTS["tail-rows"], torch.randn(16, 6, device=d), torch.randn(2, 5, 6, device=d), True, True),
    "nn": lambda d: (LAYOUTS["tail-rows"], torch.randn(16, 6, device=d), torch.randn(2, 6, 5, device=d), False, True),
    "no rows": lambda d: (LAYOUTS["no-rows"], torch.randn(0, 6, device=d), torch.randn(2, 5, 6, device=d), True, True),
    "no experts": lambda d: (
        contiguous([], 4),
        torch.randn(4, 6, device=d),
        torch.randn(0, 5, 6, device=d),
        True,
        False,
    ),
    "one": lambda d: (contiguous([3]), torch.randn(3, 1, device=d), torch.randn(1, 1, 1, device=d), True, True),
    "strided": lambda d: (
        LAYOUTS["uneven"],
        STRIDES["transposed"](torch.randn(53, 6, device=d)),
        STRIDES["in-wider-rows"](torch.randn(5, 5, 6, device=d)),
        True,
        False,
    ),
}


@pytest.mark.parametrize("case", OPCHECK_INPUTS)
def test_opcheck(case: str, device: str) -> None:
    layout, x, w, transpose_w, with_bias = OPCHECK_INPUTS[case](device)
    rows = layout.rows(device)
    bias = scale = None
    if with_bias:
        bias = torch.randn(w.shape[0], w.shape[1 if transpose_w else 2], device=device, requires_grad=True)
        scale = torch.rand(x.shape[0], device=device, requires_grad=True)
    x, w = x.requires_grad_(), w.requires_grad_()
    arguments = x, w, rows.starts, rows.ends, bias, scale, transpose_w
    torch.library.opcheck(torch.ops.grouped_experts.m_grouped_gemm.default, arguments)
