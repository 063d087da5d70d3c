"""MoE and its router against a loop over tokens in fp64, and what the layer promises beside its values."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from exact import assert_as_accurate_as_eager, plain_activation
from torch import Tensor

import grouped_experts
from grouped_experts.nn import MoE, MoEOutput, Router

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax-normalized": {"score": "softmax", "normalize_top_k": True},
    "softmax": {"score": "softmax", "normalize_top_k": False, "scaling_factor": 1.5},
    "sigmoid-normalized": {"score": "sigmoid", "normalize_top_k": True, "scaling_factor": 2.5},
    "sigmoid": {"score": "sigmoid", "normalize_top_k": False},
    "sigmoid-biased": {"score": "sigmoid", "balancing_bias": True},
}
LAYERS: dict[str, dict[str, Any]] = {
    **ROUTERS,
    "shared": {"shared_intermediate_size": 5},
    "bias-shared": {"bias": True, "shared_intermediate_size": 3, "activation": "clamped_swiglu"},
    "no-gate": {"activation": "squared_relu"},
}
H, I, E, K = 10, 6, 5, 2  # noqa: E741

# torch.compile itself makes the instance of autograd.Function that it warns about.
ignore_dynamo_warning = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def make_moe(device: str = "cpu", top_k: int = K, dtype: torch.dtype = torch.float64, **options: Any) -> MoE:
    moe = MoE(H, I, E, top_k, device=device, dtype=dtype, **options)
    if moe.router.balancing_bias is not None:
        moe.router.balancing_bias.copy_(torch.linspace(-0.3, 0.3, E))
    return moe


def exact_mlp(x: Tensor, mlp: Any, expert: int, prob: Tensor) -> Tensor:
    weights = [None if w is None else w[expert] for w in (mlp.fc1_weight, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias)]
    w1, b1, w2, b2 = weights
    h = w1 @ x if b1 is None else w1 @ x + b1
    y = w2 @ plain_activation(h, mlp.activation)
    return prob * (y if b2 is None else y + b2)


def exact_scores(x: Tensor, router: Router) -> Tensor:
    """(E,) of one token."""
    logits = torch.stack([(w * x).sum() for w in router.weight])
    if router.score == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    return torch.exp(logits) / torch.exp(logits).sum()


def exact_choice(scores: Tensor, router: Router) -> list[tuple[int, Tensor]]:
    """(expert, prob) of one token's choices, the best first."""
    bias = [0.0] * E if router.balancing_bias is None else router.balancing_bias.tolist()
    experts = sorted(range(E), key=lambda e: -(scores[e].item() + bias[e]))[: router.top_k]
    total = sum(scores[e] for e in experts) if router.normalize_top_k else 1
    return [(e, router.scaling_factor * scores[e] / total) for e in experts]


def exact_moe(x: Tensor, moe: MoE) -> MoEOutput:
    counts, mean_shares, ys = [0] * E, torch.zeros(E, dtype=x.dtype, device=x.device), []
    for token in x:
        scores = exact_scores(token, moe.router)
        y = torch.zeros_like(token)
        for expert, prob in exact_choice(scores, moe.router):
            counts[expert] += 1
            y = y + exact_mlp(token, moe.experts, expert, prob)
        if moe.shared_expert is not None:
            y = y + exact_mlp(token, moe.shared_expert, 0, torch.ones_like(y[0]))
        mean_shares = mean_shares + scores / scores.sum() / len(x)
        ys.append(y)
    loss = E * sum(count / sum(counts) * share for count, share in zip(counts, mean_shares, strict=True))
    return MoEOutput(torch.stack(ys), loss, torch.tensor(counts, dtype=torch.int32, device=x.device))


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def parameter_gradients(moe: MoE, x: Tensor) -> dict[str, Tensor]:
    """Of a loss that hears of y and of the load balance."""
    out = moe(x)
    (out.y.square().sum() + out.load_balancing_loss).backward()
    grouped_experts.backward_dw(moe)
    return {name: p.grad for name, p in moe.named_parameters() if p.grad is not None}


# ---- values and gradients


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("top_k", [1, K, E])
def test_values_and_gradients_are_those_of_a_loop_over_tokens(device: str, options: dict, top_k: int) -> None:
    moe = make_moe(device, top_k, **options)
    expected_moe = copy.deepcopy(moe)
    x = torch.randn(13, H, device=device, dtype=torch.float64)
    expected, actual = exact_moe(x, expected_moe), moe(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for out in (expected, actual):
        (out.y.square().sum() + out.load_balancing_loss).backward()
    for (name, p), q in zip(moe.named_parameters(), expected_moe.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_gradcheck(options: dict) -> None:
    moe = MoE(4, 2, 3, 2, dtype=torch.float64, **options)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    names = list(dict(moe.named_parameters()))

    def function(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(moe, dict(zip(names, parameters, strict=True)), x)
        return out.y, out.load_balancing_loss

    assert torch.autograd.gradcheck(function, (x, *moe.parameters()))


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_low_precision_is_as_accurate_as_eager(device: str, options: dict) -> None:
    """Eager: the same choices, every expert in plain bf16."""
    moe = make_moe(device, dtype=torch.bfloat16, **options)
    x = torch.randn(50, H, device=device, dtype=torch.bfloat16)
    y = moe(x).y
    assert y.dtype == torch.bfloat16
    exact = exact_moe(x.double(), copy.deepcopy(moe).double()).y
    probs = [exact_choice(exact_scores(t.double(), copy.deepcopy(moe.router).double()), moe.router) for t in x]
    eager = torch.zeros_like(x)
    for t, choices in enumerate(probs):
        for expert, prob in choices:
            eager[t] += exact_mlp(x[t], moe.experts, expert, prob.to(x.dtype))
        if moe.shared_expert is not None:
            eager[t] += exact_mlp(x[t], moe.shared_expert, 0, torch.ones_like(x[0, 0]))
    assert_as_accurate_as_eager(y, eager, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_leading_dimensions_and_output_dtypes(device: str, dtype: torch.dtype) -> None:
    moe = make_moe(device, dtype=dtype, shared_intermediate_size=4)
    x = torch.randn(3, 4, H, device=device, dtype=dtype)
    out = moe(x)
    assert out.y.shape == x.shape
    assert out.y.dtype == dtype
    assert out.load_balancing_loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.tokens_per_expert.tolist() == moe(x.flatten(0, 1)).tokens_per_expert.tolist()
    assert out.tokens_per_expert.sum() == 12 * K
    assert_equal(out.y.flatten(0, 1), moe(x.flatten(0, 1)).y)


def test_a_single_token_without_leading_dimensions(device: str) -> None:
    moe = make_moe(device)
    x = torch.randn(H, device=device, dtype=torch.float64)
    assert_equal(moe(x).y, moe(x[None]).y[0])


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid"}], ids=["softmax", "sigmoid"])
def test_autocast_routes_in_fp32_and_computes_in_bf16(device: str, options: dict) -> None:
    moe = make_moe(device, dtype=torch.float32, shared_intermediate_size=4, **options)
    x = torch.randn(200, H, device=device, requires_grad=True)
    plain, routed = moe(x), moe.router(x)
    with torch.autocast(device, torch.bfloat16):
        out, autocast_routed = moe(x), moe.router(x)
    assert_equal(autocast_routed, routed)
    assert_equal(out.load_balancing_loss, plain.load_balancing_loss)
    assert out.y.dtype == torch.bfloat16
    out.y.float().sum().backward()
    assert x.grad is not None
    assert {p.grad.dtype for p in moe.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_no_tokens(device: str, options: dict, dtype: torch.dtype) -> None:
    moe = make_moe(device, dtype=dtype, **options)
    x = torch.empty(0, H, device=device, dtype=dtype, requires_grad=True)
    out = moe(x)
    assert out.y.shape == (0, H)
    assert out.load_balancing_loss.item() == 0
    assert out.tokens_per_expert.tolist() == [0] * E
    for name, gradient in parameter_gradients(moe, x).items():
        assert gradient.count_nonzero() == 0, name
        assert not gradient.isnan().any(), name


def test_results_are_the_same_on_every_run(device: str) -> None:
    moe = make_moe(device, dtype=torch.float32, shared_intermediate_size=4)
    x = torch.randn(300, H, device=device)
    first, second = parameter_gradients(moe, x), {}
    first = {name: gradient.clone() for name, gradient in first.items()}
    moe.zero_grad()
    second = parameter_gradients(moe, x)
    assert_equal(first, second)
    assert_equal(moe(x), moe(x))


# ---- load balance


def identity_router(score: str, top_k: int = 1) -> Router:
    """Token e of the identity matrix prefers expert e, and all tokens alike."""
    router = Router(E, E, top_k, score=score, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(3 * torch.eye(E))
    return router


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balancing_loss_is_one_at_balance_and_grows_with_imbalance(score: str) -> None:
    router, tokens = identity_router(score), torch.eye(E, dtype=torch.float64)
    balanced = router(tokens.repeat(3, 1)).load_balancing_loss
    assert math.isclose(balanced.item(), 1, rel_tol=1e-14)
    uneven = router(torch.cat([tokens, tokens[:1]])).load_balancing_loss
    one_takes_all = router(tokens[:1].repeat(4, 1)).load_balancing_loss
    assert 1 < uneven < one_takes_all
    share = exact_scores(tokens[0], router)
    assert math.isclose(one_takes_all.item(), E * (share[0] / share.sum()).item(), rel_tol=1e-14)


def test_with_k_equal_to_e_the_loss_is_one(device: str) -> None:
    out = make_moe(device, top_k=E)(torch.randn(9, H, device=device, dtype=torch.float64))
    assert out.tokens_per_expert.tolist() == [9] * E
    assert math.isclose(out.load_balancing_loss.item(), 1, rel_tol=1e-14)


def test_descending_the_loss_balances() -> None:
    router = Router(H, E, 1)
    x = torch.randn(256, H) + 1
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    losses = []
    for _ in range(100):
        loss = router(x).load_balancing_loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 1.01 < 1.1 < losses[0]


# ---- balancing bias


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balancing_bias_changes_the_choice_and_never_a_prob(device: str, score: str) -> None:
    router = Router(H, E, K, score=score, normalize_top_k=False, balancing_bias=True, device=device)
    x = torch.randn(20, H, device=device)
    assert router.balancing_bias is not None
    router.balancing_bias.copy_(torch.tensor([0.0, 0, 0, 5, 5]))
    routed = router(x)
    assert set(routed.top_k_ids.flatten().tolist()) == {3, 4}
    logits = x @ router.weight.T
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    torch.testing.assert_close(routed.top_k_probs, scores.gather(1, routed.top_k_ids))
    routed.top_k_probs.sum().backward()
    assert router.balancing_bias.grad is None
    assert "balancing_bias" in router.state_dict()


def test_update_moves_the_bias_towards_the_mean_load(device: str) -> None:
    router = Router(H, 4, 1, balancing_bias=True, device=device)
    router.update_balancing_bias(torch.tensor([10, 2, 6, 6], dtype=torch.int32, device=device), 0.001)
    assert_equal(router.balancing_bias, torch.tensor([-0.001, 0.001, 0, 0], device=device))


def test_updates_balance_a_skewed_router() -> None:
    moe = make_moe(dtype=torch.float32, score="sigmoid", balancing_bias=True)
    x = torch.randn(200, H) + 1
    before = moe(x).tokens_per_expert
    for _ in range(100):
        moe.router.update_balancing_bias(moe(x).tokens_per_expert, 0.01)
    after = moe(x).tokens_per_expert
    assert after.float().std() < before.float().std() / 5


def test_balancing_bias_stays_fp32() -> None:
    router = Router(H, E, K, balancing_bias=True)
    router.update_balancing_bias(torch.tensor([9, 0, 0, 0, 0]), 0.001)
    exact = router.balancing_bias.clone()
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert_equal(router.balancing_bias, exact)
    assert router.to("meta").balancing_bias.is_meta


# ---- compile and deferral


@ignore_dynamo_warning
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_compiled_in_one_graph_with_changing_tokens_equals_eager(options: dict) -> None:
    torch._dynamo.reset()
    moe = make_moe(dtype=torch.float32, **options)
    compiled = torch.compile(copy.deepcopy(moe), fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (8, 21, 1, 0, 64):
        x = torch.randn(num_tokens, H)
        assert_equal(compiled(x), moe(x))
        for module in (moe, compiled):
            module.zero_grad()
        assert_equal(
            {name.removeprefix("_orig_mod."): g for name, g in parameter_gradients(compiled, x).items()},
            parameter_gradients(moe, x),
        )


@ignore_dynamo_warning
def test_compiled_autocast_equals_eager() -> None:
    torch._dynamo.reset()
    moe = make_moe(dtype=torch.float32, shared_intermediate_size=4)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 6, H)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(compiled(x), moe(x))


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_deferred_equals_plain(device: str, options: dict) -> None:
    plain = make_moe(device, dtype=torch.float32, **options)
    deferred = make_moe(device, dtype=torch.float32, defer_wgrad=True, **options)
    deferred.load_state_dict(plain.state_dict())
    x = torch.randn(40, H, device=device)
    out = deferred(x)
    (out.y.square().sum() + out.load_balancing_loss).backward()
    assert deferred.router.weight.grad is not None
    assert all(p.grad is None for name, p in deferred.named_parameters() if name != "router.weight")
    with pytest.raises(RuntimeError, match="pending"):
        grouped_experts.check_no_pending_wgrads(deferred)
    grouped_experts.backward_dw(deferred)
    grouped_experts.check_no_pending_wgrads(deferred)
    assert_equal({name: p.grad for name, p in deferred.named_parameters()}, parameter_gradients(plain, x))


# ---- arguments


@pytest.mark.parametrize("top_k", [1, 2])
def test_probs_sum_to_the_scaling_factor_by_default_only_for_several_choices(top_k: int) -> None:
    router = Router(H, E, top_k, scaling_factor=2.0)
    assert router.normalize_top_k == (top_k > 1)
    sums = router(torch.randn(6, H)).top_k_probs.sum(1)
    assert torch.allclose(sums, torch.full_like(sums, 2.0)) == (top_k > 1)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_extreme_logits_give_finite_probs(score: str) -> None:
    router = Router(H, E, K, score=score)
    with torch.no_grad():
        router.weight.fill_(-1e4)
    routed = router(torch.ones(3, H))
    assert routed.top_k_probs.isfinite().all()
    assert routed.load_balancing_loss.isfinite()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: wanted an int >= 1, got 0"),
        ({"intermediate_size": -1}, "intermediate_size: wanted an int >= 1, got -1"),
        ({"num_experts": 0}, "num_experts: wanted an int >= 1, got 0"),
        ({"top_k": 0}, "top_k: wanted an int >= 1, got 0"),
        ({"top_k": 5}, "top_k: wanted at most num_experts = 4, got 5"),
        ({"score": "tanh"}, "score: wanted one of softmax, sigmoid, got 'tanh'"),
        ({"scaling_factor": 0.0}, "scaling_factor: wanted a finite number > 0, got 0.0"),
        ({"scaling_factor": math.nan}, "scaling_factor: wanted a finite number > 0, got nan"),
        ({"shared_intermediate_size": 0}, "shared_intermediate_size: wanted an int >= 1 or None, got 0"),
        ({"activation": "relu"}, "activation: wanted one of .*, got 'relu'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_sizes_are_refused(options: dict, message: str) -> None:
    sizes = {"hidden_size": 4, "intermediate_size": 3, "num_experts": 4, "top_k": 2}
    with pytest.raises(ValueError, match=message):
        MoE(**{**sizes, **options})


def test_bad_inputs_are_refused() -> None:
    moe = make_moe(dtype=torch.float32)
    with pytest.raises(ValueError, match=re.escape("x: wanted shape (..., H) = (..., 10), got (3, 9)")):
        moe(torch.randn(3, 9))
    with pytest.raises(TypeError, match=r"x: wanted a dtype of .*, got int64"):
        moe(torch.ones(3, H, dtype=torch.int64))
    with pytest.raises(ValueError, match=re.escape("x: wanted shape (T, H)")):
        moe.router(torch.randn(2, 3, H))
    with pytest.raises(ValueError, match="balancing_bias=True"):
        moe.router.update_balancing_bias(torch.ones(E), 0.1)
    router = Router(H, E, K, balancing_bias=True)
    with pytest.raises(ValueError, match=re.escape("tokens_per_expert: wanted shape (E,) = (5,), got (4,)")):
        router.update_balancing_bias(torch.ones(4), 0.1)


def test_state_round_trip_and_repr() -> None:
    moe = make_moe(shared_intermediate_size=4, score="sigmoid", balancing_bias=True)
    other = make_moe(shared_intermediate_size=4, score="sigmoid", balancing_bias=True)
    other.load_state_dict(moe.state_dict())
    x = torch.randn(5, H, dtype=torch.float64)
    assert_equal(other(x), moe(x))
    assert "score='sigmoid'" in repr(moe)
    assert "balancing_bias=True" in repr(moe)


def test_forward_on_the_meta_device() -> None:
    moe = MoE(8, 6, 4, 2, device="meta")
    y, loss, counts = moe(torch.randn(5, 8, device="meta"))
    assert (y.shape, loss.shape, counts.shape) == ((5, 8), (), (4,))
