"""What every test runs under: a seed of its own, poisoned memory, and one run for each device that there is."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode asks cuBLAS for it

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels then run on CPU tensors

from hypothesis import HealthCheck, settings

from grouped_experts.ops.families import use_family

settings.register_profile(
    "grouped_experts",
    derandomize=True,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("grouped_experts")

torch.set_num_threads(1)  # on tensors this small, threads that wait for each other take three times as long

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


DEVICES = {"cpu": "cpu", "interpreter": "cpu", "cuda": "cuda", "portable": "cuda"}
MARKS = {"cuda": [pytest.mark.gpu, needs_cuda], "portable": [pytest.mark.gpu]}


@pytest.fixture(scope="session", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in DEVICES])
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors are. "interpreter" is the CPU with the portable kernels in Triton's interpreter.

    "portable" is a Hopper GPU with the portable kernels, where "cuda" stands for those that are made for it.
    """
    return DEVICES[request.param]


@pytest.fixture(autouse=True)
def _family(request: pytest.FixtureRequest) -> Iterator[None]:
    if forced_portable(request.node):
        with use_family("portable"):
            yield
    else:
        yield


def forced_portable(item: pytest.Item) -> str | None:
    """The device, if it is one on which the portable kernels are not what runs unasked."""
    name = item.callspec.params.get("device") if hasattr(item, "callspec") else None
    return name if name in ("interpreter", "portable") else None


# What "interpreter" and "portable" run: the tests that show the most. The interpreter takes up to a second a launch,
# and fp64 and bf16 go to the reference there. "cuda" runs all tests.
WITH_PORTABLE = {
    "test_layouts",
    "test_sizes",
    "test_empty_sizes",
    "test_accumulate_in_every_layout",
    "test_sum_in_every_layout",
    "test_forward_in_every_layout",
    "test_forward_sizes",
    "test_backward_in_every_layout",
    "test_backward_sizes",
    "test_closed_form",
    "test_routes",
    "test_any_number_of_choices",
    "test_da_is_not_rounded_before_dprobs",
    "test_da_is_not_rounded_before_dh",
    "test_inf_in_dy_reaches_dprobs",
    "test_layouts_with_nan_in_rows_of_no_expert",
}
INTERPRETED_DTYPES = (None, torch.float32, torch.float16)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def runs(item: pytest.Item) -> bool:
        forced = forced_portable(item)
        if forced is None:
            return True
        dtypes = [value for value in item.callspec.params.values() if isinstance(value, torch.dtype)] or [None]
        if forced == "portable":
            wanted, here = (None, torch.bfloat16, torch.float16), on_hopper
        else:
            wanted, here = INTERPRETED_DTYPES, not torch.cuda.is_available()
        return here and item.originalname in WITH_PORTABLE and all(dtype in wanted for dtype in dtypes)

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


class Place(NamedTuple):
    """A device, and the dtype there."""

    device: str
    dtype: torch.dtype
    interpreted: bool = False

    def variants(self, *variants: Any) -> tuple[Any, ...]:
        """All of them, in the interpreter the last, which has the most in it."""
        return variants[-1:] if self.interpreted else variants


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Of `places`: the same tests on a CPU, in Triton's interpreter, and on a GPU, each with one family of kernels."""
    family, device, dtype = request.param
    with use_family(family):
        yield Place(device, dtype, family == "portable" and device == "cpu")


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """A RuntimeError where torch makes the host wait for the GPU."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Messages(logging.Handler):
    """What was logged while it was attached."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture
def paths() -> Iterator[list[str]]:
    """The debug log that tells which kernels a call took."""
    logger, messages = logging.getLogger("grouped_experts.ops.hopper.dispatch"), Messages()
    logger.addHandler(messages)
    logger.setLevel(logging.DEBUG)
    yield messages.seen
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(messages)


@pytest.fixture
def many_threads() -> Iterator[None]:
    """Four threads on the CPU, for what must not depend on their race."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Random tensors that differ from test to test and are the same on every run."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Memory that nobody wrote holds NaN (the largest value, for integers), so that reading it shows.

    Deterministic mode fills what torch.empty returns, on every device. On a GPU the allocator's free blocks are filled
    as well.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if torch.cuda.is_available():
        _poison_free_blocks()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _poison_free_blocks() -> None:
    # The allocator keeps one pool for blocks below 1 MiB and one for the others.
    small = [torch.full((2**17,), torch.nan, device="cuda") for _ in range(64)]
    large = [torch.full((2**21,), torch.nan, device="cuda") for _ in range(16)]
    del small, large
