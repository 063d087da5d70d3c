"""The routed layer of few tokens without gradients: its op, and which calls of the layers take it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Place, needs_cuda, no_synchronisation
from exact import eps
from inputs import ACTIVATIONS, STRIDES, unchanged
from layer import WEIGHTS, Ops
from places import in_every_place, no_interpreter
from routed import Case, by_definition, make_case, random_case
from torch import Tensor
from torch.autograd import forward_ad

from grouped_experts import MoE, routed_experts
from grouped_experts.ops import route
from grouped_experts.ops.families import use_family
from grouped_experts.ops.few_tokens import EXPERTS_FOR_A_SLOT, MOST_SLOTS, few_tokens_op, suits_few_tokens

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def by_op(case: Case) -> Tensor:
    weights = (case.weights.get(name) for name in WEIGHTS)
    with torch.no_grad():
        return few_tokens_op(case.x, case.ids, case.probs, *weights, case.activation)


def assert_right(y: Tensor, case: Case) -> None:
    """Within a few roundings of h and a, and one of y."""
    assert y.dtype == case.x.dtype
    assert y.is_contiguous()
    exact = by_definition(frozen(case), FP64)["y"]
    assert y.shape == exact.shape
    roundings = 64 if y.dtype in (FP32, FP64) else 8  # of every product and sum there
    assert (y.double() - exact).norm() <= roundings * eps(y.dtype) * exact.norm() + 1e-300


def frozen(case: Case) -> Case:
    """Without a wish for gradients."""
    weights = {name: w.detach() for name, w in case.weights.items()}
    return replace(case, x=case.x.detach(), probs=None if case.probs is None else case.probs.detach(), weights=weights)


# ---- values


@in_every_place
def test_random_routings(place: Place) -> None:
    """Duplicates, ids of nobody with NaN in tokens without any other, biases, no probs, no tokens."""
    # The interpreter, which takes seconds for some, has half of them in each dtype.
    for seed in range(place.dtype == FP32, 40, 2) if place.interpreted else range(40):
        torch.manual_seed(seed)
        case = frozen(random_case(seed, place.dtype, place.device))
        tokens = MOST_SLOTS // case.ids.shape[1]
        case = replace(case, x=case.x[:tokens], ids=case.ids[:tokens], dy=case.dy[:tokens])
        case = case if case.probs is None else replace(case, probs=case.probs[:tokens])
        with unchanged(case.x, case.ids, *case.weights.values()):
            y = by_op(case)
        assert not y[case.ids.eq(case.num_experts).all(1)].any(), seed
        assert_right(y, case)


@in_every_place
@pytest.mark.parametrize("size", [(272, 3), (3, 272), (33, 7)], ids=str)
def test_sizes(size: tuple[int, int], place: Place) -> None:
    """On both sides of what a program loads at a time, and no multiple of it; rows that are aligned and others."""
    for activation in place.variants("squared_relu", "swiglu"):
        ids = torch.tensor([[0, 5, 4]], device=place.device)
        case = make_case(ids, 5, *size, dtype=place.dtype, activation=activation)
        assert_right(by_op(case), case)


@in_every_place
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(5, 0), (0, 5), (0, 0)], ids=str)
def test_no_columns(size: tuple[int, int], bias: bool, place: Place) -> None:
    case = make_case(torch.tensor([[0, 3], [2, 1]], device=place.device), 3, *size, dtype=place.dtype, bias=bias)
    assert_right(by_op(case), case)


@in_every_place
def test_nan_of_nobody_s_slots_stays_there(place: Place) -> None:
    """A prob that is not used, an expert that nobody chose, a token without any."""
    case = make_case(torch.tensor([[0, 3], [3, 3]], device=place.device), 3, dtype=place.dtype)
    expected = by_op(case)
    with torch.no_grad():
        case.probs[case.ids == 3] = torch.nan
        case.x[1] = torch.nan
        for w in case.weights.values():
            w[1:] = torch.nan
    y = by_op(case)
    assert torch.equal(y, expected)
    assert not y[1].any()


@in_every_place
def test_nan_and_inf_of_a_choice_reach_its_token_alone(place: Place) -> None:
    case = make_case(torch.tensor([[0, 1], [1, 2]], device=place.device), 3, dtype=place.dtype, bias=False)
    expected = by_op(case)
    with torch.no_grad():
        case.x[0, 1] = torch.nan
    y = by_op(case)
    assert y[0].isnan().all()
    assert torch.equal(y[1], expected[1])
    with torch.no_grad():
        case.x[0, 1] = 0
        case.weights["fc2_weight"][0, 2, 1] = torch.inf
    y = by_op(case)
    assert y[0, 2].isinf()
    assert y[0].isfinite().sum() == y.shape[1] - 1
    assert torch.equal(y[1], expected[1])


@in_every_place
@pytest.mark.parametrize("how", STRIDES)
def test_strides(how: str, place: Place) -> None:
    """Of everything but rows of weights."""
    case = make_case(torch.randint(0, 4, (5, 3), device=place.device), 3, dtype=place.dtype)
    strided = STRIDES[how](case.ids.double())
    ids = torch.zeros(strided.untyped_storage().nbytes() // 8, dtype=torch.int64, device=place.device)
    ids = ids.as_strided(strided.shape, strided.stride(), strided.storage_offset()).copy_(case.ids)
    weights = {name: in_wider_rows(w.detach()) for name, w in case.weights.items()}
    other = replace(case, x=STRIDES[how](case.x.detach()), ids=ids, probs=STRIDES[how](case.probs.detach()))
    assert torch.equal(by_op(replace(other, weights=weights)), by_op(case))


def in_wider_rows(w: Tensor) -> Tensor:
    return torch.full((*w.shape[:-1], w.shape[-1] + 3), torch.nan, dtype=w.dtype, device=w.device)[..., :-3].copy_(w)


def of_ones(place: Place, fc1: list[float], fc2: list[float], probs: list[float]) -> float:
    """y of a token (1, 1, ...) that chose one expert for each number of fc2: sum_e p_e fc2_e relu(sum(fc1))^2."""
    fc1_weight, fc2_weight = (torch.tensor(values, dtype=place.dtype, device=place.device) for values in (fc1, fc2))
    fc1_weight = fc1_weight.expand(len(fc2), 1, -1).contiguous()
    fc2_weight = fc2_weight[:, None, None].expand(-1, len(fc1), 1).contiguous()
    ids = torch.arange(len(fc2), device=place.device)[None]
    x, p = (
        torch.ones(1, len(fc1), dtype=place.dtype, device=place.device),
        torch.tensor([probs], dtype=FP32, device=place.device),
    )
    return few_tokens_op(x, ids, p, fc1_weight, fc2_weight, None, None, "squared_relu")[0, 0].item()


@in_every_place
def test_rounds_h_and_a_but_sums_in_fp32(place: Place) -> None:
    ulp = eps(place.dtype)  # from 1 to the next number
    if place.dtype in (BF16, FP16):
        # h = 1 + 3 ulp / 8 becomes 1; else a = 1 + 3 ulp / 4 + ..., which becomes 1 + ulp
        assert of_ones(place, [1, 3 * ulp / 8], [1], [1]) == 1
        # a = 1 + ulp / 4 becomes 1
        assert of_ones(place, [1], [1, -1], [1 + ulp / 4, 1]) == 0
        # 1 + ulp / 2 becomes 1, if every sum is rounded
        assert of_ones(place, [1], [1, ulp / 2, ulp / 2], [1, 1, 1]) == 1 + ulp
    assert of_ones(place, [1], [256, 1, 1], [1, 1, 1]) == 258


@in_every_place
def test_repeats_to_the_bit(place: Place) -> None:
    sizes = (9, 5) if place.device == "cpu" else (2048, 768)
    case = make_case(torch.randint(0, 9, (4, 8), device=place.device), 8, *sizes, dtype=place.dtype)
    first = by_op(case)
    for _ in range(1 if place.device == "cpu" else 50):
        assert torch.equal(by_op(case), first)


# ---- which calls take it


def ops_of(run: Callable[[], Any]) -> list[str]:
    with Ops() as ops:
        run()
    return [name for name in ops.names if name in ("few_tokens", "fc1_activation")]


FEW, MANY = ["few_tokens"], ["fc1_activation"]


@pytest.fixture
def kernels(device: str) -> Iterator[str]:
    """The device, and kernels on it: on a CPU, Triton's interpreter."""
    if device == "cuda":
        yield device
    elif no_interpreter:
        pytest.skip("needs Triton's interpreter")
    else:
        with use_family("portable"):
            yield device


def case_of(tokens: int, choices: int, device: str, **options: Any) -> Case:
    experts = max(3, EXPERTS_FOR_A_SLOT * tokens * choices)
    ids = torch.randint(0, experts + 1, (tokens, choices), device=device)
    return make_case(ids, experts, 4, 3, **options)


def call(case: Case) -> Tensor:
    return routed_experts(case.x, case.ids, case.probs, **case.weights, activation=case.activation)


def test_few_slots_without_gradients(kernels: str) -> None:
    most = case_of(MOST_SLOTS // 2, 2, kernels)
    with torch.no_grad():
        assert ops_of(lambda: call(most)) == FEW
        assert torch.equal(call(most), by_op(most))
        assert ops_of(lambda: call(case_of(MOST_SLOTS // 2 + 1, 2, kernels))) == MANY
        assert ops_of(lambda: call(case_of(0, 2, kernels))) == MANY
        assert ops_of(lambda: call(case_of(2, 0, kernels))) == MANY
        assert ops_of(lambda: call(case_of(1, 1, kernels, dtype=FP64))) == MANY
        few_experts = make_case(torch.zeros(2, 2, dtype=torch.int64, device=kernels), 15)
        assert ops_of(lambda: call(few_experts)) == MANY
        one_token = replace(few_experts, x=few_experts.x[:1], ids=few_experts.ids[:1], probs=few_experts.probs[:1])
        assert ops_of(lambda: call(one_token)) == FEW
    assert ops_of(lambda: call(frozen(most))) == FEW
    for name in most.tensors:
        for other, t in most.tensors.items():
            t.requires_grad_(other == name)
        assert ops_of(lambda: call(most)) == MANY, name


def test_what_the_grids_of_the_kernels_reach() -> None:
    def suits(hidden: int, inner: int) -> bool:
        x, ids = torch.empty(1, hidden, device="meta"), torch.empty(1, 1, device="meta")
        shapes = (inner, hidden), (hidden, inner)
        return suits_few_tokens(x, ids, *(torch.empty(4, *shape, device="meta") for shape in shapes))

    assert not suits(1, 1)
    with use_family("portable"):
        for most, beyond in ((131070, 131071), (65535 * 2, 2**17)):
            assert suits(most, 1)
            assert suits(1, most)
            assert not suits(beyond, 1)
            assert not suits(1, beyond)


def test_rows_of_weights_in_pieces_go_the_other_way(kernels: str) -> None:
    case = frozen(case_of(3, 2, kernels))
    for name in ("fc1_weight", "fc2_weight"):
        pieces = case.weights[name].mT.contiguous().mT
        other = replace(case, weights=case.weights | {name: pieces})
        assert ops_of(lambda other=other: call(other)) == MANY, name
        assert_right(call(other), case)
        assert torch.equal(by_op(other), by_op(case)), name


def test_rows_that_a_cast_takes_to_pieces(kernels: str) -> None:
    """A copy of overlapping weights in another dtype has other strides."""
    case = frozen(make_case(torch.tensor([[2, 0]], device=kernels), 4, 9, 5))
    overlapping = torch.randn(192, device=kernels).as_strided((4, 10, 9), (1, 20, 1))
    weights = case.weights | {"fc1_weight": overlapping}
    case = replace(case, x=case.x.half(), weights=weights)
    assert ops_of(lambda: call(case)) == FEW
    apart = replace(case, weights=weights | {"fc1_weight": overlapping.clone(memory_format=torch.contiguous_format)})
    assert torch.equal(call(case), call(apart))


def test_not_on_a_cpu() -> None:
    with torch.no_grad():
        assert ops_of(lambda: call(case_of(1, 1, "cpu"))) == MANY


def test_moe_and_its_experts(kernels: str) -> None:
    """As they are with gradients, but for roundings."""
    moe = MoE(9, 5, 24, 2, bias=True, device=kernels)
    x = torch.randn(3, 9, device=kernels)
    expected = moe(x)
    with torch.no_grad():
        assert ops_of(lambda: moe(x)) == FEW
        out, routed = moe(x), moe.router(x)
        assert ops_of(lambda: moe.experts(x, route(routed.top_k_ids, 24))) == FEW
        assert torch.equal(moe.experts(x, route(routed.top_k_ids, 24), routed.top_k_probs), out.y)
    torch.testing.assert_close(out.y, expected.y.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(out.tokens_per_expert, expected.tokens_per_expert)


def test_autocast_and_wider_weights(kernels: str) -> None:
    """Computes in the narrow dtype, as from copies in it."""
    case = frozen(case_of(3, 2, kernels))
    narrow = {name: w.to(FP16) for name, w in case.weights.items()}
    expected = by_op(replace(case, x=case.x.to(FP16), weights=narrow))
    with torch.autocast(kernels, FP16):
        assert torch.equal(call(case), expected)
    assert torch.equal(call(replace(case, x=case.x.to(FP16))), expected)


def test_ids_are_checked(kernels: str) -> None:
    case = frozen(case_of(2, 2, kernels))
    for wrong in (-1, 17):
        ids = torch.full_like(case.ids, wrong)
        if kernels == "cpu":
            with pytest.raises(ValueError, match=f"top_k_ids: wanted ids from 0 to num_experts = 16, got {wrong}"):
                call(replace(case, ids=ids))
        else:  # where they are not read on the host, and count as nobody's
            assert not call(replace(case, ids=ids)).any()


def test_no_gradient_goes_through_the_op(device: str) -> None:
    case = case_of(2, 2, device)
    weights = (case.weights.get(name) for name in WEIGHTS)
    y = few_tokens_op(case.x, case.ids, case.probs, *weights, "swiglu")
    with pytest.raises(RuntimeError, match="not differentiable"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_is_refused(kernels: str) -> None:
    """As with more tokens, instead of a derivative of zero."""
    case = frozen(case_of(2, 2, kernels))

    def of(x: Tensor) -> Tensor:
        return call(replace(case, x=x))

    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(of, (case.x,), (torch.ones_like(case.x),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        of(forward_ad.make_dual(case.x, torch.ones_like(case.x)))
    assert ops_of(lambda: of(case.x)) == FEW


def test_opcheck(device: str) -> None:
    for probs_dtype, bias in ((FP32, True), (None, False)):
        case = frozen(case_of(2, 2, device, probs_dtype=probs_dtype, bias=bias))
        weights = (case.weights.get(name) for name in WEIGHTS)
        torch.library.opcheck(few_tokens_op, (case.x, case.ids, case.probs, *weights, "swiglu"))


# ---- compiled, exported


def compiled(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(run, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_compiled_for_a_number_of_tokens(kernels: str) -> None:
    run = compiled(call, dynamic=False)
    for tokens in (MOST_SLOTS, 2, MOST_SLOTS // 2):
        case = frozen(case_of(tokens, 2, kernels))
        assert torch.equal(run(case), call(case)), tokens


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_compiled_without_warnings_or_kernels(recwarn: pytest.WarningsRecorder) -> None:
    case = frozen(case_of(2, 2, "cpu"))
    assert torch.equal(compiled(call)(case), call(case))
    assert not [w for w in recwarn if "Dynamo" in str(w.message)]


@pytest.mark.filterwarnings(r"ignore:::torch\.")
@pytest.mark.parametrize("how", ["dynamic", "range", "data-dependent"])
def test_compiled_for_any_number_of_tokens(how: str, kernels: str) -> None:
    """In one graph, which is not of few tokens: it has no guard on how many there are."""
    graphs: list[torch.fx.GraphModule] = []
    case = frozen(case_of(7, 2, kernels, bias=False))

    def run(x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        if how == "data-dependent":
            some = (x[:, 0] < 2).nonzero()[:, 0]
            x, ids, probs = x[some], ids[some], probs[some]
        return routed_experts(x, ids, probs, *case.weights.values())

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        one_graph = torch.compile(run, fullgraph=True, dynamic=how == "dynamic" or None, backend=backend)
        for tokens in (7, 2, 80):
            x, probs = torch.rand(tokens, 4, device=kernels), torch.rand(tokens, 2, device=kernels)
            ids = torch.randint(0, 57, (tokens, 2), device=kernels)
            if how == "range":
                for t in (x, ids, probs):
                    torch._dynamo.mark_dynamic(t, 0, min=2, max=4096)
            elif how == "data-dependent" and tokens != 7:
                break  # the graph is of that many that some of them may be
            torch.testing.assert_close(one_graph(x, ids, probs), run(x, ids, probs), rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1
    assert "few_tokens" not in str(graphs[0].graph)


@pytest.mark.filterwarnings(r"ignore:::torch\.")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_for_any_number_of_tokens(strict: bool, kernels: str) -> None:
    case = frozen(case_of(7, 2, kernels, bias=False))

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
            return routed_experts(x, ids, probs, *case.weights.values())

    def arguments(tokens: int) -> tuple[Tensor, ...]:
        ids = torch.randint(0, 57, (tokens, 2), device=kernels)
        return torch.rand(tokens, 4, device=kernels), ids, torch.rand(tokens, 2, device=kernels)

    tokens = torch.export.Dim("T", min=1, max=4096)
    exported = torch.export.export(Layer(), arguments(7), dynamic_shapes=({0: tokens},) * 3, strict=strict)
    for number in (2, 80):
        given = arguments(number)
        torch.testing.assert_close(exported.module()(*given), Layer()(*given), rtol=1e-5, atol=1e-6)


# ---- on a GPU


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_large_layers(tokens: int, activation: str) -> None:
    """As many numbers as models have, in a CUDA graph that follows the ids, and without waiting for the GPU."""
    torch.manual_seed(tokens)
    r = random.Random(tokens)
    ids = torch.tensor([r.sample(range(129), 8) for _ in range(tokens)], device="cuda")
    case = frozen(make_case(ids, 128, 2048, 768, dtype=BF16, activation=activation))
    for name in ("fc1_weight", "fc2_weight"):
        case.weights[name].div_(16)
    assert_right(call(case), case)
    with no_synchronisation():
        call(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(case)
    for changed in (torch.randint_like(ids, 0, 129), torch.full_like(ids, 128), torch.full_like(ids, 5)):
        ids.copy_(changed)
        graph.replay()
        assert torch.equal(y, call(case))
        assert_right(y, case)
