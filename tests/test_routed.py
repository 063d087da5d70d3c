"""The routed layer, tokens in and tokens out: equal to its rows in their experts' order, and to a plain fp64 reference.

`routed_experts`, GroupedMLP with a Routing, and MoE, which is made of it.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from inputs import ACTIVATIONS, STRIDES, unchanged
from layer import (
    WEIGHTS,
    Ops,
    Results,
    assert_equal_sums,
    assert_right,
    assert_same,
    gradients,
    rand,
    subsets,
)
from routed import Case, assert_as_by_definition, backward, by_definition, by_function, by_rows, make_case, random_case
from torch import Tensor

import grouped_experts
from grouped_experts import GroupedMLP, MoE, routed_experts
from grouped_experts.ops import route
from grouped_experts.ops.families import has_triton, use_family

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


# ---- values


SEEDS = {FP32: range(100), BF16: range(100, 200), FP64: range(200, 300)}


@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("dtype", SEEDS, ids=str)
def test_random_routings(dtype: torch.dtype, quarter: int, device: str) -> None:
    """A hundred of a dtype, each as its materialised rows are, to the bit, and as the definition says."""
    for seed in SEEDS[dtype][quarter::4]:
        torch.manual_seed(seed)
        case = random_case(seed, dtype, device)
        with unchanged(*case.tensors.values(), case.ids, case.dy):
            actual = by_function(case)
        assert_same(actual, by_rows(case))
        for name, t in case.tensors.items():
            assert actual[name].dtype == t.dtype, (seed, name)
        assert actual["y"].dtype == dtype
        nobody = case.ids.eq(case.num_experts).all(1)
        assert not actual["y"][nobody].any(), seed
        assert not actual["x"][nobody].any(), seed
        if case.probs is not None:
            assert not actual["probs"][case.ids == case.num_experts].any(), seed
        for e in set(range(case.num_experts)) - set(case.ids.flatten().tolist()):
            assert not any(actual[name][e].any() for name in case.weights), (seed, e)
        assert_as_by_definition(actual, case)


def test_random_routings_reach_what_they_are_meant_to() -> None:
    cases = [random_case(seed, dtype, "cpu") for dtype, seeds in SEEDS.items() for seed in seeds]
    assert {case.activation for case in cases} == set(ACTIVATIONS)
    assert {case.ids.dtype for case in cases} == {torch.int32, torch.int64}
    assert any(case.ids.shape[0] == 0 for case in cases)
    assert any(case.probs is None for case in cases)
    assert any("fc1_bias" in case.weights for case in cases)
    assert any(case.ids.numel() and case.ids.eq(case.num_experts).all() for case in cases)
    assert any(case.x.isnan().any() and not case.x.isnan().all() for case in cases)
    assert any(case.ids.shape[1] == case.num_experts > 1 for case in cases)
    assert any(len(set(row)) < len(row) for case in cases for row in case.ids.tolist())


@pytest.mark.skipif(torch.cuda.is_available() or not has_triton(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", [FP32, torch.float16], ids=str)
def test_portable_kernels(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 2], [3, 3], [2, 2], [3, 0], [0, 1]])
    case = make_case(ids, 3, 12, 5, dtype=dtype)
    with torch.no_grad():
        case.x[1] = torch.nan
    with use_family("portable"):
        actual = by_function(case)
        assert_same(actual, by_rows(case))
    assert_as_by_definition(actual, case)


@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_ids_and_probs_and_tokens_of_any_strides(id_dtype: torch.dtype, how: str, device: str) -> None:
    ids = torch.randint(0, 5, (9, 3), device=device)
    case = make_case(ids, 4, dtype=BF16)
    expected = by_function(case)
    floats = STRIDES[how](ids.float())
    strided = torch.zeros(floats.untyped_storage().nbytes() // 4, dtype=id_dtype, device=device)
    strided = strided.as_strided(floats.shape, floats.stride(), floats.storage_offset()).copy_(ids)
    other = replace(
        case,
        x=STRIDES[how](case.x.detach()).requires_grad_(),
        ids=strided,
        probs=STRIDES[how](case.probs.detach()).requires_grad_(),
        dy=STRIDES[how](case.dy),
    )
    if how != "contiguous" and how != "base-off-by-one":
        assert not strided.is_contiguous()
    assert_same(by_function(other), expected)


def test_duplicates_add_up(device: str) -> None:
    """An expert that is chosen twice with p and q is one that is chosen with p + q."""
    twice = make_case(torch.tensor([[1, 1], [0, 0]], device=device), 2, dtype=FP64, probs_dtype=FP64)
    once = replace(twice, ids=twice.ids[:, :1], probs=twice.probs.detach().sum(1, keepdim=True).requires_grad_())
    actual, expected = by_function(twice), by_function(once)
    assert torch.equal(actual["probs"][:, 0], actual["probs"][:, 1])
    actual["probs"] = actual["probs"][:, :1]
    assert_equal_sums(actual, expected)


def test_choices_are_added_in_their_order(device: str) -> None:
    """In fp32, rounded once: 256 + 1 + 1 is 258 in bf16, but 256 if every sum is rounded to it."""
    w1 = torch.ones(3, 1, 1, dtype=BF16, device=device)
    w2 = torch.tensor([256.0, 1, 1], dtype=BF16, device=device).view(3, 1, 1)
    x = torch.ones(1, 1, dtype=BF16, device=device)
    y = routed_experts(x, torch.tensor([[0, 1, 2]], device=device), None, w1, w2, activation="squared_relu")
    assert y.item() == 258


# ---- the module


@pytest.mark.parametrize("with_probs", [False, True], ids=["no-probs", "probs"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_module_and_function_agree(dtype: torch.dtype, with_probs: bool, device: str) -> None:
    ids = torch.randint(0, 4, (11, 2), device=device)
    case = make_case(ids, 3, dtype=dtype, probs_dtype=FP32 if with_probs else None)
    layer = case.layer()
    y = layer(case.x, route(ids, 3), case.probs)
    assert_same(replace(case, weights=dict(layer.named_parameters())).results(y), by_function(case))


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "activation": "geglu"}, {"shared_intermediate_size": 5}], ids=str
)
def test_moe_is_its_router_and_the_function(options: dict[str, Any], device: str) -> None:
    moe = MoE(6, 4, 5, 2, device=device, **options)
    x = rand(13, 6, dtype=FP32, device=device)
    routed = moe.router(x)
    weights = dict(moe.experts.named_parameters())
    y = routed_experts(x, routed.top_k_ids, routed.top_k_probs, **weights, activation=moe.experts.activation)
    if moe.shared_expert is not None:
        y = y + moe.shared_expert(x, [13])
    out = moe(x)
    assert torch.equal(out.y, y)
    counts = torch.bincount(routed.top_k_ids.flatten(), minlength=5)
    assert torch.equal(out.tokens_per_expert, counts.int())
    wanted = [x, *moe.parameters()]
    for actual, expected in zip(*(torch.autograd.grad(t.sum(), wanted) for t in (out.y, y)), strict=True):
        assert torch.equal(actual, expected)


def test_no_rows_are_copied_by_the_moe_layer(device: str) -> None:
    """Neither x in its experts' order, nor a sum over the choices but the layer's own."""
    moe = MoE(6, 4, 5, 2, device=device)
    with Ops() as ops:
        moe(rand(13, 6, dtype=FP32, device=device))
    assert "permute" not in ops.names  # not even of probs
    assert ops.names.count("unpermute") == 1
    assert "gather_rows" not in ops.names


def test_state_of_the_moe_layer(device: str) -> None:
    """Names and shapes that checkpoints have, and which a step leaves alone."""
    moe = MoE(6, 4, 5, 2, bias=True, balancing_bias=True, shared_intermediate_size=3, device=device)
    mlp = {"fc1_weight": (8, 6), "fc2_weight": (6, 4), "fc1_bias": (8,), "fc2_bias": (6,)}
    shared = {"fc1_weight": (6, 6), "fc2_weight": (6, 3), "fc1_bias": (6,), "fc2_bias": (6,)}
    expected = {"router.weight": (5, 6), "router.balancing_bias": (5,)}
    expected |= {f"experts.{name}": (5, *shape) for name, shape in mlp.items()}
    expected |= {f"shared_expert.{name}": (1, *shape) for name, shape in shared.items()}
    before = copy.deepcopy(moe.state_dict())
    assert {name: tuple(t.shape) for name, t in before.items()} == expected
    moe(rand(7, 6, dtype=FP32, device=device)).y.sum().backward()
    assert_same(dict(moe.state_dict()), before)
    other = MoE(6, 4, 5, 2, bias=True, balancing_bias=True, shared_intermediate_size=3, device=device)
    other.load_state_dict(before)
    x = rand(7, 6, dtype=FP32, device=device)
    assert torch.equal(other(x).y, moe(x).y)


# ---- only what is asked for


@pytest.mark.parametrize("form", ["function", "module", "deferred"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_subsets_of_wanted_gradients(bias: bool, form: str, device: str) -> None:
    """Each is, to the bit, that of the run in which all are wanted; the others are None."""
    case = make_case(torch.randint(0, 4, (20, 2), device=device), 3, bias=bias)
    layer = case.layer(defer_wgrad=form == "deferred")
    full = by_function(case)
    for wanted in subsets(list(case.tensors)):
        tensors = {"x": case.x, "probs": case.probs} | (
            case.weights if form == "function" else dict(layer.named_parameters())
        )
        for name, t in tensors.items():
            t.grad = None
            t.requires_grad_(name in wanted)
        if form == "function":
            y = routed_experts(case.x, case.ids, case.probs, **case.weights)
        else:
            y = layer(case.x, route(case.ids, 3), case.probs)
        assert y.requires_grad == bool(wanted)
        if wanted:
            y.backward(case.dy)
            layer.backward_dw()
        actual = {"y": y.detach()} | {name: t.grad for name, t in tensors.items()}
        assert_same(actual, {name: g if name in wanted or name == "y" else None for name, g in full.items()})


def test_products_run_only_for_wanted_gradients(device: str) -> None:
    case = make_case(torch.randint(0, 4, (7, 2), device=device), 3, bias=False)

    def products(*wanted: str) -> list[str]:
        for name, t in case.tensors.items():
            t.requires_grad_(name in wanted)
        y = routed_experts(case.x, case.ids, case.probs, **case.weights)
        with Ops() as ops:
            y.backward(case.dy)
        return sorted(name for name in ops.names if "grouped" in name or "fc2_dgrad" in name)

    assert products("x") == ["fc2_dgrad_activation", "m_grouped_gemm"]
    assert products("probs") == ["fc2_dgrad_activation"]
    assert products("fc1_weight") == ["fc2_dgrad_activation", "k_grouped_gemm"]
    assert products("fc2_weight") == ["k_grouped_gemm"]


def test_without_gradients(device: str) -> None:
    case = make_case(torch.randint(0, 4, (20, 2), device=device), 3)  # more than have kernels of their own
    expected = by_function(case)["y"]
    with torch.no_grad():
        y = routed_experts(case.x, case.ids, case.probs, **case.weights)
    assert not y.requires_grad
    assert torch.equal(y, expected)
    assert kept_bytes(lambda: routed_experts(*without_gradients(case)), case) == 0


def without_gradients(case: Case) -> tuple[Tensor | None, ...]:
    probs = None if case.probs is None else case.probs.detach()
    return case.x.detach(), case.ids, probs, *(w.detach() for w in case.weights.values())


def kept_bytes(run: Callable[[], Tensor], case: Case) -> int:
    """Of the distinct storages that the graph keeps, whole, but for those of the weights."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run()
    assert y.shape == case.x.shape
    for w in case.weights.values():
        kept.pop(w.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parametrize(("hidden", "inner"), [(1536, 256), (2048, 768)])
@pytest.mark.parametrize("form", ["function", "module", "deferred"])
def test_kept_memory_is_one_x_and_one_h(form: str, hidden: int, inner: int, device: str) -> None:
    """x of the tokens and h of the rows; a prob and two integers a row are a hundredth."""
    tokens, choices = 64, 8
    ids = torch.stack([torch.randperm(choices) for _ in range(tokens)]).to(device)
    weights = {
        "fc1_weight": torch.zeros(choices, 2 * inner, hidden, dtype=BF16, device=device, requires_grad=True),
        "fc2_weight": torch.zeros(choices, hidden, inner, dtype=BF16, device=device, requires_grad=True),
    }
    x = rand(tokens, hidden, dtype=BF16, device=device)
    case = Case(x, ids, rand(tokens, choices, dtype=FP32, device=device), weights, x.detach(), "swiglu")
    layer = case.layer(defer_wgrad=form == "deferred")
    least = 2 * tokens * hidden + 4 * tokens * choices * inner

    def run() -> Tensor:
        if form == "function":
            return routed_experts(x, ids, case.probs, **weights)
        return layer(x, route(ids, choices), case.probs)

    assert least <= kept_bytes(run, case) <= 1.02 * least
    for w in weights.values():
        w.requires_grad_(False)
    if form == "function":
        assert kept_bytes(run, case) <= 1.03 * 4 * tokens * choices * inner, "x is kept without need"


def test_dropped_outputs_free_what_they_kept(device: str) -> None:
    case = make_case(torch.randint(0, 4, (7, 2), device=device), 3)

    class Packed(list[Tensor]):
        """A list that a weak reference can watch."""

    kept: list[weakref.ref[Packed]] = []

    def pack(t: Tensor) -> Packed:
        packed = Packed([t])
        kept.append(weakref.ref(packed))
        return packed

    for _ in range(10):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0]):
            routed_experts(case.x, case.ids, case.probs, **case.weights)
    gc.collect()
    assert len(kept) >= 30
    assert not any(ref() is not None for ref in kept), "a dropped graph is kept alive"


# ---- graph


def test_retained_graph_gives_the_same_numbers_again(device: str) -> None:
    case = make_case(torch.randint(0, 4, (7, 2), device=device), 3)
    z = case.x.detach().requires_grad_()
    x = z.exp()  # which that saves
    wanted = [z, case.probs, *case.weights.values()]
    with unchanged(x, case.ids, *case.tensors.values(), case.dy):
        y = routed_experts(x, case.ids, case.probs, **case.weights)
        first = torch.autograd.grad(y, wanted, case.dy, retain_graph=True)
        second = torch.autograd.grad(y, wanted, case.dy)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, wanted, case.dy)


@pytest.mark.parametrize("of", ["x", "probs", "fc1_weight"])
def test_double_backward_raises(of: str, device: str) -> None:
    case = make_case(torch.randint(0, 4, (7, 2), device=device), 3)
    y = routed_experts(case.x, case.ids, case.probs, **case.weights)
    (gradient,) = torch.autograd.grad(y, case.tensors[of], torch.ones_like(y), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        gradient.square().sum().backward()


def test_output_may_be_changed_in_place(device: str) -> None:
    case = make_case(torch.randint(0, 4, (7, 2), device=device), 3)
    doubled = by_function(replace(case, dy=2 * case.dy))
    y = routed_experts(case.x, case.ids, case.probs, **case.weights)
    assert not y._is_view()
    actual = case.results(y.mul_(2))
    assert_same(actual, doubled | {"y": 2 * doubled["y"]})


def test_x_changed_between_forward_and_backward_raises(device: str) -> None:
    case = make_case(torch.randint(0, 4, (7, 2), device=device), 3)
    y = routed_experts(case.x, case.ids, case.probs, **case.weights)
    with torch.no_grad():
        case.x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_ids_and_probs_may_be_changed_after_the_forward(device: str) -> None:
    """Neither is kept: the rows' own probs are."""
    case = make_case(torch.randint(0, 4, (7, 2), device=device), 3)
    expected = by_function(case)
    y = routed_experts(case.x, case.ids, case.probs, **case.weights)
    case.ids.fill_(0)
    with torch.no_grad():
        case.probs.fill_(torch.nan)
    assert_same(case.results(y), expected)


def test_gradcheck(device: str) -> None:
    case = make_case(
        torch.tensor([[0, 2], [1, 1], [2, 2], [0, 1]], device=device), 2, 3, 2, dtype=FP64, probs_dtype=FP64
    )

    def function(x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        return routed_experts(x, case.ids, probs, *weights)

    assert torch.autograd.gradcheck(function, tuple(case.tensors.values()))


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_repeats_are_equal_to_the_bit(dtype: torch.dtype, device: str) -> None:
    case = make_case(torch.randint(0, 9, (200, 3), device=device), 8, 64, 32, dtype=dtype)
    first = by_function(case)
    for _ in range(20):
        assert_same(by_function(case), first)


# ---- deferred weight gradients


def deferred_case(dtype: torch.dtype, device: str, bias: bool = True) -> tuple[Case, GroupedMLP]:
    case = make_case(torch.randint(0, 4, (7, 2), device=device), 3, dtype=dtype, bias=bias)
    return case, case.layer(defer_wgrad=True)


def another(case: Case, tokens: int) -> Case:
    """Of the same weights."""
    ids = torch.randint(0, 4, (tokens, 2), device=case.x.device)
    return replace(make_case(ids, 3, dtype=case.x.dtype), weights=case.weights)


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_one_deferred_micro_batch_equals_the_plain_run_to_the_bit(bias: bool, dtype: torch.dtype, device: str) -> None:
    case, layer = deferred_case(dtype, device, bias)
    expected = by_function(case)
    y = layer(case.x, route(case.ids, 3), case.probs)
    assert layer.pending_wgrads == 0
    with Ops() as ops:
        y.backward(case.dy)
    assert ops.products() == []
    assert layer.pending_wgrads == 1
    assert all(p.grad is None for p in layer.parameters())
    assert torch.equal(case.x.grad, expected["x"])
    assert torch.equal(case.probs.grad, expected["probs"])
    layer.backward_dw()
    assert layer.pending_wgrads == 0
    assert_same(gradients(layer), {name: expected[name] for name in case.weights})


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_several_deferred_micro_batches(dtype: torch.dtype, device: str) -> None:
    """Of other numbers of tokens, one of none, and one that came sorted: into one sum a weight."""
    first, layer = deferred_case(dtype, device)
    cases = [first, another(first, 3), another(first, 0), another(first, 20)]
    for case in cases:
        backward(layer, case)
    assert layer.pending_wgrads == len(cases)
    rows = rand(5, 6, dtype=dtype, device=device, requires_grad=False)
    layer(rows, [2, 0, 3]).backward(rows)
    sorted_ids = torch.tensor([[0], [0], [2], [2], [2]], device=device)
    cases.append(replace(first, x=rows, ids=sorted_ids, probs=None, dy=rows))
    with Ops() as ops:
        grouped_experts.backward_dw(torch.nn.Sequential(layer))
    assert ops.products().count("k_grouped_gemm") == 2
    assert layer.pending_wgrads == 0

    def total(results: Callable[[Case], Results]) -> Results:
        each = [results(case) for case in cases]
        return {name: torch.stack([r[name] for r in each]).sum(0) for name in WEIGHTS}

    exact = total(lambda case: by_definition(case, FP64))
    assert_right(gradients(layer), [total(lambda case: by_definition(case, dtype))], exact, dtype)


def test_a_deferred_layer_without_wanted_weights(device: str) -> None:
    """Frozen weights leave nothing pending; one that is frozen later is not delivered; probs alone are enough."""
    case, layer = deferred_case(FP32, device)
    expected = by_function(case)
    layer.requires_grad_(False)
    case.x.requires_grad_(False)
    backward(layer, case)
    assert layer.pending_wgrads == 0
    assert case.x.grad is None
    assert torch.equal(case.probs.grad, expected["probs"])
    layer.requires_grad_(True)
    backward(layer, case)
    layer.fc1_weight.requires_grad_(False)
    layer.backward_dw()
    assert layer.fc1_weight.grad is None
    assert torch.equal(layer.fc2_weight.grad, expected["fc2_weight"])


def test_a_backward_that_leaves_the_weights_out_queues_nothing(device: str) -> None:
    case, layer = deferred_case(FP32, device)
    y = layer(case.x, route(case.ids, 3), case.probs)
    torch.autograd.grad(y, case.probs, case.dy)
    assert layer.pending_wgrads == 0


def test_deferred_work_notices_that_x_was_changed(device: str) -> None:
    case, layer = deferred_case(FP32, device)
    backward(layer, case)
    with torch.no_grad():
        case.x.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place after the backward"):
        layer.backward_dw()
    assert layer.pending_wgrads == 1


# ---- autocast, wider weights


@pytest.mark.parametrize("form", ["function", "module", "deferred"])
@pytest.mark.parametrize("x_dtype", [BF16, FP32], ids=str)
def test_autocast(x_dtype: torch.dtype, form: str, device: str) -> None:
    """Computes in bf16, as from copies in it; gradients come in the dtype of what they belong to."""
    ids = torch.randint(0, 4, (7, 2), device=device)
    case = make_case(ids, 3, dtype=x_dtype, weight_dtype=FP32)
    layer = case.layer(defer_wgrad=form == "deferred")
    weights = case.weights if form == "function" else dict(layer.named_parameters())
    with torch.autocast(device, BF16):
        if form == "function":
            y = routed_experts(case.x, ids, case.probs, **weights)
        else:
            y = layer(case.x, route(ids, 3), case.probs)
    y.backward(case.dy.to(BF16))
    layer.backward_dw()
    actual = {"y": y.detach()} | {name: t.grad for name, t in (case.tensors | weights).items()}
    x = case.x.detach().to(BF16).requires_grad_()
    rounded = {name: w.detach().to(BF16).float().requires_grad_() for name, w in weights.items()}
    expected = by_function(replace(case, x=x, weights=rounded, dy=case.dy.to(BF16)))
    for name, value in expected.items():
        dtype = {"y": BF16, "x": x_dtype}.get(name, FP32)
        assert actual[name].dtype == dtype, name
        assert torch.equal(actual[name], value.to(dtype)), name


def test_fp32_weights_with_bf16_tokens(device: str) -> None:
    case = make_case(torch.randint(0, 4, (9, 2), device=device), 3, dtype=BF16, weight_dtype=FP32)
    actual = by_function(case)
    assert actual["y"].dtype == actual["x"].dtype == BF16
    assert all(actual[name].dtype == FP32 for name in WEIGHTS)
    assert not torch.equal(actual["fc1_weight"], actual["fc1_weight"].bfloat16().float())
    assert_as_by_definition(actual, case)


# ---- torch.compile


@pytest.mark.filterwarnings(r"ignore:::torch\.")
@pytest.mark.parametrize("form", ["function", "module"])
def test_compiled_in_one_graph_equals_eager(form: str, device: str) -> None:
    """While the number of tokens and the ids change."""
    torch._dynamo.reset()
    case = make_case(torch.randint(0, 4, (8, 2), device=device), 3)
    layer = case.layer()

    def run(x: Tensor, ids: Tensor, probs: Tensor, weights: dict[str, Tensor]) -> Tensor:
        x = x * 2
        if form == "function":
            return routed_experts(x, ids, probs, **weights) + x
        return layer(x, route(ids, 3), probs) + x

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    weights = case.weights if form == "function" else dict(layer.named_parameters())
    for tokens in (8, 21, 0):
        step = replace(another(case, tokens), weights=weights)
        results = [step.results(f(step.x, step.ids, step.probs, weights)) for f in (compiled, run)]
        assert_same(*results)
    torch._dynamo.reset()


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_compiled_without_probs_under_autocast(device: str) -> None:
    torch._dynamo.reset()
    case = make_case(torch.randint(0, 4, (8, 2), device=device), 3, probs_dtype=None)
    compiled = torch.compile(routed_experts, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, routed_experts):
        with torch.autocast(device, BF16):
            y = function(case.x, case.ids, None, **case.weights)
        results.append(case.results(y))
    assert_same(*results)
    torch._dynamo.reset()


# ---- refusals


def good_arguments() -> dict[str, Any]:
    return {
        "x": torch.ones(4, 6),
        "top_k_ids": torch.tensor([[0, 1], [2, 3], [0, 0], [1, 2]]),
        "top_k_probs": torch.ones(4, 2),
        "fc1_weight": torch.ones(3, 10, 6),
        "fc2_weight": torch.ones(3, 6, 5),
        "fc1_bias": torch.ones(3, 10),
        "fc2_bias": torch.ones(3, 6),
    }


IDS = good_arguments()["top_k_ids"]
BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x-list": ({"x": [[1.0]]}, TypeError, "x: wanted a tensor, got list"),
    "x-int": ({"x": torch.ones(4, 6).int()}, TypeError, "x: wanted a dtype of .*, got int32"),
    "x-3d": ({"x": torch.ones(2, 2, 6)}, ValueError, r"x: wanted shape \(T, H\) = \(any, any\), got \(2, 2, 6\)"),
    "x-columns": ({"x": torch.ones(4, 7)}, ValueError, r"fc1_weight: .*\(3, 10, 7\), got \(3, 10, 6\)"),
    "x-wider": ({"x": torch.ones(4, 6).double()}, TypeError, "fc1_weight: wanted the dtype of x, torch.float64, or"),
    "ids-list": ({"top_k_ids": [[0, 1]]}, TypeError, "top_k_ids: wanted a tensor, got list"),
    "ids-float": ({"top_k_ids": IDS.float()}, TypeError, "top_k_ids: wanted dtype int32 or int64, got torch.float32"),
    "ids-int16": ({"top_k_ids": IDS.short()}, TypeError, "top_k_ids: wanted dtype int32 or int64, got torch.int16"),
    "ids-1d": ({"top_k_ids": IDS[:, 0]}, ValueError, r"top_k_ids: wanted shape \(T, k\) = \(any, any\), got \(4,\)"),
    "ids-tokens": ({"top_k_ids": IDS[:3]}, ValueError, r"wanted shape \(T, k\) = \(4, any\), got \(3, 2\)"),
    "ids-beyond": ({"top_k_ids": IDS + 1}, ValueError, "top_k_ids: wanted ids from 0 to num_experts = 3, got 1 to 4"),
    "ids-negative": ({"top_k_ids": IDS - 1}, ValueError, "top_k_ids: wanted ids from 0 to .*, got -1 to 2"),
    "ids-device": ({"top_k_ids": IDS.to("meta")}, ValueError, "wanted a tensor on cpu, got one on meta"),
    "probs-shape": ({"top_k_probs": torch.ones(4, 3)}, ValueError, r"probs: wanted shape .*\(4, 2\), got \(4, 3\)"),
    "probs-rows": ({"top_k_probs": torch.ones(8)}, ValueError, r"probs: wanted shape .*\(4, 2\), got \(8,\)"),
    "probs-int": ({"top_k_probs": torch.ones(4, 2).int()}, TypeError, "probs: wanted a dtype of .*, got int32"),
    "probs-device": ({"top_k_probs": torch.ones(4, 2, device="meta")}, ValueError, "probs: wanted a tensor on cpu"),
    "w1-none": ({"fc1_weight": None}, TypeError, "fc1_weight: wanted a tensor, got NoneType"),
    "w1-2d": ({"fc1_weight": torch.ones(10, 6)}, ValueError, r"fc1_weight: wanted shape \(E, 2I, H\) = .*\(10, 6\)"),
    "w1-no-gate": ({"fc1_weight": torch.ones(3, 5, 6)}, ValueError, r"fc1_weight: .*\(3, 10, 6\), got \(3, 5, 6\)"),
    "w2-experts": ({"fc2_weight": torch.ones(2, 6, 5)}, ValueError, r"fc2_weight: .*\(3, 6, 5\), got \(2, 6, 5\)"),
    "w2-transposed": ({"fc2_weight": torch.ones(3, 5, 6)}, ValueError, r"fc1_weight: .*\(3, 12, 6\), got \(3, 10, 6\)"),
    "w2-narrow": ({"fc2_weight": torch.ones(3, 6, 5).half()}, TypeError, "fc2_weight: wanted the dtype of x"),
    "b1-shape": ({"fc1_bias": torch.ones(3, 5)}, ValueError, r"fc1_bias: .*\(3, 10\), got \(3, 5\)"),
    "b2-device": ({"fc2_bias": torch.ones(3, 6, device="meta")}, ValueError, "fc2_bias: wanted a tensor on cpu"),
    "activation": ({"activation": "relu"}, ValueError, "activation: wanted one of swiglu, .*, got 'relu'"),
    "no-gate-there": ({"activation": "squared_relu"}, ValueError, r"fc1_weight: .*\(3, 5, 6\), got \(3, 10, 6\)"),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    routed_experts(**good_arguments())
    with pytest.raises(error, match=message):
        routed_experts(**good_arguments() | changes)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(4, 6), route(IDS, 5), None), ValueError, "routing: wanted one of 3 experts, got one of 5"),
        ((torch.ones(5, 6), route(IDS, 3), None), ValueError, r"slot_to_row: wanted shape .*\(5, any\), got \(4, 2\)"),
        ((torch.ones(2, 2, 6), route(IDS, 3), None), ValueError, r"x: wanted shape \(T, H\) = \(any, 6\)"),
        ((torch.ones(4, 6), route(IDS, 3), torch.ones(8)), ValueError, r"probs: wanted shape .*\(4, 2\), got \(8,\)"),
        ((torch.ones(4, 6), route(IDS.to("meta"), 3), None), ValueError, "wanted a tensor on cpu, got one on meta"),
    ],
    ids=["experts", "tokens", "masked", "probs", "device"],
)
def test_a_routing_that_does_not_fit_the_module(arguments: Any, error: type[Exception], message: str) -> None:
    layer = GroupedMLP(6, 5, 3)
    layer(torch.ones(4, 6), route(IDS, 3), torch.ones(4, 2))
    with pytest.raises(error, match=message):
        layer(*arguments)
