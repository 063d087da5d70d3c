"""Times of several callables, interleaved in one run, so that what slows one slows all."""

from __future__ import annotations

import ctypes
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch


def steady_malloc() -> None:
    """Let glibc keep freed memory. By default page faults make identical code differ by 1.15x on a CPU."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    libc.mallopt(m_mmap_threshold, 2**30)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 2**28)


def interleaved_ms(runs: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, float]:
    """Median milliseconds of each run on the host's clock; every round runs all of them, in an order of its own.

    Random orders, since what runs before leaves its mark on caches and allocator.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    shuffle = random.Random(0)
    for round_ in range(-warmup, rounds):
        for name in shuffle.sample(names, len(names)):
            start = time.perf_counter()
            runs[name]()
            if round_ >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(ms) for name, ms in times.items()}


def event_ms(runs: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 3) -> dict[str, float]:
    """Median milliseconds of each run on the GPU's clock; every round runs all of them, in an order of its own."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0)
    for round_ in range(-warmup, rounds):
        for name in shuffle.sample(list(runs), len(runs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runs[name]()
            end.record()
            end.synchronize()
            if round_ >= 0:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(ms) for name, ms in times.items()}
