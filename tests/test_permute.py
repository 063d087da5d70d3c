"""route, permute, unpermute: against a plain loop, gradients, refusals, registration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import needs_cuda, no_synchronisation
from exact import assert_rounded_once, exact_route
from hypothesis import given
from hypothesis import strategies as st
from inputs import DTYPES, EXPANDED, STRIDES, randn, seeds, sizes, strides, unchanged
from torch import Tensor

from grouped_experts.ops import Permuted, Routing, permute, route, unpermute
from grouped_experts.ops.permute import unpermute_with_values_op


def random_ids(num_tokens: int, choices: int, num_experts: int, device: str, elsewhere: bool = True) -> Tensor:
    """Ids 0 .. num_experts, the last of which is no expert here; with repetitions within a token."""
    return torch.randint(0, num_experts + elsewhere, (num_tokens, choices), dtype=torch.int32).to(device)


def check_route(ids: Tensor, num_experts: int) -> Routing:
    with unchanged(ids):
        routing = route(ids, num_experts)
    counts, slot_to_row, row_to_slot = exact_route(ids.tolist(), num_experts)
    for actual, expected, shape in (
        (routing.counts, counts, (num_experts,)),
        (routing.slot_to_row, slot_to_row, tuple(ids.shape)),
        (routing.row_to_slot, row_to_slot, (ids.numel(),)),
    ):
        assert actual.dtype == torch.int32
        assert actual.device == ids.device
        assert actual.is_contiguous()
        assert actual.shape == shape
        assert actual.tolist() == expected
    return routing


def check_permute(x: Tensor, ids: Tensor, probs: Tensor, num_experts: int) -> Permuted:
    """Copies, so equal bit for bit; zeros behind the last expert's rows."""
    with unchanged(x, ids, probs):
        permuted = permute(x, ids, probs, num_experts)
    _, _, row_to_slot = exact_route(ids.tolist(), num_experts)
    rows, row_probs = x.new_zeros(ids.numel(), x.shape[1]), probs.new_zeros(ids.numel())
    for row, slot in enumerate(row_to_slot):
        if slot >= 0:
            token, choice = divmod(slot, ids.shape[1])
            rows[row], row_probs[row] = x[token], probs[token, choice]
    assert (permuted.x.dtype, permuted.probs.dtype) == (x.dtype, probs.dtype)
    assert torch.equal(permuted.x, rows)
    assert torch.equal(permuted.probs, row_probs)
    assert permuted.counts.tolist() == [int((ids == expert).sum()) for expert in range(num_experts)]
    return permuted


def exact_unpermute(y: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    out = y.new_zeros(ids.shape[0], y.shape[1], dtype=torch.float64)
    for token, rows in enumerate(exact_route(ids.tolist(), num_experts)[1]):
        for row in rows:
            if row >= 0:
                out[token] += y[row].double()
    return out


def check_unpermute(y: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """y is poisoned behind the last expert's rows."""
    routing = route(ids, num_experts)
    with unchanged(y, routing.slot_to_row, routing.row_to_slot):
        out = unpermute(y, routing)
    assert out.dtype == y.dtype
    assert out.is_contiguous()
    exact, magnitude = exact_unpermute(y, ids, num_experts), exact_unpermute(y.abs(), ids, num_experts)
    assert_rounded_once(out, exact, magnitude, terms=ids.shape[1])
    check_values(y, out, routing)
    return out


def check_values(y: Tensor, out: Tensor, routing: Routing) -> None:
    """What comes with a number a row: the same sums, and the numbers of the slots."""
    row_values = torch.rand(y.shape[0], 2, device=y.device)[:, 0]
    row_values[routing.row_to_slot < 0] = torch.nan
    with unchanged(y, row_values):
        with_values, values = unpermute_with_values_op(y, row_values, routing.slot_to_row, routing.row_to_slot)
    assert torch.equal(with_values, out)
    assert values.shape == routing.slot_to_row.shape
    for row, value in zip(routing.slot_to_row.flatten().tolist(), values.flatten().tolist(), strict=True):
        assert value == (0 if row < 0 else row_values[row].item())


def random_rows(ids: Tensor, num_experts: int, columns: int, dtype: torch.dtype) -> Tensor:
    y = randn(ids.numel(), columns, dtype=dtype, device=ids.device.type)
    y[int((ids < num_experts).sum()) :] = torch.nan
    return y


# ---- values

ROUTES: dict[str, tuple[list[list[int]], int]] = {
    "one-choice": ([[2], [0], [2], [1]], 3),
    "all-choices": ([[0, 1, 2], [2, 1, 0], [1, 0, 2]], 3),
    "one-takes-all": ([[1, 1], [1, 1]], 3),
    "twice-the-same": ([[0, 0], [2, 2], [0, 2]], 3),
    "more-choices-than-values-at-a-time": ([[choice % 6 for choice in range(150)]] * 3, 5),
    "none-here": ([[3, 3], [3, 3]], 3),
    "some-elsewhere": ([[3, 0], [1, 3], [3, 3], [0, 1]], 3),
    "first-and-last-idle": ([[1, 2], [2, 1]], 4),
    "one-expert": ([[0], [0]], 1),
    "one-expert-elsewhere": ([[1], [0], [1]], 1),
    "one-token": ([[4, 2]], 5),
    "more-experts-than-rows": ([[200, 7]], 256),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("ids", "num_experts"), ROUTES.values(), ids=ROUTES.keys())
def test_routes(ids: list[list[int]], num_experts: int, dtype: torch.dtype, device: str) -> None:
    tensor = torch.tensor(ids, dtype=dtype, device=device)
    check_route(tensor, num_experts)
    check_permute(
        randn(len(ids), 5, dtype=torch.bfloat16, device=device),
        tensor,
        torch.rand(tensor.shape, device=device),
        num_experts,
    )
    check_unpermute(random_rows(tensor, num_experts, 5, torch.bfloat16), tensor, num_experts)


def test_by_hand(device: str) -> None:
    ids = torch.tensor([[1, 0], [2, 1], [0, 2]], device=device)
    x = torch.tensor([[10.0], [11.0], [12.0]], device=device)
    probs = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], device=device)
    permuted = permute(x, ids, probs, 2)  # expert 2 lives elsewhere
    assert permuted.counts.tolist() == [2, 2]
    assert permuted.x.tolist() == [[10.0], [12.0], [10.0], [11.0], [0.0], [0.0]]
    assert torch.equal(permuted.probs, torch.tensor([0.2, 0.5, 0.1, 0.4, 0.0, 0.0], device=device))
    assert permuted.routing.slot_to_row.tolist() == [[2, 0], [-1, 3], [1, -1]]
    assert permuted.routing.row_to_slot.tolist() == [1, 4, 0, 3, -1, -1]
    assert unpermute(permuted.x, permuted.routing).tolist() == [[20.0], [11.0], [12.0]]


@pytest.mark.parametrize("choices", range(1, 7))
def test_any_number_of_choices(choices: int, device: str) -> None:
    ids = torch.stack([torch.randperm(6)[:choices] for _ in range(33)]).to(device)
    check_route(ids, 6)
    check_permute(randn(33, 4, dtype=torch.float32, device=device), ids, torch.rand(33, choices, device=device), 6)
    check_unpermute(random_rows(ids, 6, 4, torch.float32), ids, 6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    ids = random_ids(40, 4, 5, device)
    x = randn(40, 7, dtype=dtype, device=device)
    for probs_dtype in DTYPES:
        check_permute(x, ids, randn(40, 4, dtype=probs_dtype, device=device), 5)
    check_unpermute(random_rows(ids, 5, 7, dtype), ids, 5)


@pytest.mark.parametrize("how", STRIDES | EXPANDED)
def test_strides(how: str, device: str) -> None:
    as_given = (STRIDES | EXPANDED)[how]
    x = as_given(randn(12, 9, dtype=torch.bfloat16, device=device))
    probs = as_given(torch.rand(12, 3, device=device))
    plain = random_ids(12, 3, 4, device)
    ids = {
        "transposed": plain.t().contiguous().t(),
        "permuted": plain.t().contiguous().t(),
        "every-second-column": plain.repeat_interleave(2, 1)[:, ::2],
        "every-second-row": plain.repeat_interleave(2, 0)[::2],
        "one-row": plain[:1].expand(12, 3),
        "one-column": plain[:, :1].expand(12, 3),
        "one-element": plain[0, 0].expand(12, 3),
    }.get(how, plain)
    check_route(ids, 4)
    check_permute(x, ids, probs, 4)
    y = random_rows(ids, 4, 9, torch.bfloat16)
    check_unpermute(as_given(y) if how in STRIDES else as_given(torch.ones_like(y)), ids, 4)


def test_the_sum_over_choices_is_taken_in_fp32(device: str) -> None:
    """1 + 2^-8 + 2^-8 is 1 in bf16 if every step is rounded, 1 + 2^-7 if only the last one is."""
    ids = torch.tensor([[0, 1, 2]], device=device)
    y = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16, device=device)
    assert unpermute(y, route(ids, 3)).item() == 1 + 2.0**-7


def test_the_sum_over_choices_is_taken_in_their_order(device: str) -> None:
    """2^24 + 1 + 1 is 2^24 in fp32, 1 + 1 + 2^24 is not, whatever the order of the experts."""
    y = torch.tensor([[2.0**24], [1.0], [1.0]], device=device)
    big_first, big_last = torch.tensor([[0, 1, 2]], device=device), torch.tensor([[1, 2, 0]], device=device)
    assert unpermute(y, route(big_first, 3)).item() == 2.0**24
    assert unpermute(y, route(big_last, 3)).item() == 2.0**24 + 2


def test_there_and_back(device: str) -> None:
    """Every token comes back as often as it was sent."""
    ids = random_ids(50, 3, 6, device)
    x = torch.arange(50.0, device=device)[:, None].expand(50, 4)
    permuted = permute(x, ids, torch.ones(50, 3, device=device), 6)
    assert torch.equal(unpermute(permuted.x, permuted.routing), x * (ids < 6).sum(1, keepdim=True))


@pytest.mark.parametrize("choices", [0, 1, 3])
def test_no_tokens_or_no_choices(choices: int, device: str) -> None:
    for num_tokens in (0, 4) if choices == 0 else (0,):
        ids = torch.empty(num_tokens, choices, dtype=torch.int64, device=device)
        x = torch.ones(num_tokens, 4, device=device, requires_grad=True)
        probs = torch.ones(num_tokens, choices, device=device, requires_grad=True)
        permuted = permute(x, ids, probs, 3)
        assert permuted.x.shape == (0, 4)
        assert permuted.probs.shape == (0,)
        assert permuted.counts.tolist() == [0, 0, 0]
        out = unpermute(permuted.x, permuted.routing)
        assert torch.equal(out, torch.zeros_like(x))
        check_values(permuted.x.detach(), out.detach(), permuted.routing)
        (out.sum() + permuted.probs.sum()).backward()
        assert torch.equal(x.grad, torch.zeros_like(x))
        assert torch.equal(probs.grad, torch.zeros_like(probs))


def test_no_columns(device: str) -> None:
    ids = random_ids(4, 2, 3, device)
    permuted = check_permute(torch.ones(4, 0, device=device), ids, torch.ones(4, 2, device=device), 3)
    out = unpermute(permuted.x, permuted.routing)
    assert out.shape == (4, 0)
    check_values(permuted.x, out, permuted.routing)


@pytest.mark.usefixtures("many_threads")
def test_bit_identical_from_run_to_run(device: str) -> None:
    ids = random_ids(2000, 4, 8, device)
    x = randn(2000, 16, dtype=torch.float32, device=device).requires_grad_()
    probs = torch.rand(2000, 4, device=device).requires_grad_()
    weights = randn(8000, 16, dtype=torch.float32, device=device)

    def run() -> tuple[Tensor, ...]:
        permuted = permute(x, ids, probs, 8)
        out = unpermute(permuted.x * weights, permuted.routing)
        gradients = torch.autograd.grad(out.square().sum() + permuted.probs.square().sum(), (x, probs))
        return permuted.routing.row_to_slot, permuted.routing.slot_to_row, permuted.x, permuted.probs, out, *gradients

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@given(
    st.integers(1, 5).flatmap(
        lambda choices: st.integers(1, 6).flatmap(
            lambda experts: st.tuples(
                st.lists(
                    st.lists(st.integers(0, experts), min_size=choices, max_size=choices), min_size=1, max_size=12
                ),
                st.just(experts),
            )
        )
    ),
    sizes,
    st.sampled_from(DTYPES),
    strides,
    seeds,
)
def test_any_input(case: tuple[list[list[int]], int], columns: int, dtype: torch.dtype, how: str, seed: int) -> None:
    torch.manual_seed(seed)
    ids, num_experts = torch.tensor(case[0]), case[1]
    check_route(ids, num_experts)
    probs = STRIDES[how](torch.rand(ids.shape))
    check_permute(STRIDES[how](randn(ids.shape[0], columns, dtype=dtype, device="cpu")), ids, probs, num_experts)
    check_unpermute(STRIDES[how](random_rows(ids, num_experts, columns, dtype)), ids, num_experts)


# ---- gradients


@pytest.mark.parametrize(("ids", "num_experts"), ROUTES.values(), ids=ROUTES.keys())
def test_gradcheck(ids: list[list[int]], num_experts: int, device: str) -> None:
    tensor = torch.tensor(ids, device=device)
    x = randn(len(ids), 2, dtype=torch.float64, device=device).requires_grad_()
    probs = randn(*tensor.shape, dtype=torch.float64, device=device).requires_grad_()
    y = randn(tensor.numel(), 2, dtype=torch.float64, device=device).requires_grad_()

    def both(x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        permuted = permute(x, tensor, probs, num_experts)
        return permuted.x, permuted.probs

    def summed(y: Tensor) -> Tensor:
        return unpermute(y, route(tensor, num_experts))

    for run, inputs in ((both, (x, probs)), (summed, (y,))):
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(run, inputs, fast_mode=tensor.numel() > 100)  # else one by one, which takes a minute there


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", STRIDES | EXPANDED)
def test_gradients(how: str, dtype: torch.dtype, device: str) -> None:
    """NaN behind the last expert's rows reaches no gradient."""
    as_given = (STRIDES | EXPANDED)[how]
    ids = random_ids(12, 3, 4, device)
    x = randn(12, 9, dtype=dtype, device=device).requires_grad_()
    probs = torch.rand(12, 3, device=device).requires_grad_()
    permuted = permute(x, ids, probs, 4)
    if how in EXPANDED:
        d_rows = as_given(randn(36, 9, dtype=dtype, device=device))
    else:
        d_rows = as_given(random_rows(ids, 4, 9, dtype))
    d_probs = random_rows(ids, 4, 1, torch.float32)[:, 0]
    with unchanged(x, probs, d_rows, d_probs):
        dx, dp = torch.autograd.grad((permuted.x, permuted.probs), (x, probs), (d_rows, d_probs))
    assert (dx.dtype, dp.dtype) == (dtype, torch.float32)
    exact, magnitude = exact_unpermute(d_rows, ids, 4), exact_unpermute(d_rows.abs(), ids, 4)
    assert_rounded_once(dx, exact, magnitude, terms=3)
    _, slot_to_row, _ = exact_route(ids.tolist(), 4)
    expected = torch.tensor(
        [[d_probs[row].item() if row >= 0 else 0.0 for row in rows] for rows in slot_to_row], device=device
    )
    assert torch.equal(dp, expected)

    y = random_rows(ids, 4, 9, dtype).requires_grad_()
    d_out = as_given(randn(12, 9, dtype=dtype, device=device))
    (dy,) = torch.autograd.grad(unpermute(y, permuted.routing), y, d_out)
    assert torch.equal(dy, check_permute(d_out, ids, probs.detach(), 4).x)


def test_only_wanted_gradients_come(device: str) -> None:
    ids = random_ids(4, 2, 3, device, elsewhere=False)
    x, probs = torch.ones(4, 5, device=device, requires_grad=True), torch.ones(4, 2, device=device)
    permuted = permute(x, ids, probs, 3)
    assert not permuted.probs.requires_grad
    permuted.x.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_autocast_leaves_the_dtype_alone(device: str) -> None:
    ids = random_ids(20, 3, 4, device)
    x, probs = randn(20, 5, dtype=torch.float32, device=device), torch.rand(20, 3, device=device)
    plain = permute(x, ids, probs, 4)
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = permute(x, ids, probs, 4)
        out = unpermute(cast.x, cast.routing)
    assert torch.equal(cast.x, plain.x)
    assert torch.equal(cast.probs, plain.probs)
    assert torch.equal(out, unpermute(plain.x, plain.routing))


# ---- refusals


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, -1]], "top_k_ids: wanted ids from 0 to num_experts = 3, got -1 to 0"),
        ([[4, 1]], "top_k_ids: wanted ids from 0 to num_experts = 3, got 1 to 4"),
        (
            [[0, 1], [2**31 - 1, -(2**31)]],
            "top_k_ids: wanted ids from 0 to num_experts = 3, got -2147483648 to 2147483647",
        ),
    ],
)
def test_ids_out_of_range_on_the_cpu(ids: list[list[int]], message: str) -> None:
    for dtype in (torch.int32, torch.int64):
        tensor = torch.tensor(ids, dtype=dtype)
        with pytest.raises(ValueError, match=message):
            route(tensor, 3)
        with pytest.raises(ValueError, match=message):
            permute(torch.ones(len(ids), 2), tensor, torch.ones(len(ids), 2), 3)


@pytest.mark.gpu
@needs_cuda
def test_ids_out_of_range_on_a_device_count_as_elsewhere() -> None:
    routing = route(torch.tensor([[0, -1], [4, 1], [2**31 - 1, -(2**31)]], device="cuda"), 3)
    assert routing.counts.tolist() == [1, 1, 0]
    assert routing.slot_to_row.tolist() == [[0, -1], [-1, 1], [-1, -1]]
    assert routing.row_to_slot.tolist() == [0, 3, -1, -1, -1, -1]


@pytest.mark.gpu
@needs_cuda
def test_no_host_synchronisation() -> None:
    ids = random_ids(30, 2, 4, "cuda")
    x = randn(30, 8, dtype=torch.bfloat16, device="cuda").requires_grad_()
    probs = torch.rand(30, 2, device="cuda", requires_grad=True)
    with no_synchronisation():
        permuted = permute(x, ids, probs, 4)
        out = unpermute(permuted.x, permuted.routing)
        (out.sum() + permuted.probs.sum()).backward()


BAD_ARGUMENTS: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "x-int": ({"x": torch.ones(4, 3).int()}, TypeError, "x: wanted a dtype of .*, got int32"),
    "x-1d": ({"x": torch.ones(4)}, ValueError, r"x: wanted shape \(T, H\) = \(any, any\), got \(4,\)"),
    "ids-rows": ({"top_k_ids": torch.zeros(5, 2).int()}, ValueError, r"top_k_ids: wanted shape \(T, k\) = \(4, any\)"),
    "ids-1d": ({"top_k_ids": torch.zeros(4).int()}, ValueError, r"top_k_ids: wanted shape \(T, k\)"),
    "ids-float": (
        {"top_k_ids": torch.zeros(4, 2)},
        TypeError,
        "top_k_ids: wanted dtype int32 or int64, got torch.float32",
    ),
    "ids-bool": ({"top_k_ids": torch.zeros(4, 2).bool()}, TypeError, "top_k_ids: wanted dtype int32 or int64"),
    "ids-device": (
        {"top_k_ids": torch.zeros(4, 2, dtype=torch.int32, device="meta")},
        ValueError,
        "top_k_ids: wanted a tensor on cpu, got one on meta",
    ),
    "probs-shape": ({"top_k_probs": torch.ones(4, 3)}, ValueError, r"top_k_probs: wanted shape \(T, k\) = \(4, 2\)"),
    "probs-int": ({"top_k_probs": torch.ones(4, 2).int()}, TypeError, "top_k_probs: wanted a dtype of .*, got int32"),
    "probs-device": (
        {"top_k_probs": torch.ones(4, 2, device="meta")},
        ValueError,
        "top_k_probs: wanted a tensor on cpu",
    ),
    "no-experts": ({"num_experts": 0}, ValueError, "num_experts: wanted an int >= 1, got 0"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_arguments(changes: dict[str, object], error: type[Exception], message: str) -> None:
    good = {
        "x": torch.ones(4, 3),
        "top_k_ids": torch.zeros(4, 2, dtype=torch.int32),
        "top_k_probs": torch.ones(4, 2),
        "num_experts": 2,
    }
    permute(**good)
    with pytest.raises(error, match=message):
        permute(**good | changes)


def test_bad_arguments_of_route() -> None:
    with pytest.raises(TypeError, match="top_k_ids: wanted dtype int32 or int64, got torch.float32"):
        route(torch.zeros(4, 2), 2)
    with pytest.raises(ValueError, match=r"top_k_ids: wanted shape \(T, k\) = \(any, any\), got \(4,\)"):
        route(torch.zeros(4, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="num_experts: wanted an int >= 1, got 0"):
        route(torch.zeros(4, 2, dtype=torch.int32), 0)


def test_bad_arguments_of_unpermute() -> None:
    routing = route(torch.zeros(4, 2, dtype=torch.int32), 2)
    with pytest.raises(TypeError, match="y: wanted a dtype of .*, got int32"):
        unpermute(torch.ones(8, 3).int(), routing)
    with pytest.raises(ValueError, match=r"y: wanted shape \(T \* k, H\) = \(8, any\), got \(4, 3\)"):
        unpermute(torch.ones(4, 3), routing)
    with pytest.raises(ValueError, match="y: wanted a tensor on cpu, got one on meta"):
        unpermute(torch.ones(8, 3, device="meta"), routing)


# ---- registration

OPCHECK_INPUTS: dict[str, Callable[[str], tuple[Tensor, int, Tensor]]] = {
    "plain": lambda d: (random_ids(5, 2, 3, d), 3, torch.randn(5, 4, device=d)),
    "no tokens": lambda d: (random_ids(0, 2, 3, d), 3, torch.randn(0, 4, device=d)),
    "one": lambda d: (random_ids(1, 1, 1, d), 1, torch.randn(1, 1, device=d)),
    "strided": lambda d: (random_ids(2, 5, 3, d).t(), 3, torch.randn(4, 5, device=d).t()),
    "int64": lambda d: (random_ids(5, 2, 3, d).long(), 3, torch.randn(5, 4, device=d)),
}


@pytest.mark.parametrize("case", OPCHECK_INPUTS)
def test_opcheck(case: str, device: str) -> None:
    ids, num_experts, x = OPCHECK_INPUTS[case](device)
    ops = torch.ops.grouped_experts
    torch.library.opcheck(ops.route.default, (ids, num_experts))
    routing = route(ids, num_experts)
    maps = routing.slot_to_row, routing.row_to_slot
    torch.library.opcheck(ops.permute.default, (x.requires_grad_(), *maps))
    y = torch.randn(x.shape[1], ids.numel(), device=device).t().requires_grad_()
    torch.library.opcheck(ops.unpermute.default, (y, *maps))
    torch.library.opcheck(
        ops.unpermute_with_values.default, (y.detach(), torch.rand(ids.numel(), device=device), *maps)
    )
