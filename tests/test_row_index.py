"""Products of rows that an index names: each op gives what it gives on a copy of those rows, in every family."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from conftest import Place
from exact import assert_rounded_once, exact_m_grouped
from inputs import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    STRIDES,
    poison_unowned,
    randn,
    random_rows,
    unchanged,
)
from places import in_every_place, places
from row_index import CASES, GAPS, INDEXED, UNEVEN, Case, assert_same, owned_of, weight
from torch import Tensor

from grouped_experts import RowRanges
from grouped_experts.ops import (
    fc1_activation,
    fc2_dgrad_activation,
    k_grouped_gemm,
    k_grouped_gemm_accumulate,
    k_grouped_sum,
    m_grouped_gemm,
)
from grouped_experts.ops.schedule import tile_schedule_op

OPS = torch.ops.grouped_experts
FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


# ---- where: every family that can run


def everywhere(name: str, values: Iterable[Any], interpreted: Iterable[Any], ids: Any = str) -> pytest.MarkDecorator:
    """Each value in each place, in the interpreter only those of `interpreted`, in fp16 and fp32 by turns."""
    once = list(interpreted)
    params = []
    for value in values:
        dtypes = [(FP16, FP32)[once.index(value) % 2]] if value in once else []
        for at in places(interpreted=dtypes):
            params.append(pytest.param(at.values[0], value, id=f"{at.id}-{ids(value)}", marks=at.marks))
    return pytest.mark.parametrize(("place", name), params, indirect=["place"])


# No whole tiles of rows each, some without an expert, a source that is smaller, larger, or empty.
INTERPRETED = ["gaps", "m-indices-with-idle", "less-rows-than-source", "rows-of-nobody-no-source", "nothing"]
every_case = everywhere("name", CASES, INTERPRETED)
every_stride = everywhere("how", STRIDES, ["in-wider-rows", "transposed"])


# ---- products of rows


def check_m_grouped(case: Case, x: Tensor, columns: int, transpose_w: bool, place: Place) -> None:
    """Without and with a bias, and one that is scaled."""
    layout, depth, index = case.layout, x.shape[1], case.index(place.device)
    w = weight(case, columns, depth, place) if transpose_w else weight(case, depth, columns, place)
    bias = randn(layout.num_experts, columns, dtype=place.dtype, device=place.device)
    scale = random_rows(layout, dtype=FP32, device=place.device)
    rows, copied = layout.rows(place.device), case.copied(x, index)
    for added, scaled in place.variants((None, None), (bias, None), (bias, scale)):
        options: dict[str, Any] = {"bias_scale": scaled, "transpose_w": transpose_w}
        with unchanged(x, w, added, scaled, index, rows.starts, rows.ends):
            y = m_grouped_gemm(x, w, rows, added, row_index=index, **options)
        assert_same(y, m_grouped_gemm(copied, w, rows, added, **options))
        assert not y[layout.unowned()].any()


@every_case
def test_m_grouped_gemm_in_every_layout(name: str, place: Place) -> None:
    case = CASES[name]
    check_m_grouped(case, case.source(72, place.dtype, place.device), 24, True, place)


@everywhere("size", [(1, 1), (5, 3), (64, 8), (63, 100), (200, 40)], [(5, 3), (200, 40)])
def test_m_grouped_gemm_sizes(size: tuple[int, int], place: Place) -> None:
    """Contracted sizes around 64 and no multiples of it."""
    depth, columns = size
    check_m_grouped(GAPS, GAPS.source(depth, place.dtype, place.device), columns, depth % 5 == 0, place)


@every_stride
def test_m_grouped_gemm_of_strided_rows(how: str, place: Place) -> None:
    x = STRIDES[how](GAPS.source(72, place.dtype, place.device))
    check_m_grouped(GAPS, x, 24, False, place)


@everywhere("indexed", [False, True], [True])
def test_gaps_may_be_left_undefined(indexed: bool, place: Place) -> None:
    """zero_gaps=False: the experts' rows are what they are, whatever lies between them."""
    cases = [
        CASES[name] for name in ("nothing", "rows-of-nobody", "more-rows-than-source", "m-indices-with-idle", "gaps")
    ]
    for case, bias in place.variants(*((case, bias) for case in cases for bias in (False, True))):
        x, index, w = case.source(72, place.dtype, place.device), case.index(place.device), weight(case, 24, 72, place)
        rows, owned = case.layout.rows(place.device), owned_of(case.layout)
        x, index = (x, index) if indexed else (case.copied(x, index), None)
        added = randn(case.layout.num_experts, 24, dtype=place.dtype, device=place.device) if bias else None
        arguments = x, w, rows.starts, rows.ends, added, None, True, None, index
        y, expected = (OPS.m_grouped_gemm(*arguments, zero_gaps) for zero_gaps in (False, True))
        assert y.shape == expected.shape
        assert_same(y[owned], expected[owned])


@in_every_place
def test_a_schedule_that_was_made_before(place: Place) -> None:
    """Of R rows, not of those of the source."""
    for case in place.variants(UNEVEN, CASES["less-rows-than-source"]):
        x, index, w = case.source(72, place.dtype, place.device), case.index(place.device), weight(case, 24, 72, place)
        rows = case.layout.rows(place.device)
        tiles = tile_schedule_op(rows.starts, rows.ends, case.layout.num_rows, place.dtype)
        y = OPS.m_grouped_gemm(x, w, rows.starts, rows.ends, None, None, True, tiles, index)
        assert_same(y, m_grouped_gemm(case.copied(x, index), w, rows))


# ---- products with an activation


def check_fc1(case: Case, x: Tensor, inner: int, activation: str, place: Place) -> None:
    layout, index = case.layout, case.index(place.device)
    width = inner if activation == "squared_relu" else 2 * inner
    w1 = weight(case, width, x.shape[1], place)
    b1 = randn(layout.num_experts, width, dtype=place.dtype, device=place.device)
    probs = random_rows(layout, dtype=FP32, device=place.device)
    rows, copied, owned = layout.rows(place.device), case.copied(x, index), owned_of(layout)
    for p, bias in place.variants((None, None), (probs, b1)):
        with unchanged(x, w1, p, bias, index):
            actual = fc1_activation(x, w1, rows, p, bias, activation=activation, row_index=index)
        expected = fc1_activation(copied, w1, rows, p, bias, activation=activation)
        for result, value in zip(actual, expected, strict=True):
            assert result.shape == value.shape
            assert_same(result[owned], value[owned])


@every_case
def test_fc1_activation_in_every_layout(name: str, place: Place) -> None:
    case = CASES[name]
    check_fc1(case, case.source(72, place.dtype, place.device), 12, "swiglu", place)


@every_stride
def test_fc1_activation_of_strided_rows(how: str, place: Place) -> None:
    activation = ACTIVATIONS[list(STRIDES).index(how) % 4]
    check_fc1(GAPS, STRIDES[how](GAPS.source(72, place.dtype, place.device)), 9, activation, place)


def check_fc2_dgrad(case: Case, dy: Tensor, inner: int, activation: str, place: Place) -> None:
    layout, index = case.layout, case.index(place.device)
    w2 = weight(case, dy.shape[1], inner, place)
    b2 = randn(layout.num_experts, dy.shape[1], dtype=place.dtype, device=place.device) if layout.bounds else None
    h = random_rows(layout, inner if activation == "squared_relu" else 2 * inner, dtype=place.dtype, device=w2.device)
    probs = random_rows(layout, dtype=FP32, device=place.device)
    rows, copied, owned = layout.rows(place.device), case.copied(dy, index), owned_of(layout)
    for p, bias in place.variants((None, None), (probs, b2)):
        with unchanged(dy, w2, h, p, bias, index):
            actual = fc2_dgrad_activation(dy, w2, h, rows, p, bias, activation=activation, row_index=index)
        expected = fc2_dgrad_activation(copied, w2, h, rows, p, bias, activation=activation)
        for result, value in zip(actual, expected, strict=True):
            assert result.shape == value.shape
            assert_same(result[owned], value[owned])
        assert not actual[2][layout.unowned()].any()


@every_case
def test_fc2_dgrad_activation_in_every_layout(name: str, place: Place) -> None:
    case = CASES[name]
    check_fc2_dgrad(case, case.source(72, place.dtype, place.device), 12, "swiglu", place)


@every_stride
def test_fc2_dgrad_activation_of_strided_rows(how: str, place: Place) -> None:
    activation = ACTIVATIONS[list(STRIDES).index(how) % 4]
    check_fc2_dgrad(GAPS, STRIDES[how](GAPS.source(72, place.dtype, place.device)), 9, activation, place)


@in_every_place
def test_fc2_dgrad_activation_without_what_is_not_needed(place: Place) -> None:
    case = CASES["m-indices"]
    dy, w2 = case.source(72, place.dtype, place.device), weight(case, 72, 12, place)
    layout, index = case.layout, case.index(place.device)
    rows, h = layout.rows(place.device), random_rows(layout, 24, dtype=place.dtype, device=place.device)
    arguments = w2, h, rows.starts, rows.ends, None, None, "swiglu", False, False, None
    dh, a, dprobs = OPS.fc2_dgrad_activation(dy, *arguments, index)
    expected = OPS.fc2_dgrad_activation(case.copied(dy, index), *arguments)[0]
    assert (a.shape, dprobs.shape) == ((0, 12), (0,))
    assert_same(dh[owned_of(layout)], expected[owned_of(layout)])


# ---- products that contract rows


def check_k_grouped(
    case: Case, indexed: tuple[bool, bool], place: Place, how: str = "contiguous", columns: tuple[int, int] = (24, 40)
) -> None:
    """The product, in the dtype of the rows and in another, and the one that is added."""
    layout, rows = case.layout, case.layout.rows(place.device)
    given: list[tuple[Tensor, Tensor | None]] = []
    copies = []
    for width, by_index in zip(columns, indexed, strict=True):
        if by_index:
            x, index = STRIDES[how](case.source(width, place.dtype, place.device)), case.index(place.device)
            given, copies = [*given, (x, index)], [*copies, case.copied(x, index)]
        else:
            x = random_rows(layout, width, dtype=place.dtype, device=place.device)
            given, copies = [*given, (x, None)], [*copies, x]
    (a, a_index), (b, b_index) = given
    indices = {"a_index": a_index, "b_index": b_index}
    for out_dtype in place.variants(place.dtype, FP32):
        with unchanged(a, b, a_index, b_index):
            c = k_grouped_gemm(a, b, rows, out_dtype=out_dtype, **indices)
        assert_same(c, k_grouped_gemm(*copies, rows, out_dtype=out_dtype))
        assert not c[layout.empty_experts()].any()
    total = randn(layout.num_experts, *columns, dtype=FP32, device=place.device)
    expected = total.clone()
    with unchanged(a, b, a_index, b_index):
        k_grouped_gemm_accumulate(total, a, b, rows, **indices)
    k_grouped_gemm_accumulate(expected, *copies, rows)
    assert_same(total, expected)


@every_case
def test_k_grouped_gemm_in_every_layout(name: str, place: Place) -> None:
    case = CASES[name]
    check_k_grouped(case, (True, True), place)


@everywhere("indexed", INDEXED, INDEXED)
def test_k_grouped_gemm_with_either_index(indexed: tuple[bool, bool], place: Place) -> None:
    for case in place.variants(UNEVEN, CASES["equal"], GAPS):
        for columns in place.variants((1, 3), (100, 63), (24, 40)):
            check_k_grouped(case, indexed, place, columns=columns)


@every_stride
def test_k_grouped_gemm_of_strided_rows(how: str, place: Place) -> None:
    for indexed in place.variants(*INDEXED):
        check_k_grouped(GAPS, indexed, place, how)


@every_stride
def test_k_grouped_sum(how: str, place: Place) -> None:
    for case in CASES.values() if how == "contiguous" else [GAPS]:
        layout, a, index = case.layout, case.source(7, place.dtype, place.device), case.index(place.device)
        a, rows, copied = STRIDES[how](a), layout.rows(place.device), case.copied(a, index)
        scale = random_rows(layout, dtype=FP32, device=place.device)
        for scaled, out_dtype in ((None, None), (scale, FP32)):
            with unchanged(a, scaled, index):
                total = k_grouped_sum(a, rows, scale=scaled, out_dtype=out_dtype, row_index=index)
            assert_same(total, k_grouped_sum(copied, rows, scale=scaled, out_dtype=out_dtype))
            assert not total[layout.empty_experts()].any()


@everywhere("how", STRIDES, ["contiguous", "in-wider-rows"])
def test_gather_rows(how: str, place: Place) -> None:
    for case in CASES.values() if how == "contiguous" else [GAPS]:
        x, index, owned = case.source(7, place.dtype, place.device), case.index(place.device), owned_of(case.layout)
        x = STRIDES[how](x)
        with unchanged(x, index):
            rows = OPS.gather_rows(x, index)
        assert rows.shape == (case.layout.num_rows, 7)
        assert rows.is_contiguous()
        assert torch.equal(rows[owned], case.copied(x, index)[owned])


# ---- gradients


def rows_of(case: Case, x: Tensor, index: Tensor) -> Tensor:
    """x[index], differentiable, zero in rows of no expert."""
    owned = torch.tensor(owned_of(case.layout), device=x.device, dtype=torch.int64)
    return x.new_zeros(case.layout.num_rows, x.shape[1]).index_copy(0, owned, x[index.long()[owned]])


GRADIENT_CASES = ["more-rows-than-source", "less-rows-than-source", "gaps", "m-indices-with-idle", "one-source"]
GRADIENT_CASES += ["rows-of-nobody", "rows-of-nobody-no-source", "nothing"]


def assert_same_gradients(actual: Tensor, exact: Tensor, leaves: list[Tensor], upstream: Tensor, case: Case) -> None:
    """Of two fp64 graphs; the first one's also of an upstream gradient that is poisoned in rows of no expert."""
    torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(exact, leaves, upstream, materialize_grads=True)
    if upstream.dim() == 2:
        upstream = poison_unowned(upstream.clone(), case.layout)
    for gradient, value in zip(torch.autograd.grad(actual, leaves, upstream), expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transpose_w", [True, False], ids=["nt", "nn"])
@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_of_m_grouped_gemm_are_autograd_s_through_copied_rows(
    name: str, transpose_w: bool, device: str
) -> None:
    """Rows that are named often get a sum, those that are not get zeros, though they and their like are NaN."""
    case, place = CASES[name], Place(device, FP64)
    layout, index, x = case.layout, case.index(device), case.source(5, FP64, device).requires_grad_()
    w = weight(case, *((4, 5) if transpose_w else (5, 4)), place).requires_grad_()
    bias = randn(layout.num_experts, 4, dtype=FP64, device=device).requires_grad_()
    scale = random_rows(layout, dtype=FP64, device=device).requires_grad_()
    y = m_grouped_gemm(
        x, w, layout.rows(device), bias, bias_scale=scale, transpose_w=transpose_w, row_index=index
    )  # fmt: skip
    exact = exact_m_grouped(rows_of(case, x, index), w, layout.bounds, bias, scale, transpose_w)
    assert y.requires_grad
    if exact.requires_grad:
        assert_same_gradients(y, exact, [x, w, bias, scale], randn(*y.shape, dtype=FP64, device=device), case)
    else:
        assert not any(g.any() for g in torch.autograd.grad(y.sum(), [x, w, bias, scale]))


@pytest.mark.parametrize("indexed", INDEXED, ids=["a", "b", "both"])
@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_of_k_grouped_gemm_are_autograd_s_through_copied_rows(
    name: str, indexed: tuple[bool, bool], device: str
) -> None:
    case = CASES[name]
    layout, indices, leaves, copies = case.layout, [], [], []
    for columns, by_index in zip((5, 4), indexed, strict=True):
        index = case.index(device) if by_index else None
        leaf = (
            case.source(columns, FP64, device) if by_index else random_rows(layout, columns, dtype=FP64, device=device)
        )
        leaf.requires_grad_()
        same = torch.arange(layout.num_rows, device=device)
        copies.append(rows_of(case, leaf, index if by_index else same))
        indices, leaves = [*indices, index], [*leaves, leaf]
    c = k_grouped_gemm(*leaves, layout.rows(device), a_index=indices[0], b_index=indices[1])
    a, b = copies
    exact = torch.stack([a[start:end].T @ b[start:end] for start, end in layout.bounds])
    assert_same_gradients(c, exact, leaves, randn(*c.shape, dtype=FP64, device=device), case)


def test_gradcheck(device: str) -> None:
    case = Case(LAYOUTS["m-indices"], 3)
    rows, index = case.layout.rows(device), torch.tensor([1, 0, -7, 9, 1], dtype=torch.int32, device=device)
    x, a = (randn(3, 2, dtype=FP64, device=device).requires_grad_() for _ in range(2))
    w = randn(2, 3, 2, dtype=FP64, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: m_grouped_gemm(x, w, rows, row_index=index), (x, w))
    both = {"a_index": index, "b_index": index.flip(0).contiguous().clamp(0, 2)}
    assert torch.autograd.gradcheck(lambda a, x: k_grouped_gemm(a, x, rows, **both), (a, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_in_every_dtype(dtype: torch.dtype, device: str) -> None:
    """Those of rows, summed in fp32 and rounded once; the others are those of copied rows, to the bit on a CPU."""
    place, layout, index = Place(device, dtype), UNEVEN.layout, UNEVEN.index(device)
    x, w = UNEVEN.source(12, dtype, device).requires_grad_(), weight(UNEVEN, 7, 12, place).requires_grad_()
    bias = randn(layout.num_experts, 7, dtype=dtype, device=device).requires_grad_()
    scale = random_rows(layout, dtype=FP32, device=device).requires_grad_()
    rows, dy = layout.rows(device), random_rows(layout, 7, dtype=dtype, device=device)
    copied = UNEVEN.copied(x.detach(), index).requires_grad_()
    y = m_grouped_gemm(x, w, rows, bias, bias_scale=scale, row_index=index)
    with unchanged(x, w, bias, scale, dy, index):
        dx, *others = torch.autograd.grad(y, (x, w, bias, scale), dy)
    y = m_grouped_gemm(copied, w, rows, bias, bias_scale=scale)
    d_copied, *expected = torch.autograd.grad(y, (copied, w, bias, scale), dy)
    for gradient, value in zip(others, expected, strict=True):
        assert_same(gradient, value)
    owned = owned_of(layout)
    named = index.long()[owned]
    summed = torch.zeros(20, 12, dtype=FP64, device=device).index_add(0, named, d_copied[owned].double())
    size = torch.zeros(20, 12, dtype=FP64, device=device).index_add(0, named, d_copied[owned].double().abs())
    assert dx.dtype == dtype
    assert_rounded_once(dx, summed, size, terms=layout.num_rows)
    assert not dx[2::3].any()


def test_gradient_of_a_row_that_is_named_often_does_not_stall(device: str) -> None:
    """5000 ones: a sum in bf16 would stop at 256."""
    rows, index = RowRanges.contiguous([4096, 904], device=device), torch.ones(5000, dtype=torch.int32, device=device)
    x = torch.ones(3, 1, dtype=BF16, device=device, requires_grad=True)
    w = torch.ones(2, 1, 1, dtype=BF16, device=device)
    m_grouped_gemm(x, w, rows, row_index=index).sum().backward()
    assert x.grad.flatten().tolist() == [0.0, torch.tensor(5000.0).bfloat16().item(), 0.0]


def test_only_wanted_gradients_come_and_repeat(device: str) -> None:
    rows, index = UNEVEN.layout.rows(device), UNEVEN.index(device)
    values = {
        "x": UNEVEN.source(6, FP32, device),
        "w": weight(UNEVEN, 4, 6, Place(device, FP32)),
        "a": UNEVEN.source(4, FP32, device),
    }
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "w": lambda x, w: m_grouped_gemm(x, w, rows, row_index=index),
        "a": lambda x, a: k_grouped_gemm(x, a, rows, a_index=index, b_index=index),
    }
    for other, call in calls.items():
        for wanted in ("x", other):
            tensors = {name: values[name].clone().requires_grad_(name == wanted) for name in ("x", other)}
            y = call(*tensors.values())
            first, *again = (torch.autograd.grad(y.sum(), tensors[wanted], retain_graph=True)[0] for _ in range(5))
            assert first.any()
            assert all(torch.equal(first, gradient) for gradient in again)
            y.sum().backward()
            assert [name for name, t in tensors.items() if t.grad is not None] == [wanted]


# ---- refusals


def arguments_of(op: str) -> dict[str, Any]:
    """Three rows of two experts, each of which is one of four."""
    rows, index = RowRanges.contiguous([1, 2]), torch.tensor([3, 0, 3], dtype=torch.int32)
    x, w1, w2 = torch.ones(4, 6), torch.ones(2, 8, 6), torch.ones(2, 6, 5)
    return {
        "m_grouped_gemm": {"x": x, "w": w1, "rows": rows, "row_index": index},
        "fc1_activation": {"x": x, "fc1_weight": w1, "rows": rows, "row_index": index},
        "fc2_dgrad_activation": {"dy": x, "fc2_weight": w2, "h": torch.ones(3, 10), "rows": rows, "row_index": index},
        "k_grouped_sum": {"a": x, "rows": rows, "row_index": index},
        "k_grouped_gemm": {"a": x, "b": x, "rows": rows, "a_index": index, "b_index": index},
        "k_grouped_gemm_accumulate": {
            "c": torch.zeros(2, 6, 6), "a": x, "b": x, "rows": rows, "a_index": index, "b_index": index
        },
    }[op]  # fmt: skip


FUNCTIONS = (m_grouped_gemm, fc1_activation, fc2_dgrad_activation, k_grouped_sum, k_grouped_gemm)
FUNCTIONS_BY_NAME = {f.__name__: f for f in (*FUNCTIONS, k_grouped_gemm_accumulate)}
INDICES = [
    (op, name)
    for op in FUNCTIONS_BY_NAME
    for name in (("a_index", "b_index") if op.startswith("k_grouped_gemm") else ("row_index",))
]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_INDICES: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([3, 0, 3], TypeError, "wanted a tensor, got list"),
    "int64": (int32(3, 0, 3).long(), TypeError, "wanted dtype int32, got torch.int64"),
    "bool": (int32(1, 0, 1).bool(), TypeError, "wanted dtype int32, got torch.bool"),
    "matrix": (int32(3, 0, 3)[None], ValueError, r"wanted shape \(R,\) = \(any,\), got \(1, 3\)"),
    "strided": (int32(3, 7, 0, 7, 3, 7)[::2], ValueError, r"wanted a contiguous tensor, got strides \(2,\)"),
    "meta": (int32(3, 0, 3).to("meta"), ValueError, "wanted a tensor on cpu, got one on meta"),
    "beyond": (int32(3, 0, 4), ValueError, "wanted rows from 0 to 3, got 0 to 4"),
    "negative": (int32(-1, 0, 3), ValueError, "wanted rows from 0 to 3, got -1 to -1"),
}


@pytest.mark.parametrize(("op", "name"), INDICES)
@pytest.mark.parametrize(("index", "error", "message"), BAD_INDICES.values(), ids=BAD_INDICES.keys())
def test_bad_indices(index: Any, error: type[Exception], message: str, op: str, name: str) -> None:
    good, function = arguments_of(op), FUNCTIONS_BY_NAME[op]
    function(**good)
    if op == "k_grouped_gemm_accumulate":
        good["c"].zero_()
    with pytest.raises(error, match=f"^{name}: {message}"):
        function(**good | {name: index})
    if op == "k_grouped_gemm_accumulate":
        assert not good["c"].any()


@pytest.mark.parametrize("op", FUNCTIONS_BY_NAME)
def test_rows_beyond_the_index_are_refused(op: str) -> None:
    """Four rows of x do not make a fourth row of the product."""
    with pytest.raises(ValueError, match="rows: .* within 3 rows, got 1:4"):
        FUNCTIONS_BY_NAME[op](**arguments_of(op) | {"rows": RowRanges.contiguous([1, 3])})


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        (
            "m_grouped_gemm",
            {"bias": torch.ones(2, 8), "bias_scale": torch.ones(4)},
            r"bias_scale: .*\(3,\), got \(4,\)",
        ),
        ("fc1_activation", {"probs": torch.ones(4)}, r"probs: wanted shape \(T,\) = \(3,\), got \(4,\)"),
        ("fc2_dgrad_activation", {"probs": torch.ones(4)}, r"probs: wanted shape \(T,\) = \(3,\), got \(4,\)"),
        ("fc2_dgrad_activation", {"h": torch.ones(4, 10)}, r"h: wanted shape \(T, 2I\) = \(3, 10\), got \(4, 10\)"),
        ("k_grouped_sum", {"scale": torch.ones(4)}, r"scale: wanted shape \(T,\) = \(3,\), got \(4,\)"),
        ("k_grouped_gemm", {"b_index": None}, r"b: wanted shape \(T, N\) = \(3, any\), got \(4, 6\)"),
        ("k_grouped_gemm", {"a_index": None}, r"b_index: wanted shape \(R,\) = \(4,\), got \(3,\)"),
        ("k_grouped_gemm", {"b_index": int32(0, 0, 0, 0)}, r"b_index: wanted shape \(R,\) = \(3,\), got \(4,\)"),
    ],
    ids=["bias_scale", "fc1-probs", "fc2-probs", "h", "scale", "b", "a", "other-length"],
)
def test_what_stands_beside_an_index_has_its_rows(op: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FUNCTIONS_BY_NAME[op](**arguments_of(op) | changes)


# ---- registration, compilation

OPCHECK_CASES = ["gaps", "rows-of-nobody-no-source"]


@pytest.mark.parametrize("name", OPCHECK_CASES)
def test_opcheck(name: str, device: str) -> None:
    case = CASES[name]
    layout, index = case.layout, case.index(device).clamp(0, max(0, case.num_source - 1))
    rows, place = layout.rows(device), Place(device, FP32)
    x, a = (randn(case.num_source, n, dtype=FP32, device=device).requires_grad_() for n in (6, 5))
    w = weight(case, 5, 6, place).requires_grad_()
    ranges = rows.starts, rows.ends
    torch.library.opcheck(OPS.m_grouped_gemm.default, (x, w, *ranges, None, None, True, None, index))
    torch.library.opcheck(OPS.k_grouped_gemm.default, (a, x, *ranges, FP32, index, index))
    b = randn(layout.num_rows, 6, dtype=FP32, device=device).requires_grad_()
    torch.library.opcheck(OPS.k_grouped_gemm.default, (a, b, *ranges, FP32, index, None))
    x, a = x.detach(), a.detach()
    torch.library.opcheck(OPS.gather_rows.default, (x, index))
    torch.library.opcheck(OPS.k_grouped_sum.default, (x, *ranges, None, FP32, index))
    total = torch.zeros(layout.num_experts, 5, 6, device=device)
    torch.library.opcheck(OPS.k_grouped_gemm_accumulate.default, (total, a, x, *ranges, index, index))


def test_opcheck_with_an_activation(device: str) -> None:
    """Without rows of no expert, which are undefined."""
    case, place = CASES["equal"], Place(device, FP32)
    rows, index = case.layout.rows(device), case.index(device)
    x, w1, w2 = case.source(6, FP32, device), weight(case, 8, 6, place), weight(case, 6, 4, place)
    h, ranges = randn(15, 8, dtype=FP32, device=device), (rows.starts, rows.ends)
    torch.library.opcheck(OPS.fc1_activation.default, (x, w1, *ranges, None, None, "swiglu", None, index))
    arguments = x, w2, h, *ranges, None, None, "swiglu", True, True, None, index
    torch.library.opcheck(OPS.fc2_dgrad_activation.default, arguments)


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_compiled_in_one_graph_equals_eager(device: str) -> None:
    """Forward and backward, while rows, source and index change."""
    torch._dynamo.reset()

    def step(x: Tensor, w: Tensor, dc: Tensor, rows: RowRanges, index: Tensor) -> Tensor:
        y = m_grouped_gemm(x, w, rows, row_index=index)
        return (k_grouped_gemm(y, x, rows, b_index=index) * dc).sum() + y.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for name in ("more-rows-than-source", "gaps", "less-rows-than-source", "m-indices-with-idle"):
        case = CASES[name]
        x, w = case.source(6, FP32, device).requires_grad_(), weight(case, 4, 6, Place(device, FP32)).requires_grad_()
        dc = randn(case.layout.num_experts, 4, 6, dtype=FP32, device=device)
        given = x, w, dc, case.layout.rows(device), case.index(device)
        results = [(total := run(*given), *torch.autograd.grad(total, (x, w))) for run in (step, compiled)]
        for eager, other in zip(*results, strict=True):
            assert eager.isfinite().all()
            assert torch.equal(eager, other)


@pytest.mark.usefixtures("many_threads")
def test_gradients_of_many_rows_repeat_to_the_bit() -> None:
    """Without torch's deterministic mode, in which scattered sums are serial."""
    index = torch.randint(0, 500, (20000,), dtype=torch.int32)
    rows = RowRanges.contiguous([12000, 8000])
    x, w, dy = torch.randn(500, 64, requires_grad=True), torch.randn(2, 8, 64), torch.randn(20000, 8)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        first, *others = (torch.autograd.grad(m_grouped_gemm(x, w, rows, row_index=index), x, dy)[0] for _ in range(6))
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert all(torch.equal(first, other) for other in others)
