"""k_grouped_gemm, k_grouped_gemm_accumulate, k_grouped_sum: values, gradients, refusals, registration."""

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
    randn,
    random_rows,
    seeds,
    sizes,
    strides,
    unchanged,
)
from torch import Tensor

from grouped_experts import RowRanges
from grouped_experts.ops import k_grouped_gemm, k_grouped_gemm_accumulate, k_grouped_sum

UNEVEN = contiguous([17, 1, 33, 0, 2], spare=3)


def most_rows(layout: Layout) -> int:
    return max(end - start for start, end in layout.bounds)


def magnitude_of(a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    return eager_k_grouped(a.double().abs(), b.double().abs(), layout.bounds)


def check(a: Tensor, b: Tensor, layout: Layout, out_dtype: torch.dtype | None = None) -> Tensor:
    """The op against the fp64 loop, its contract of memory and dtype, and what it leaves alone."""
    rows = layout.rows(a.device.type)
    with unchanged(a, b, rows.starts, rows.ends):
        c = k_grouped_gemm(a, b, rows, out_dtype=out_dtype)
    assert c.dtype == (out_dtype or a.dtype)
    assert c.is_contiguous()
    exact = exact_k_grouped(a, b, layout.bounds)
    assert_rounded_once(c, exact, magnitude_of(a, b, layout), most_rows(layout), accumulated_in=a.dtype)
    if c.dtype == a.dtype:
        assert_as_accurate_as_eager(c, eager_k_grouped(a, b, layout.bounds), exact)
    for expert in layout.empty_experts():
        assert not c[expert].any()
    return c


def check_sum(a: Tensor, layout: Layout, scale: Tensor | None = None, out_dtype: torch.dtype | None = None) -> None:
    rows = layout.rows(a.device.type)
    with unchanged(a, scale, rows.starts, rows.ends):
        c = k_grouped_sum(a, rows, scale=scale, out_dtype=out_dtype)
    assert c.dtype == (out_dtype or a.dtype)
    assert c.is_contiguous()
    exact = exact_k_grouped_sum(a, layout.bounds, scale)
    magnitude = exact_k_grouped_sum(a.abs(), layout.bounds, None if scale is None else scale.abs())
    assert_rounded_once(c, exact, magnitude, most_rows(layout), accumulated_in=a.dtype)
    if c.dtype == a.dtype:
        assert_as_accurate_as_eager(c, eager_k_grouped_sum(a, layout.bounds, scale), exact)
    for expert in layout.empty_experts():
        assert not c[expert].any()


# ---- values of the product


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout: Layout, dtype: torch.dtype, device: str) -> None:
    a, b = (random_rows(layout, columns, dtype=dtype, device=device) for columns in (24, 40))
    check(a, b, layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_sizes(m: int, n: int, dtype: torch.dtype, device: str) -> None:
    check(*(random_rows(UNEVEN, columns, dtype=dtype, device=device) for columns in (m, n)), UNEVEN)


@pytest.mark.parametrize("b_strides", STRIDES)
@pytest.mark.parametrize("a_strides", STRIDES)
def test_strides(a_strides: str, b_strides: str, device: str) -> None:
    for layout in (UNEVEN, masked([4, 4, 4], 6)):
        a = STRIDES[a_strides](random_rows(layout, 60, dtype=torch.bfloat16, device=device))
        b = STRIDES[b_strides](random_rows(layout, 9, dtype=torch.bfloat16, device=device))
        check(a, b, layout)


@pytest.mark.parametrize("b_how", EXPANDED)
@pytest.mark.parametrize("a_how", EXPANDED)
def test_expanded(a_how: str, b_how: str, device: str) -> None:
    layout = contiguous([3, 0, 5], spare=2)
    a = EXPANDED[a_how](randn(10, 6, dtype=torch.float32, device=device))
    b = EXPANDED[b_how](randn(10, 9, dtype=torch.float32, device=device))
    check(a, b, layout)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_dtype(dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> None:
    """Accumulated in fp32 and rounded once, to out_dtype: never to the dtype of a on the way."""
    a, b = (random_rows(UNEVEN, columns, dtype=dtype, device=device) for columns in (12, 7))
    check(a, b, UNEVEN, out_dtype)


def test_a_sum_beyond_fp16_fits_into_bf16(device: str) -> None:
    a = torch.full((64, 3), 64.0, dtype=torch.float16, device=device)
    c = k_grouped_gemm(a, a, RowRanges.contiguous([64], device=device), out_dtype=torch.bfloat16)
    assert torch.equal(c, torch.full_like(c, 64.0 * 64 * 64))


def test_exactly_its_own_rows_are_summed(device: str) -> None:
    """Ones: every element of c[e] is the number of its rows."""
    counts = [17, 1, 33, 0, 2, 128, 129]
    ones = torch.ones(sum(counts) + 5, 20, dtype=torch.bfloat16, device=device)
    c = k_grouped_gemm(ones, ones, RowRanges.contiguous(counts, device=device), out_dtype=torch.float32)
    assert torch.equal(c, torch.tensor(counts, device=device)[:, None, None].float().expand(7, 20, 20))


@pytest.mark.parametrize("num_experts", [1, 8, 256])
def test_idle_experts_after_busy_ones(num_experts: int, device: str) -> None:
    """A second call gets the memory of the first; its experts without rows still come out as zeros."""
    busy = torch.ones(2 * num_experts, 8, device=device)
    c = k_grouped_gemm(busy, busy, RowRanges.contiguous([2] * num_experts, device=device))
    assert (c == 2).all()
    del c
    for counts in ([0] * num_experts, [0] * (num_experts - 1) + [2 * num_experts]):
        c = k_grouped_gemm(busy, busy, RowRanges.contiguous(counts, device=device))
        assert torch.equal(c.amax((1, 2)), torch.tensor(counts, device=device).float())
        assert torch.equal(c.amin((1, 2)), torch.tensor(counts, device=device).float())


def test_empty_sizes(device: str) -> None:
    rows = RowRanges.contiguous([], device=device)
    a = torch.full((3, 4), torch.nan, device=device)
    assert k_grouped_gemm(a, a, rows).shape == (0, 4, 4)
    assert k_grouped_sum(a, rows).shape == (0, 4)
    k_grouped_gemm_accumulate(torch.empty(0, 4, 4, device=device), a, a, rows)
    layout = contiguous([2, 0, 1])
    for columns in ((0, 4), (4, 0), (0, 0)):
        check(*(random_rows(layout, c, dtype=torch.float16, device=device) for c in columns), layout)
    check_sum(random_rows(layout, 0, dtype=torch.float16, device=device), layout)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_identical_from_run_to_run(dtype: torch.dtype, device: str) -> None:
    layout = contiguous([200, 0, 300])
    rows = layout.rows(device)
    a, b = (random_rows(layout, columns, dtype=dtype, device=device) for columns in (33, 17))
    scale = random_rows(layout, dtype=torch.float32, device=device)
    product, total = k_grouped_gemm(a, b, rows), k_grouped_sum(a, rows, scale=scale)
    for _ in range(5):
        assert torch.equal(k_grouped_gemm(a, b, rows), product)
        assert torch.equal(k_grouped_sum(a, rows, scale=scale), total)


@pytest.mark.gpu
@needs_cuda
def test_offsets_beyond_int32() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    flat = torch.zeros(2 * 2**30 + 2**20, dtype=torch.bfloat16, device="cuda")
    bounds = [(0, 1), (1, 1), (1, 3)]
    rows = RowRanges.contiguous([1, 0, 2], device="cuda")
    a, b = (randn(3, columns, dtype=torch.bfloat16, device="cuda") for columns in (32, 64))
    exact, eager = exact_k_grouped(a, b, bounds), eager_k_grouped(a, b, bounds)
    far = flat.as_strided((3, 32), (2**30, 1)).copy_(a)
    assert_as_accurate_as_eager(k_grouped_gemm(far, b, rows), eager, exact)
    far = flat.as_strided((3, 32, 64), (2**30, 64, 1)).zero_()
    k_grouped_gemm_accumulate(far, a, b, rows)
    assert_as_accurate_as_eager(far, eager, exact)


@given(layouts(), sizes, sizes, dtypes, strides, strides, seeds)
def test_any_input(
    layout: Layout, m: int, n: int, dtype: torch.dtype, a_strides: str, b_strides: str, seed: int
) -> None:
    torch.manual_seed(seed)
    a = STRIDES[a_strides](random_rows(layout, m, dtype=dtype, device="cpu"))
    b = STRIDES[b_strides](random_rows(layout, n, dtype=dtype, device="cpu"))
    check(a, b, layout)


# ---- accumulation into a buffer

FLAT_PADDING = 11


def slice_of_flat(c: Tensor) -> Tensor:
    """A view into one big flat buffer, as a main gradient often is."""
    flat = torch.full((c.numel() + 2 * FLAT_PADDING,), torch.nan, dtype=c.dtype, device=c.device)
    return flat[FLAT_PADDING : FLAT_PADDING + c.numel()].view(c.shape).copy_(c)


ACCUMULATORS = STRIDES | {"slice-of-flat": slice_of_flat}


def check_accumulate(c: Tensor, a: Tensor, b: Tensor, layout: Layout) -> None:
    """c += in place, in c's own strides, and nothing around c."""
    rows = layout.rows(a.device.type)
    before = c.clone()
    whole = torch.empty(0, dtype=c.dtype, device=c.device).set_(c.untyped_storage())
    around = torch.ones_like(whole, dtype=torch.bool)
    around.as_strided(c.shape, c.stride(), c.storage_offset()).fill_(False)
    guards = whole[around].clone()
    with unchanged(a, b, rows.starts, rows.ends):
        assert k_grouped_gemm_accumulate(c, a, b, rows) is None
    assert torch.equal(whole[around].nan_to_num(nan=-77.0), guards.nan_to_num(nan=-77.0))
    product = exact_k_grouped(a, b, layout.bounds)
    eager = before + eager_k_grouped(a, b, layout.bounds).to(c.dtype)
    assert_as_accurate_as_eager(c, eager, before.double() + product)
    for expert in layout.empty_experts():
        assert torch.equal(c[expert], before[expert])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_accumulate_in_every_layout(layout: Layout, dtype: torch.dtype, device: str) -> None:
    a, b = (random_rows(layout, columns, dtype=dtype, device=device) for columns in (5, 12))
    check_accumulate(randn(layout.num_experts, 5, 12, dtype=torch.float32, device=device), a, b, layout)


@pytest.mark.parametrize("c_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulate_in_every_dtype(dtype: torch.dtype, c_dtype: torch.dtype, device: str) -> None:
    a, b = (random_rows(UNEVEN, columns, dtype=dtype, device=device) for columns in (5, 12))
    check_accumulate(randn(5, 5, 12, dtype=c_dtype, device=device), a, b, UNEVEN)


@pytest.mark.parametrize("c_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("c_strides", ACCUMULATORS)
def test_accumulate_in_odd_strides(c_strides: str, c_dtype: torch.dtype, device: str) -> None:
    a, b = (random_rows(UNEVEN, columns, dtype=torch.bfloat16, device=device) for columns in (6, 9))
    c = ACCUMULATORS[c_strides](randn(5, 6, 9, dtype=c_dtype, device=device))
    check_accumulate(c, a, b, UNEVEN)


def test_accumulate_three_times(device: str) -> None:
    """Whole numbers, exact in fp32: 1 + 3 * count."""
    rows = RowRanges.contiguous([4, 0, 3], device=device)
    ones = torch.ones(7, 6, dtype=torch.bfloat16, device=device)
    c = torch.ones(3, 6, 6, device=device)
    for step in range(1, 4):
        k_grouped_gemm_accumulate(c, ones, ones, rows)
        assert c.unique(dim=2).unique(dim=1).flatten().tolist() == [1 + 4 * step, 1, 1 + 3 * step]


def test_small_increments_survive_in_an_fp32_accumulator(device: str) -> None:
    """1 + 2^-12 is no bf16 number, nor is 1 + 2^-12 + 2^-12."""
    rows = RowRanges.contiguous([1, 1], device=device)
    a = torch.full((2, 3), 2.0**-6, dtype=torch.bfloat16, device=device)
    c = torch.ones(2, 3, 3, device=device)
    for step in range(1, 17):
        k_grouped_gemm_accumulate(c, a, a, rows)
        assert torch.equal(c, torch.full_like(c, 1 + step * 2.0**-12))


def test_the_product_is_not_rounded_before_an_fp32_accumulator(device: str) -> None:
    """1 + 2^-12, summed over two rows, would be 1 in bf16."""
    rows = RowRanges.contiguous([2], device=device)
    a = torch.tensor([[1.0], [2.0**-6]], dtype=torch.bfloat16, device=device)
    c = torch.zeros(1, 1, 1, device=device)
    k_grouped_gemm_accumulate(c, a, a, rows)
    assert c.item() == 1 + 2.0**-12
    assert k_grouped_gemm(a, a, rows, out_dtype=torch.float32).item() == 1 + 2.0**-12


@given(st.data(), layouts(), sizes, sizes, dtypes, dtypes, strides, strides, seeds)
def test_accumulate_any_input(
    data: st.DataObject,
    layout: Layout,
    m: int,
    n: int,
    dtype: torch.dtype,
    c_dtype: torch.dtype,
    a_strides: str,
    b_strides: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    a = STRIDES[a_strides](random_rows(layout, m, dtype=dtype, device="cpu"))
    b = STRIDES[b_strides](random_rows(layout, n, dtype=dtype, device="cpu"))
    how = ACCUMULATORS[data.draw(st.sampled_from(sorted(ACCUMULATORS)), label="strides of c")]
    check_accumulate(how(randn(layout.num_experts, m, n, dtype=c_dtype, device="cpu")), a, b, layout)


# ---- sums


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_sum_in_every_layout(layout: Layout, dtype: torch.dtype, device: str) -> None:
    a = random_rows(layout, 7, dtype=dtype, device=device)
    check_sum(a, layout)
    check_sum(a, layout, random_rows(layout, dtype=torch.float32, device=device))


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_in_every_dtype(dtype: torch.dtype, scale_dtype: torch.dtype, device: str) -> None:
    a, scale = random_rows(UNEVEN, 7, dtype=dtype, device=device), random_rows(UNEVEN, dtype=scale_dtype, device=device)
    for out_dtype in (None, *DTYPES):
        check_sum(a, UNEVEN, scale, out_dtype)
        check_sum(a, UNEVEN, None, out_dtype)


@pytest.mark.parametrize("how", STRIDES | EXPANDED)
def test_sum_in_odd_strides(how: str, device: str) -> None:
    layout = contiguous([3, 0, 5])
    a = (STRIDES | EXPANDED)[how](randn(8, 6, dtype=torch.bfloat16, device=device))
    check_sum(a, layout)
    check_sum(a, layout, randn(16, dtype=torch.float32, device=device)[::2])
    check_sum(a, layout, randn(1, dtype=torch.float32, device=device).expand(8))


def test_long_sums_do_not_stall(device: str) -> None:
    """A bf16 sum of ones stops at 256, an fp16 one at 2048."""
    for dtype in (torch.bfloat16, torch.float16):
        ones = torch.ones(5000, 3, dtype=dtype, device=device)
        rows = RowRanges.contiguous([4096, 904], device=device)
        assert k_grouped_sum(ones, rows).tolist() == [[4096.0] * 3, [904.0] * 3]
        assert k_grouped_gemm(ones, ones, rows)[:, 0].tolist() == [[4096.0] * 3, [904.0] * 3]


# ---- gradients


@pytest.mark.parametrize("layout", ["tail-rows", "middle-empty", "padded-evenly", "m-indices-with-idle", "no-rows"])
def test_gradcheck(layout: str, device: str) -> None:
    case = LAYOUTS[layout]
    rows = case.rows(device)
    a, b = (randn(case.num_rows, n, dtype=torch.float64, device=device).requires_grad_() for n in (3, 2))
    assert torch.autograd.gradcheck(lambda a, b: k_grouped_gemm(a, b, rows), (a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dc_strides", STRIDES | EXPANDED)
def test_gradients_one_by_one(dc_strides: str, dtype: torch.dtype, device: str) -> None:
    layout = LAYOUTS["padded-8"]
    a = random_rows(layout, 12, dtype=dtype, device=device).requires_grad_()
    b = random_rows(layout, 7, dtype=dtype, device=device).requires_grad_()
    dc = (STRIDES | EXPANDED)[dc_strides](randn(layout.num_experts, 12, 7, dtype=dtype, device=device))
    c = k_grouped_gemm(a, b, layout.rows(device))
    with unchanged(a, b, dc):
        da, db = torch.autograd.grad(c, (a, b), dc)
    a, b = a.detach(), b.detach()
    for gradient, rows, transposed in ((da, b, True), (db, a, False)):
        arguments = rows, dc, layout.bounds, None, None, transposed
        assert gradient.dtype == dtype
        assert_as_accurate_as_eager(gradient, eager_m_grouped(*arguments), exact_m_grouped(*arguments))
        assert not gradient[layout.unowned()].any()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_gradients_through_another_out_dtype(out_dtype: torch.dtype, device: str) -> None:
    layout = contiguous([5, 0, 3])
    a, b = (random_rows(layout, n, dtype=torch.bfloat16, device=device).requires_grad_() for n in (4, 6))
    dc = randn(3, 4, 6, dtype=out_dtype, device=device)
    da, db = torch.autograd.grad(k_grouped_gemm(a, b, layout.rows(device), out_dtype=out_dtype), (a, b), dc)
    a, b = a.detach(), b.detach()
    for gradient, rows, transposed in ((da, b, True), (db, a, False)):
        exact = exact_m_grouped(rows, dc, layout.bounds, None, None, transposed)
        eager = eager_m_grouped(rows, dc.bfloat16(), layout.bounds, None, None, transposed)
        assert gradient.dtype == torch.bfloat16
        assert_as_accurate_as_eager(gradient, eager, exact)


def test_only_wanted_gradients_come(device: str) -> None:
    rows = RowRanges.contiguous([3, 1], device=device)
    a, b = torch.ones(4, 2, device=device, requires_grad=True), torch.ones(4, 3, device=device)
    k_grouped_gemm(a, b, rows).sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, 3.0))
    assert b.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_leaves_the_dtype_alone(dtype: torch.dtype, device: str) -> None:
    autocast_dtype = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    a, b = (random_rows(UNEVEN, n, dtype=dtype, device=device) for n in (9, 4))
    rows = UNEVEN.rows(device)
    c, total = torch.ones(5, 9, 4, dtype=dtype, device=device), k_grouped_sum(a, rows)
    plain, plain_c = k_grouped_gemm(a, b, rows), c.clone()
    k_grouped_gemm_accumulate(plain_c, a, b, rows)
    with torch.autocast(device, dtype=autocast_dtype):
        product = k_grouped_gemm(a, b, rows)
        k_grouped_gemm_accumulate(c, a, b, rows)
        assert torch.equal(k_grouped_sum(a, rows), total)
    assert product.dtype == dtype
    assert torch.equal(product, plain)
    assert torch.equal(c, plain_c)


# ---- refusals


def needing_gradient(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


BAD_OPERANDS: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "a-int": ({"a": torch.ones(4, 3).int()}, TypeError, "a: wanted a dtype of .*, got int32"),
    "a-1d": ({"a": torch.ones(4)}, ValueError, r"a: wanted shape \(T, M\) = \(any, any\), got \(4,\)"),
    "b-rows": ({"b": torch.ones(5, 2)}, ValueError, r"b: wanted shape \(T, N\) = \(4, any\), got \(5, 2\)"),
    "b-dtype": ({"b": torch.ones(4, 2).half()}, TypeError, "b: wanted the dtype of .*float32, got torch.float16"),
    "b-device": ({"b": torch.ones(4, 2, device="meta")}, ValueError, "b: wanted a tensor on cpu, got one on meta"),
    "rows-list": ({"rows": [1, 3]}, TypeError, "rows: wanted a RowRanges, got list"),
    "rows-beyond": ({"rows": RowRanges.contiguous([1, 4])}, ValueError, "rows: .* within 4 rows, got 1:5"),
    "rows-int64": (
        {"rows": RowRanges(torch.tensor([0, 1]), torch.tensor([1, 4]))},
        TypeError,
        "rows.starts: wanted dtype int32",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_OPERANDS.values(), ids=BAD_OPERANDS.keys())
def test_bad_operands(changes: dict[str, object], error: type[Exception], message: str) -> None:
    good = {"a": torch.ones(4, 3), "b": torch.ones(4, 2), "rows": RowRanges.contiguous([1, 3])}
    c = torch.ones(2, 3, 2)
    k_grouped_gemm(**good)
    with pytest.raises(error, match=message):
        k_grouped_gemm(**good | changes)
    with pytest.raises(error, match=message):
        k_grouped_gemm_accumulate(c, **good | changes)
    assert (c == 1).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"c": torch.ones(2, 3, 3)}, ValueError, r"c: wanted shape \(E, M, N\) = \(2, 3, 2\), got \(2, 3, 3\)"),
        ({"c": torch.ones(1, 3, 2)}, ValueError, r"c: wanted shape \(E, M, N\)"),
        ({"c": torch.ones(2, 3, 2).int()}, TypeError, "c: wanted a dtype of .*, got int32"),
        ({"c": torch.ones(2, 3, 2, device="meta")}, ValueError, "c: wanted a tensor on cpu, got one on meta"),
        (
            {"c": needing_gradient(2, 3, 2)},
            ValueError,
            "k_grouped_gemm_accumulate: wanted tensors without requires_grad",
        ),
        ({"a": needing_gradient(4, 3)}, ValueError, "k_grouped_gemm_accumulate: wanted tensors without requires_grad"),
        ({"b": needing_gradient(4, 2)}, ValueError, "k_grouped_gemm_accumulate: wanted tensors without requires_grad"),
    ],
    ids=["shape", "experts", "dtype", "device", "c-gradient", "a-gradient", "b-gradient"],
)
def test_bad_accumulators(changes: dict[str, object], error: type[Exception], message: str) -> None:
    good = {
        "c": torch.ones(2, 3, 2),
        "a": torch.ones(4, 3),
        "b": torch.ones(4, 2),
        "rows": RowRanges.contiguous([1, 3]),
    }
    k_grouped_gemm_accumulate(**good)
    with pytest.raises(error, match=message):
        k_grouped_gemm_accumulate(**good | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a": torch.ones(4, 3).int()}, TypeError, "a: wanted a dtype of .*, got int32"),
        ({"a": torch.ones(4)}, ValueError, r"a: wanted shape \(T, N\)"),
        ({"rows": [1, 3]}, TypeError, "rows: wanted a RowRanges, got list"),
        ({"rows": RowRanges.contiguous([1, 4])}, ValueError, "rows: .* within 4 rows, got 1:5"),
        ({"scale": torch.ones(3)}, ValueError, r"scale: wanted shape \(T,\) = \(4,\), got \(3,\)"),
        ({"scale": torch.ones(4).int()}, TypeError, "scale: wanted a dtype of .*, got int32"),
        ({"scale": torch.ones(4, device="meta")}, ValueError, "scale: wanted a tensor on cpu, got one on meta"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype: wanted one of .*, got torch.int32"),
        ({"a": needing_gradient(4, 3)}, ValueError, "k_grouped_sum: wanted tensors without requires_grad"),
        ({"scale": needing_gradient(4)}, ValueError, "k_grouped_sum: wanted tensors without requires_grad"),
    ],
    ids=[
        "a-int", "a-1d", "rows-list", "rows-beyond", "scale-shape", "scale-int", "scale-device", "out-dtype",
        "a-gradient", "scale-gradient",
    ],
)  # fmt: skip
def test_bad_sums(changes: dict[str, object], error: type[Exception], message: str) -> None:
    good = {"a": torch.ones(4, 3), "rows": RowRanges.contiguous([1, 3]), "scale": torch.ones(4)}
    k_grouped_sum(**good)
    with pytest.raises(error, match=message):
        k_grouped_sum(**good | changes)


def test_bad_out_dtype() -> None:
    a = torch.ones(4, 3)
    with pytest.raises(TypeError, match="out_dtype: wanted one of .*, got torch.int32"):
        k_grouped_gemm(a, a, RowRanges.contiguous([1, 3]), out_dtype=torch.int32)


def test_no_grad_lifts_the_refusal_of_gradients() -> None:
    rows = RowRanges.contiguous([1, 3])
    a, c = needing_gradient(4, 3), needing_gradient(2, 3, 3)
    with torch.no_grad():
        k_grouped_gemm_accumulate(c, a, a, rows)
        assert k_grouped_sum(a, rows).tolist() == [[1.0] * 3, [3.0] * 3]
    assert c[:, 0, 0].tolist() == [2.0, 4.0]


# ---- registration

OPCHECK_INPUTS: dict[str, Callable[[str], tuple[Layout, Tensor, Tensor]]] = {
    "plain": lambda d: (LAYOUTS["tail-rows"], torch.randn(16, 6, device=d), torch.randn(16, 5, device=d)),
    "no rows": lambda d: (LAYOUTS["no-rows"], torch.randn(0, 6, device=d), torch.randn(0, 5, device=d)),
    "no experts": lambda d: (contiguous([], 4), torch.randn(4, 6, device=d), torch.randn(4, 5, device=d)),
    "one": lambda d: (contiguous([3]), torch.randn(3, 1, device=d), torch.randn(3, 1, device=d)),
    "strided": lambda d: (
        LAYOUTS["uneven"],
        STRIDES["transposed"](torch.randn(53, 6, device=d)),
        STRIDES["in-wider-rows"](torch.randn(53, 5, device=d)),
    ),
}


@pytest.mark.parametrize("case", OPCHECK_INPUTS)
def test_opcheck(case: str, device: str) -> None:
    layout, a, b = OPCHECK_INPUTS[case](device)
    rows = layout.rows(device)
    ops = torch.ops.grouped_experts
    a.requires_grad_(), b.requires_grad_()
    torch.library.opcheck(ops.k_grouped_gemm.default, (a, b, rows.starts, rows.ends, a.dtype))


@pytest.mark.parametrize("case", OPCHECK_INPUTS)
def test_opcheck_accumulate_and_sum(case: str, device: str) -> None:
    layout, a, b = OPCHECK_INPUTS[case](device)
    rows = layout.rows(device)
    ops = torch.ops.grouped_experts
    for c_strides in ("contiguous", "transposed"):
        c = STRIDES[c_strides](torch.randn(layout.num_experts, a.shape[1], b.shape[1], device=device).double())
        torch.library.opcheck(ops.k_grouped_gemm_accumulate.default, (c, a, b, rows.starts, rows.ends))
    for scale in (None, torch.rand(a.shape[0], device=device)):
        torch.library.opcheck(ops.k_grouped_sum.default, (a, rows.starts, rows.ends, scale, torch.float32))
