"""The benchmarks measure what they say: the clocks, the records, and on small shapes every comparison on a GPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import needs_cuda

from benchmarks import cpu, gpu, gpu_inputs, gpu_layers, gpu_moves, gpu_products, plot, records, roofline
from benchmarks.records import Record, record
from benchmarks.timing import Round, event_ms, interleaved_ms

SHAPE = {"E": 4, "M": 64, "H": 32, "I": 16}
ROUTED_SHAPE = {"T": 48, "H": 32, "I": 16, "E": 4, "top_k": 2}


def test_both_run_in_every_round_and_take_turns_at_going_first() -> None:
    ran: list[str] = []
    times = interleaved_ms(lambda: ran.append("ours"), lambda: ran.append("peer"), rounds=6, warmup=2)
    assert len(times) == 6
    rounds = [tuple(ran[i : i + 2]) for i in range(0, len(ran), 2)]
    assert Counter(rounds) == {("ours", "peer"): 4, ("peer", "ours"): 4}


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
    monkeypatch.setattr(cpu, "CASES", 2)  # each starts a process
    assert len(cpu.compare(shape, torch.float32, False, "grouped_mm", rounds=4)) == 4
    assert len(cpu.compare(shape, torch.float32, True, "loop", rounds=1)) == 1


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """The benchmarks of a GPU, on whatever there is: without one, on the CPU and on the host's clock."""
    if not torch.cuda.is_available():
        for module in (gpu_inputs, gpu_layers, gpu_moves):
            monkeypatch.setattr(module, "DEVICE", "cpu")
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
        gpu_layers.routed_layer(ROUTED_SHAPE, rounds),
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
