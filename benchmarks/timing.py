"""Times of a run and of its peers, in turns within one process, so that what slows one slows all."""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import torch

# 0.2 ms at 1.8 GHz. No longer than it must be, lest the GPU cool down to a rate that no training sees.
SLEEP_CYCLES = 360_000
LONGEST_SLEEP_CYCLES = 1024 * SLEEP_CYCLES


class Round(NamedTuple):
    """Milliseconds of ours and of its peer, one right after the other."""

    ms: float
    peer_ms: float


Run = Callable[[], object]

_turns = itertools.count()  # over all comparisons: what ran before leaves its mark on the caches


class WaitsForGPUError(RuntimeError):
    """No sleep of the stream is long enough for the host to launch the run, which waits for it."""


def steady_malloc() -> None:
    """Let glibc keep freed memory. By default page faults make identical code differ by 1.15x on a CPU."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    libc.mallopt(m_mmap_threshold, 2**30)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 2**28)


def interleaved_ms(ours: Run, peer: Run, rounds: int, warmup: int) -> list[Round]:
    """Both in every round, on the host's clock."""
    return _pair(interleaved_ms_of({"ours": ours, "peer": peer}, rounds, warmup))


def interleaved_ms_of(runs: Mapping[str, Run], rounds: int, warmup: int) -> dict[str, list[float]]:
    """All in every round, on the host's clock."""
    return _in_turns({name: partial(_host_ms, run) for name, run in runs.items()}, rounds, warmup)


def event_ms(ours: Run, peer: Run, rounds: int, warmup: int = 3) -> list[Round]:
    """Both in every round, on the GPU's clock, without what the host takes to launch them.

    In training the host runs ahead of the GPU, so that its cost does not show in the time of a step; between two events
    of an idle stream it would. Therefore the stream sleeps before the first event (`SLEEP_CYCLES`) while the host
    launches the whole run. Where the host is late all the same, the sleep is doubled and the run timed again. What the
    host itself costs is a figure of its own, from `interleaved_ms`.
    Raises WaitsForGPUError for a run that waits for the GPU, since no sleep is long enough for it.
    """
    return _pair(event_ms_of({"ours": ours, "peer": peer}, rounds, warmup=warmup))


def event_ms_of(
    runs: Mapping[str, Run],
    rounds: int,
    *,
    waiting: Collection[str] = (),
    before: Run | None = None,
    warmup: int = 3,
) -> dict[str, list[float]]:
    """All in every round, as `event_ms` has it.

    waiting: names of the runs that wait for the GPU (`waits_for_gpu`). In training too the host launches them up to
    where they wait, and the rest while the stream is idle: what follows the wait counts with its launches.
    before: what is launched ahead of every run and not timed, to empty a cache for instance.
    """
    clock = _BusyStream(before)
    timed = {name: partial(clock.single_ms if name in waiting else clock.ms, run) for name, run in runs.items()}
    return _in_turns(timed, rounds, warmup)


def waits_for_gpu(run: Run) -> bool:
    try:
        _BusyStream().ms(run)
    except WaitsForGPUError:
        return True
    return False


def _in_turns(timed: Mapping[str, Callable[[], float]], rounds: int, warmup: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(warmup + rounds):
        for name in _order(list(timed), next(_turns)):
            times[name].append(timed[name]())
    return {name: each[warmup:] for name, each in times.items()}


def _order(names: list[str], turn: int) -> list[str]:
    """Each is the first one equally often, and follows either neighbour; two alternate."""
    start = (turn - turn % 2) % len(names)
    order = names[start:] + names[:start]
    return order[::-1] if turn % 2 else order


def _pair(times: dict[str, list[float]]) -> list[Round]:
    return [Round(*pair) for pair in zip(times["ours"], times["peer"], strict=True)]


def _host_ms(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


class _BusyStream:
    """A clock for runs on the current stream that keeps the sleep which turned out to be long enough."""

    def __init__(self, before: Run | None = None) -> None:
        self.cycles = SLEEP_CYCLES
        self.before = before

    def ms(self, run: Run) -> float:
        while True:
            ms, host_was_late = self._once(run, self.cycles)
            if not host_was_late:
                return ms
            if self.cycles >= LONGEST_SLEEP_CYCLES:
                raise WaitsForGPUError(
                    f"the stream slept {self.cycles:,} cycles and the run was not launched: it waits"
                )
            self.cycles *= 2

    def single_ms(self, run: Run) -> float:
        """Whether or not the host was late."""
        return self._once(run, SLEEP_CYCLES)[0]

    def _once(self, run: Run, cycles: int) -> tuple[float, bool]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        if self.before is not None:
            self.before()
        start.record()
        run()
        end.record()
        host_was_late = start.query()
        end.synchronize()
        return start.elapsed_time(end), host_was_late
