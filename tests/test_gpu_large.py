"""Tensors of more than 2^31 elements, in experts and in rows: offsets that int32 cannot hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import needs_cuda
from exact import eps, exact_scaled_activation, exact_scaled_activation_backward
from torch import Tensor

from grouped_experts import RowRanges, routed_experts
from grouped_experts.ops import (
    fc1_activation,
    fc2_dgrad_activation,
    k_grouped_gemm,
    k_grouped_gemm_accumulate,
    k_grouped_sum,
    m_grouped_gemm,
    permute,
    scaled_activation,
    scaled_activation_backward,
    unpermute,
)

BF16 = torch.bfloat16
BEYOND = 2**31
FREE_GIB = 40  # the largest test takes about 20

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.fixture(autouse=True)
def _enough_memory(_poisoned_memory: None) -> Iterator[None]:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < FREE_GIB * 2**30:
        pytest.skip(f"needs {FREE_GIB} GiB of free GPU memory, there are {free // 2**30}")
    yield
    torch.cuda.empty_cache()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda")


def close(actual: Tensor, exact: Tensor) -> None:
    """In the norm, within one rounding to bf16; finite."""
    error = float((actual.double() - exact).norm())
    assert error <= eps(BF16) * float(exact.norm()), f"error {error:.3g} of {float(exact.norm()):.3g}"


# ---- experts: the last one has all 16 rows, and what might be read of the others is NaN

EXPERTS, ROWS = 130, 16
# TMA takes rows of a multiple of 16 bytes.
WIDTHS = {"tma": 4608, "pointers": 4609}


def last_expert() -> tuple[RowRanges, RowRanges]:
    """Its rows, as those of the last of all experts and of the only one."""
    return (
        RowRanges.contiguous([0] * (EXPERTS - 1) + [ROWS], device="cuda"),
        RowRanges.contiguous([ROWS], device="cuda"),
    )


def weight_of_many(*shape: int) -> Tensor:
    w = torch.full((EXPERTS, *shape), torch.nan, dtype=BF16, device="cuda")
    assert w.numel() > BEYOND
    w[-1] = normal(*shape) * shape[-1] ** -0.5
    return w


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_products_with_the_last_of_many_experts(width: int) -> None:
    w, (many, one) = weight_of_many(4096, width), last_expert()
    for transpose_w in (True, False):
        x = normal(ROWS, width if transpose_w else 4096)
        y = m_grouped_gemm(x, w, many, transpose_w=transpose_w)
        assert torch.equal(y, m_grouped_gemm(x, w[-1:], one, transpose_w=transpose_w))
        close(y, x.double() @ (w[-1].t() if transpose_w else w[-1]).double())


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_weight_gradients_of_many_experts(width: int) -> None:
    """Zeros for all but the last."""
    a, b, (many, one) = normal(ROWS, 4096), normal(ROWS, width), last_expert()
    c, alone = k_grouped_gemm(a, b, many), k_grouped_gemm(a, b, one)
    assert c.numel() > BEYOND
    assert torch.equal(c[-1:], alone)
    close(c[-1], a.double().t() @ b.double())
    assert not c[:-1].any()
    for total, rows in ((c, many), (alone, one)):
        k_grouped_gemm_accumulate(total, a, b, rows)
    assert torch.equal(c[-1:], alone)
    close(c[-1], 2 * (a.double().t() @ b.double()))
    assert not c[:-1].any()


def test_fused_products_with_the_last_of_many_experts() -> None:
    w, (many, one) = weight_of_many(4096, 4608), last_expert()
    probs = torch.rand(ROWS, device="cuda")
    x = normal(ROWS, 4608)
    forward, alone = fc1_activation(x, w, many, probs), fc1_activation(x, w[-1:], one, probs)
    assert all(torch.equal(a, b) for a, b in zip(forward, alone, strict=True))
    close(forward[0], x.double() @ w[-1].double().t())
    dy, h = normal(ROWS, 4096), normal(ROWS, 2 * 4608)
    backward = fc2_dgrad_activation(dy, w, h, many, probs)
    alone = fc2_dgrad_activation(dy, w[-1:], h, one, probs)
    assert all(torch.equal(a, b) for a, b in zip(backward, alone, strict=True))
    da = dy.double() @ w[-1].double()
    for actual, exact in zip(
        backward, exact_scaled_activation_backward(da, h, probs, [(0, ROWS)], "swiglu"), strict=True
    ):
        close(actual, exact)


def test_a_token_of_the_last_of_many_experts() -> None:
    w, x, ids = weight_of_many(4096, 4608), normal(1, 4096), torch.tensor([[EXPERTS - 1]], device="cuda")
    fc1, fc2 = w[..., :4096], w[..., :2048]
    y = routed_experts(x, ids, None, fc1, fc2)
    assert torch.equal(y, routed_experts(x, torch.zeros_like(ids), None, fc1[-1:], fc2[-1:]))
    h = (x.double() @ fc1[-1].double().t()).to(BF16)
    a = exact_scaled_activation(h, torch.ones(1, device="cuda"), [(0, 1)], "swiglu")
    close(y, a.to(BF16).double() @ fc2[-1].double().t())


# ---- rows: 64 of them across element 2^31, which the first expert has, and the last 64, which the last one has

T, K = 1_100_000, 2048
COUNTS = [T - 1003, 0, 3, 1000]
BORDER, END = slice(BEYOND // K - 32, BEYOND // K + 32), slice(T - 64, T)
SAMPLES = {0: BORDER, 3: END}
STRIDES = {"tma": K, "pointers": K + 1}


def rows_of_experts() -> RowRanges:
    return RowRanges.contiguous(COUNTS, num_rows=T, device="cuda")


def many_rows(stride: int = K) -> Tensor:
    """(T, K), its rows `stride` elements apart."""
    return normal(T, stride)[:, :K]


@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES.keys())
def test_products_of_many_rows(stride: int) -> None:
    x, w, rows = many_rows(stride), normal(len(COUNTS), K, K), rows_of_experts()
    for transpose_w in (True, False):
        y = m_grouped_gemm(x, w, rows, transpose_w=transpose_w)
        assert y.numel() > BEYOND
        for expert, sample in SAMPLES.items():
            close(y[sample], x[sample].double() @ (w[expert].t() if transpose_w else w[expert]).double())
        del y


@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES.keys())
def test_sums_over_many_rows(stride: int) -> None:
    a, b, rows = many_rows(stride), normal(T, 64), rows_of_experts()
    products, sums = k_grouped_gemm(a, b, rows), k_grouped_sum(a, rows)
    for expert, (left, right) in enumerate(zip(a.split(COUNTS), b.split(COUNTS), strict=True)):
        product = torch.zeros(K, 64, dtype=torch.float64, device="cuda")
        total = product.new_zeros(K)
        for some_of_a, some_of_b in zip(left.split(2**16), right.split(2**16), strict=True):
            product += some_of_a.double().t() @ some_of_b.double()
            total += some_of_a.double().sum(0)
        close(products[expert], product)
        close(sums[expert], total)


def test_activation_of_many_rows() -> None:
    h, da, probs, rows = many_rows(), normal(T, K // 2), torch.rand(T, device="cuda"), rows_of_experts()
    a = scaled_activation(h, probs, rows)
    backward = scaled_activation_backward(da, h, probs, rows)
    for sample in SAMPLES.values():
        exact = exact_scaled_activation_backward(da[sample], h[sample], probs[sample], [(0, 64)], "swiglu")
        close(a[sample], exact[1])
        for actual, value in zip(backward, exact, strict=True):
            close(actual[sample], value)


@pytest.mark.parametrize("inner", [1024, 1050], ids=["tma", "pointers"])
def test_fused_products_of_many_rows(inner: int) -> None:
    x, rows = many_rows(), rows_of_experts()
    w1 = normal(len(COUNTS), 2 * inner, K) * K**-0.5
    probs = torch.rand(T, device="cuda")
    h, a = fc1_activation(x, w1, rows, probs)
    assert h.numel() > BEYOND
    for expert, sample in SAMPLES.items():
        close(h[sample], x[sample].double() @ w1[expert].double().t())
        close(a[sample], exact_scaled_activation(h[sample], probs[sample], [(0, 64)], "swiglu"))
    del x, a
    dy, w2 = many_rows(), normal(len(COUNTS), K, inner) * K**-0.5
    backward = fc2_dgrad_activation(dy, w2, h, rows, probs)
    for expert, sample in SAMPLES.items():
        da = dy[sample].double() @ w2[expert].double()
        exact = exact_scaled_activation_backward(da, h[sample], probs[sample], [(0, 64)], "swiglu")
        for actual, value in zip(backward, exact, strict=True):
            close(actual[sample], value)


def test_permutation_of_many_rows() -> None:
    """Two choices a token; the id 8 is nobody's."""
    x, ids = many_rows(), torch.randint(0, 9, (T, 2), device="cuda")
    permuted = permute(x, ids, torch.rand(T, 2, device="cuda"), 8)
    count = int(permuted.counts.sum())
    assert BEYOND < count * K < permuted.x.numel()
    for sample in (BORDER, slice(count - 64, count)):
        tokens = permuted.routing.row_to_slot[sample].long() // 2
        assert torch.equal(permuted.x[sample], x[tokens])
    assert not permuted.x[count:].any()
    out = unpermute(permuted.x, permuted.routing)
    for sample in (BORDER, END):
        assert torch.equal(out[sample], x[sample] * (ids[sample] < 8).sum(1, keepdim=True))
