"""Times of a run and of its peer, in turns within one process, so that what slows one slows both."""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Callable
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

_ours_first = itertools.cycle((True, False))  # over all comparisons: what ran before leaves its mark on the caches


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
    return _in_turns(_host_ms, ours, peer, rounds, warmup)


def event_ms(ours: Run, peer: Run, rounds: int, warmup: int = 3) -> list[Round]:
    """Both in every round, on the GPU's clock, without what the host takes to launch them.

    In training the host runs ahead of the GPU, so that its cost does not show in the time of a step; between two events
    of an idle stream it would. Therefore the stream sleeps before the first event (`SLEEP_CYCLES`) while the host
    launches the whole run. Where the host is late all the same, the sleep is doubled and the run timed again. What the
    host itself costs is a figure of its own, from `interleaved_ms`.
    Raises RuntimeError for a run that waits for the GPU, since no sleep is long enough for it.
    """
    return _in_turns(_BusyStream().ms, ours, peer, rounds, warmup)


def _in_turns(clock: Callable[[Run], float], ours: Run, peer: Run, rounds: int, warmup: int) -> list[Round]:
    times = []
    for _ in range(warmup + rounds):
        if next(_ours_first):
            ms, peer_ms = clock(ours), clock(peer)
        else:
            peer_ms, ms = clock(peer), clock(ours)
        times.append(Round(ms, peer_ms))
    return times[warmup:]


def _host_ms(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


class _BusyStream:
    """A clock for runs on the current stream that keeps the sleep which turned out to be long enough."""

    def __init__(self) -> None:
        self.cycles = SLEEP_CYCLES

    def ms(self, run: Run) -> float:
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self.cycles)
            start.record()
            run()
            end.record()
            host_was_late = start.query()
            end.synchronize()
            if not host_was_late:
                return start.elapsed_time(end)
            if self.cycles >= LONGEST_SLEEP_CYCLES:
                raise RuntimeError(f"the stream slept {self.cycles:,} cycles and the run was not launched: it waits")
            self.cycles *= 2
