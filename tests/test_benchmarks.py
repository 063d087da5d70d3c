"""The benchmarks measure what they say: the clocks, the records, and on small shapes every comparison on a GPU."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import needs_cuda
from torch import Tensor

from benchmarks import (
    cpu,
    fp4_products,
    fp8_aligned,
    fp8_layers,
    fp8_products,
    gpu,
    gpu_decode,
    gpu_fp8,
    gpu_inputs,
    gpu_layers,
    gpu_moves,
    gpu_products,
    gpu_routed,
    plot,
    records,
    roofline,
    routed_peers,
    timing,
)
from benchmarks.peers import routed_loop
from benchmarks.records import Record, record
from benchmarks.routed_case import OURS, Case
from benchmarks.timing import Round, event_ms, event_ms_of, interleaved_ms, interleaved_ms_of, waits_for_gpu

SHAPE = {"E": 4, "M": 64, "H": 32, "I": 16}
ROUTED_SHAPE = {"T": 48, "H": 32, "I": 16, "E": 4, "top_k": 2}


def test_both_run_in_every_round_and_take_turns_at_going_first() -> None:
    ran: list[str] = []
    times = interleaved_ms(lambda: ran.append("ours"), lambda: ran.append("peer"), rounds=6, warmup=2)
    assert len(times) == 6
    rounds = [tuple(ran[i : i + 2]) for i in range(0, len(ran), 2)]
    assert Counter(rounds) == {("ours", "peer"): 4, ("peer", "ours"): 4}


def test_several_run_in_every_round_go_first_as_often_and_follow_either_neighbour() -> None:
    ran: list[str] = []
    names = ["ours", "one", "another"]
    times = interleaved_ms_of({name: partial(ran.append, name) for name in names}, rounds=10, warmup=2)
    assert {name: len(each) for name, each in times.items()} == dict.fromkeys(names, 10)
    rounds = [tuple(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert all(sorted(each) == sorted(names) for each in rounds)
    assert Counter(each[0] for each in rounds) == dict.fromkeys(names, 4)
    assert {pair for each in rounds for pair in pairwise(each)} == set(permutations(names, 2))


@pytest.mark.parametrize("several", range(1, 7))
def test_each_is_the_first_equally_often(several: int) -> None:
    names = list("abcdef"[:several])
    assert Counter(timing._order(names, turn)[0] for turn in range(2 * several)) == dict.fromkeys(names, 2)


def test_times_are_each_run_its_own() -> None:
    for r in interleaved_ms(lambda: time.sleep(0.02), lambda: None, rounds=2, warmup=0):
        assert r.ms > 19 > r.peer_ms


def test_ratio_is_that_of_the_medians() -> None:
    times = [Round(1.0, 2.0), Round(10.0, 30.0), Round(4.0, 8.0)]
    made = record("op", {"M": 1}, "even", "float32", "reference", "peer", times, flops=4e9, num_bytes=8e9)
    assert (made.ms, made.peer_ms, made.ratio) == (4.0, 8.0, 2.0)
    assert (made.tflops, made.tbps) == (1.0, 2.0)


def test_cases_of_a_comparison_share_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"T": 16, "H": 8, "I": 8, "E": 2}
    assert len(cpu.compare(shape, torch.float32, False, "grouped_mm", rounds=1)) == 1
    # A thread in place of a process, which takes seconds to start.
    monkeypatch.setattr(cpu, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(cpu, "CASES", 2)
    assert len(cpu.compare(shape, torch.float32, True, "loop", rounds=4)) == 4


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """The benchmarks of a GPU, on whatever there is: without one, on the CPU and on the host's clock."""
    if not torch.cuda.is_available():
        for module in (gpu_inputs, gpu_layers, gpu_moves, fp4_products, fp8_products, fp8_layers):
            monkeypatch.setattr(module, "DEVICE", "cpu")
        for module in (gpu_routed, gpu_decode, fp4_products, fp8_products, fp8_aligned, fp8_layers):
            monkeypatch.setattr(module, "event_ms_of", lambda runs, rounds, **_: interleaved_ms_of(runs, rounds, 0))
        for module in (gpu_routed, gpu_decode):
            monkeypatch.setattr(module, "waits_for_gpu", lambda run: False)
        for module in (gpu_decode, fp8_layers):
            monkeypatch.setattr(module, "captured", lambda run: run)
        for module in (gpu_layers, gpu_moves, gpu_products):
            monkeypatch.setattr(module, "event_ms", lambda ours, peer, rounds: interleaved_ms(ours, peer, rounds, 0))
        monkeypatch.setattr(gpu_layers, "in_family", lambda family, run: run)  # a CPU has no kernels to choose from
    return gpu_inputs.DEVICE


@pytest.fixture
def made(here: str) -> list[Record]:
    rounds = 2
    return [
        *gpu_products.products(SHAPE, rounds),
        gpu_layers.experts_layer(SHAPE, rounds),
        *gpu_moves.activations(SHAPE, rounds),
        *gpu_moves.permutations(ROUTED_SHAPE, rounds),
        *gpu_layers.skewed_layers(SHAPE, rounds),
        *gpu_layers.host_costs(1),
    ]


def test_every_comparison_agrees_with_its_peer_and_is_summed_up(
    made: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    named = {kind for kinds in gpu.SUMMARY.values() for kind in kinds}
    assert {(r.op, r.variant) for r in made} == named
    assert all(r.ms > 0 and r.peer_ms > 0 and r.ratio > 0 for r in made)
    moved = {(r.op, r.variant) for r in made if r.tbps is not None}
    assert moved == {("activation", None), ("activation", "backward"), ("permute", None), ("permute", "unpermute")}
    counted = {(r.op, r.variant) for r in made if r.tflops is not None}
    timed = {*gpu.SUMMARY["host cost"], *gpu.SUMMARY["portable host"], *gpu.SUMMARY["skew"]}
    assert counted == named - moved - timed
    gpu.summarise(made)
    printed = capsys.readouterr().out
    assert all(name in printed for name in gpu.SUMMARY)


def test_what_is_made_of_the_records_of_a_run(made: list[Record], tmp_path: Path) -> None:
    rates = {"tflops": 100.0, "tbps": 3.0}  # those of sizes so small are rounded to zero
    plain = [{k: rates.get(k, v) for k, v in asdict(each).items() if v is not None} for each in made]
    table = list(roofline.rows_of(plain))
    assert len(table) == 2 + 10
    shape = {"E": 2, "M": 10, "N": 6, "K": 5}
    for op, columns in (("k_grouped", 11), ("fc1_activation", 14), ("fc2_dgrad_activation", 31)):
        assert roofline.work({"op": op, "shape": shape}) == (600e-12, (2 * 10 * columns + 2 * 2 * 30) / 1e9)
    plot.draw(plain, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_a_wrong_result_is_not_timed(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_products, "m_grouped_gemm", lambda x, w, *_, **__: x @ w[0].T)
    with pytest.raises(AssertionError, match="m_grouped_nt: output 0 is off by"):
        gpu_products.products(SHAPE, 1)


def test_uneven_choices_are_distinct_and_uneven(here: str) -> None:
    choices = gpu_inputs.uneven_choices(20_000, 8, 2)
    assert (choices[:, 0] != choices[:, 1]).all()
    load = choices.flatten().bincount(minlength=8) / 5_000
    assert load.min() > 0.6
    assert load.max() < 1.4
    assert load.max() / load.min() > 1.1


def test_a_result_file_holds_hardware_date_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    path = records.write("some.json", {"gpu": "some"}, [])
    assert all(f'"{key}"' in path.read_text() for key in ("gpu", "date", "versions", "records"))


Layer = routed_peers.RoutedExperts
COMPOSITE = "F.grouped_mm composite"


def exactly(x: Tensor, ids: Tensor, probs: Tensor, fc1_weight: Tensor, fc2_weight: Tensor) -> Tensor:
    return routed_loop(x, fc1_weight, fc2_weight, ids, probs)


def test_pieces_run_together_once_each() -> None:
    ran: list[str] = []
    gpu_routed.one_behind_the_other([lambda: ran.append("a"), lambda: ran.append("b")])()
    assert ran == ["a", "b"]


def test_routed_layers_are_checked_timed_and_summed_up(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    composite = routed_peers.composite().run
    assert composite is not None

    def swapped(x: Tensor, ids: Tensor, probs: Tensor, fc1_weight: Tensor, fc2_weight: Tensor) -> Tensor:
        return composite(x, ids, probs, fc1_weight.roll(fc2_weight.shape[2], 1), fc2_weight)

    def without_gradient(x: Tensor, *others: Tensor) -> Tensor:
        return composite(x.detach(), *others)

    def broken(*_: Tensor) -> Tensor:
        raise RuntimeError("no kernel\nfor this")

    peers = {COMPOSITE: composite, "swapped": swapped, "no dx": without_gradient, "broken": broken}
    layers = gpu_routed.routed_layers(ROUTED_SHAPE, peers, rounds=2)
    assert list(layers.both) == list(layers.forward) == list(layers.kept) == [OURS, COMPOSITE]
    assert layers.failed.keys() == {"swapped", "no dx", "broken"}
    assert "swapped: output 0 is off by" in layers.failed["swapped"]
    assert layers.failed["broken"] == "RuntimeError: no kernel"
    whole = {OURS, gpu_routed.ALONE, gpu_routed.TOGETHER}
    assert layers.pieces.keys() - whole == gpu_routed.pieces(Case.random(ROUTED_SHAPE)).keys()
    assert gpu_routed.share_of_routing(layers) < 1
    parts = {OURS: 4.0, gpu_routed.ALONE: 3.0, "route": 9.0, gpu_routed.TOGETHER: 0.5}
    assert gpu_routed.share_of_routing(replace(layers, pieces=parts)) == 0.25
    assert gpu_routed.share_of_kernels(replace(layers, pieces=parts)) == 0.125
    made = gpu_routed.records_of(layers)
    assert [(r.op, r.variant, r.peer) for r in made] == [
        ("routed_layer", None, COMPOSITE),
        ("routed_layer", "forward", COMPOSITE),
    ]
    assert all(r.tflops is not None and r.ms > 0 and r.peer_ms > 0 for r in made)
    gpu_routed.show(layers)
    printed = capsys.readouterr().out
    assert all(name in printed for name in (OURS, COMPOSITE, "swapped is not timed", "route"))
    assert max(map(len, printed.splitlines())) <= 130


def test_a_wrong_layer_of_ours_is_not_timed(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_routed, "routed_experts", lambda x, *_: 2 * x)
    with pytest.raises(AssertionError, match="ours: output 0 is off by"):
        gpu_routed.routed_layers(ROUTED_SHAPE, {}, rounds=1)


def test_decoding_is_timed_beside_a_copy_and_the_peers(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"H": 32, "I": 16, "E": 8, "top_k": 2}
    decoded = gpu_decode.decode(3, {"a loop": exactly, "wrong": lambda x, *_: x}, rounds=2, sizes=sizes)
    variants, peers = (gpu_decode.UNCAPTURED, gpu_decode.CAPTURED), ("a loop", gpu_decode.COPY)
    if here == "cpu":
        assert {(r.variant, r.peer) for r in decoded.records} == {(v, p) for v in variants for p in peers}
    assert all(r.op == "routed_decode" and r.tbps is not None for r in decoded.records)
    assert 2 <= decoded.shape["touched"] <= 6
    assert "wrong" in decoded.failed
    printed = capsys.readouterr().out
    assert "wrong is not timed" in printed
    assert max(map(len, printed.splitlines())) <= 130


def test_what_cannot_be_captured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(run: Callable[[], object]) -> Callable[[], object]:
        run()
        return run

    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gpu_decode, "captured", captured)
    graphs, failed = gpu_decode.captured_runs({"ours": list, "waits": waits})
    assert list(graphs) == ["ours"]
    assert failed == {"waits, CUDA graph": "RuntimeError: operation not permitted when stream is capturing"}


def test_operations_and_bytes_of_the_routed_layer() -> None:
    shape = {"T": 3, "H": 5, "I": 7, "E": 11, "top_k": 2}
    rows = 3 * 2
    assert gpu_routed.forward_flops(shape) == 2 * rows * (2 * 7 * 5) + 2 * rows * (5 * 7)  # h = x W1', y = a W2'
    assert gpu_routed.least_kept_bytes(shape) == 2 * (3 * 5) + 2 * (rows * 2 * 7)  # y and h in bf16
    assert gpu_decode.touched_bytes({**shape, "touched": 4}) == 4 * (2 * (2 * 7 * 5) + 2 * (5 * 7))


def test_a_run_leaves_records_memory_pieces_and_who_was_missing(
    here: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"H": 32, "I": 16, "E": 8, "top_k": 2}
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_routed, "ROUTED_SHAPES", (ROUTED_SHAPE, ROUTED_SHAPE))
    monkeypatch.setattr(gpu_routed, "TOKENS", (1,))
    monkeypatch.setattr(gpu_routed, "decode", partial(gpu_decode.decode, sizes=sizes))
    monkeypatch.setattr(gpu_routed, "transformers_experts", dict)
    absent = routed_peers.Peer(None, "not installed: No module named 'some'")
    monkeypatch.setattr(gpu_routed, "PEERS", {COMPOSITE: routed_peers.composite, "some": lambda: absent})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some")
    monkeypatch.setattr(sys, "argv", ["gpu_routed", "--rounds", "1", "--name", "some.json", "--shapes", "1"])
    gpu_routed.main()
    written = json.loads((tmp_path / "some.json").read_text())
    assert written["missing"] == {"some": "not installed: No module named 'some'"}
    assert {r["op"] for r in written["records"]} == {"routed_layer", "routed_decode"}
    assert [each["shape"] for each in written["kept_memory"]] == [ROUTED_SHAPE]
    assert written["pieces"][0]["ms"].keys() > {OURS, "route"}
    assert len(written["failed"]) == 2
    assert "some: not installed" in capsys.readouterr().out


FP8_SHAPE = {"E": 3, "M": 400, "H": 144, "I": 64}
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
)


@needs_fp8
def test_fp8_is_checked_timed_and_held_against_what_is_asked(
    here: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_fp8, "SHAPES", {"A": FP8_SHAPE, "B": {}, "C": {}})
    monkeypatch.setattr(gpu_fp8, "SMALL", (FP8_SHAPE,))
    monkeypatch.setattr(gpu_fp8, "TOKENS", (1, 5))
    monkeypatch.setattr(fp8_aligned, "CUBE", 128)
    monkeypatch.setattr(fp8_aligned, "DEEPGEMM", {(3, 128, 144): 1e3, (3, 144, 64): 500})
    sizes = {"E": 3, "H": 144, "I": 64, "C": 8}
    monkeypatch.setattr(gpu_fp8, "decode", partial(fp8_layers.decode, sizes=sizes))
    monkeypatch.setattr(gpu_fp8, "fp4_products", partial(fp4_products.fp4_products, sizes={**sizes, "H": 160}))
    monkeypatch.setattr(fp4_products, "TOKENS", (3,))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some")
    monkeypatch.setattr(sys, "argv", ["gpu_fp8", "--rounds", "2", "--name", "some.json", "--shapes", "A"])
    gpu_fp8.main()
    written = json.loads((tmp_path / "some.json").read_text())
    kinds = Counter((r["op"], r.get("variant")) for r in written["records"])
    peers = 3  # two ways of cuBLAS's, and bf16
    layers = [f"weights cast {when}{what}" for when in ("before", "at every call") for what in ("", ", forward")]
    casts = ["rows", "blocks", "blocks, transposed", "columns", "rows and columns"]
    assert kinds == {
        ("m_grouped_fp8", None): 2 * peers,
        ("m_grouped_fp8", "dgrad"): 2 * peers,
        ("m_grouped_fp8", "aligned"): 2,
        ("k_grouped_fp8", None): 2,
        ("m_grouped_fp8_fp4", None): 2,
        **{("quantize", variant): 1 for variant in casts},
        **{("fp8_layer", variant): 1 for variant in layers},
        **{("masked_decode", f"{each}{hint}"): 2 for each in ("bf16", "fp8") for hint in ("", ", expected_rows")},
    }
    (accuracy,) = written["accuracy"]
    assert accuracy["errors"].keys() == {"bf16", "fp8", "fp8, emulated"}
    for errors in accuracy["errors"].values():
        assert errors.keys() == set(cpu.OUTCOMES)
    for name in cpu.OUTCOMES:
        of_bf16, of_fp8, emulated = (accuracy["errors"][each][name] for each in ("bf16", "fp8", "fp8, emulated"))
        assert of_bf16 < 1e-2 < of_fp8 < 0.1
        assert of_fp8 == pytest.approx(emulated, rel=0.1)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * 2 * 2 + 2 + 2 + len(casts) + 1 + 2 * 4


def test_what_is_asked_of_fp8() -> None:
    def made(op: str, peer: str = "", variant: str | None = None, **shape: int) -> Record:
        return record(op, shape, "", "", "", peer, [Round(1, 1)], variant=variant)

    for name, products, layer in (("A", 1.35, 1.35), ("B", 1.25, 1.2), ("C", 1.25, 1.2)):
        for peer, wanted in (
            *[(peer, 0.9) for peer in (fp8_products.DENSE, fp8_products.DENSE_FAST, fp8_aligned.PEER)],
            (fp8_products.IN_BF16, None),
        ):
            assert gpu_fp8.asked(made("m_grouped_fp8", peer), name) == wanted
        assert gpu_fp8.asked(made("k_grouped_fp8"), name) == products
        assert gpu_fp8.asked(made("fp8_layer", variant=fp8_layers.CAST_BEFORE), name) == layer
        assert gpu_fp8.asked(made("fp8_layer", variant=fp8_layers.CAST_EACH_TIME), name) is None
    for variant, wanted in (("rows", 0.8), ("blocks", 0.8), ("blocks, transposed", 0.7), ("columns", 0.7)):
        assert gpu_fp8.asked(made("quantize", variant=variant), "A") == wanted
    for tokens, wanted in ((1, 0.8), (8, 0.8), (32, 0.8), (128, 0.65)):
        assert gpu_fp8.asked(made("masked_decode", variant="fp8", tokens=tokens), "") == wanted


@needs_fp8
@pytest.mark.parametrize("name", ["m_grouped_gemm_fp8", "k_grouped_gemm_fp8", "quantize_columns"])
def test_a_wrong_result_in_fp8_is_not_timed(name: str, here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(fp8_products, name)

    def swapped(*arguments: Tensor | tuple[Tensor, Tensor]) -> object:
        made = right(*arguments)
        return made.roll(1, 0) if isinstance(made, Tensor) else made._replace(scales=made.scales.roll(1, 1))

    monkeypatch.setattr(fp8_products, name, swapped)
    with pytest.raises(AssertionError, match="is off by"):
        (fp8_products.casts if name == "quantize_columns" else fp8_products.products)(FP8_SHAPE, 1)


def test_bytes_of_masked_decoding() -> None:
    experts, hidden, inner, capacity, tokens = 3, 5, 7, 11, 2
    shape = {"E": experts, "H": hidden, "I": inner, "C": capacity, "tokens": tokens}
    rows, weights = experts * tokens, experts * (2 * inner * hidden + hidden * inner)
    y, x = 2 * experts * capacity * hidden, 2 * rows * hidden
    h, a = 2 * rows * 2 * inner, 2 * rows * inner
    in_fp8 = weights + x + 2 * (x // 2) + h + 2 * (a // 2) + y
    assert fp8_layers.decode_bytes(shape) == {"bf16": 2 * weights + x + h + 2 * a + y, "fp8": in_fp8}


def test_a_peer_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> Layer:
        raise ImportError("needs torch < 2\nand more")

    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "sonicmoe", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    peers = {"liger": routed_peers.liger(), "sonic": routed_peers.sonic_moe(), **routed_peers.transformers_experts()}
    runs, missing = routed_peers.present({**peers, "composite": routed_peers.composite()})
    assert list(runs) == ["composite"]
    assert missing.keys() == {"liger", "sonic", "transformers"}
    assert all(why.startswith("not installed: ") for why in missing.values())
    assert routed_peers._loaded(too_old) == (None, "does not import: ImportError: needs torch < 2")


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """A module of that name, and the packages that it is in."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    module = ModuleType(parts[-1])
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def liger_as_it_is_called(x: Tensor, gate_up: Tensor, down: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
    assert top_k_index.dtype == torch.int32
    return exactly(x, top_k_index.long(), weights, gate_up, down)


def sonic_as_it_is_called(
    x: Tensor,
    scores: Tensor,
    tokens: Tensor,
    experts: Tensor,
    w1: Tensor,
    b1: None,
    w2: Tensor,
    b2: None,
    *,
    E: int,
    stream_id: None,
    activation_type: str,
    is_inference_mode_enabled: bool,
    concat_layout: bool,
) -> tuple[Tensor, Tensor]:
    """Weights (2I, H, E) and (H, I, E) with the experts outermost in memory; slots in the order of their tokens."""
    assert w1.shape[2] == w2.shape[2] == E
    assert w1.permute(2, 0, 1).is_contiguous()
    assert w2.permute(2, 0, 1).is_contiguous()
    assert tokens.dtype == experts.dtype == torch.int32
    assert (tokens.diff() >= 0).all()
    assert (activation_type, concat_layout) == ("SwiGLU", True)
    assert is_inference_mode_enabled is not torch.is_grad_enabled()
    ids, probs = experts.long().view(x.shape[0], -1), scores.view(x.shape[0], -1)
    return exactly(x, ids, probs, w1.permute(2, 0, 1), w2.permute(2, 0, 1)), experts


def qwen3_as_it_is_called(config: SimpleNamespace) -> torch.nn.Module:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
            self.gate_up_proj = torch.nn.Parameter(torch.empty(experts, 2 * inner, hidden))
            self.down_proj = torch.nn.Parameter(torch.empty(experts, hidden, inner))
            self.shapes = self.gate_up_proj.shape, self.down_proj.shape

        def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
            assert self.shapes == (self.gate_up_proj.shape, self.down_proj.shape)
            assert config._experts_implementation == "grouped_mm"
            return exactly(x, ids, probs, self.gate_up_proj, self.down_proj)

    return Experts()


@pytest.fixture(params=["liger", "sonic_moe", "transformers"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layer:
    """A peer whose package is a reference that takes the arguments as the package does."""
    function = SimpleNamespace(apply=liger_as_it_is_called)
    install(monkeypatch, "liger_kernel.ops.fused_moe", LigerFusedMoEFunction=function)
    install(monkeypatch, "sonicmoe.enums", ActivationType=SimpleNamespace(SWIGLU="SwiGLU"))
    install(monkeypatch, "sonicmoe.functional", moe_general_routing_inputs=sonic_as_it_is_called)
    install(monkeypatch, "transformers.models.qwen3_moe.modeling_qwen3_moe", Qwen3MoeExperts=qwen3_as_it_is_called)
    install(monkeypatch, "transformers.integrations.moe", ALL_EXPERTS_FUNCTIONS={"grouped_mm": None})
    install(monkeypatch, "transformers", Qwen3MoeConfig=SimpleNamespace)
    if request.param == "transformers":
        peers = routed_peers.transformers_experts()
        assert list(peers) == ["transformers eager", "transformers grouped_mm"]
        run = peers["transformers grouped_mm"].run
    else:
        run = getattr(routed_peers, request.param)().run
    assert run is not None
    return run


def test_peers_get_weights_ids_and_probs_as_they_want_them(here: str, installed: Layer) -> None:
    case = Case.random(ROUTED_SHAPE)
    got, wanted = case.step(installed)(), case.step(exactly)()
    assert len(got) == 5
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    torch.testing.assert_close(case.inference(installed)(), wanted[:1], rtol=0, atol=0)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("host_ms", [0, 2, 20])
def test_events_leave_the_host_out(host_ms: int) -> None:
    x = torch.randn(64, 64, device="cuda")

    def slow_to_launch() -> None:
        for _ in range(2):
            x.add_(1)
            time.sleep(host_ms / 2e3)

    assert all(r.ms < 0.2 for r in event_ms(slow_to_launch, lambda: x.add_(1), rounds=5))


@pytest.mark.gpu
@needs_cuda
def test_a_run_that_waits_for_the_gpu_is_refused() -> None:
    waits: Callable[[], object] = torch.randn(64, device="cuda").sum().item
    with pytest.raises(RuntimeError, match="it waits"):
        event_ms(waits, waits, rounds=1)


@pytest.mark.gpu
@needs_cuda
def test_a_run_that_waits_can_be_timed_as_such() -> None:
    x = torch.randn(64, device="cuda")
    runs = {"waits": x.sum().item, "does not": lambda: x.add_(1)}
    waiting = [name for name, run in runs.items() if waits_for_gpu(run)]
    assert waiting == ["waits"]
    ahead: list[None] = []
    times = event_ms_of(runs, 4, waiting=waiting, before=lambda: ahead.append(None), warmup=1)
    assert all(len(each) == 4 for each in times.values())
    assert len(ahead) >= 10
