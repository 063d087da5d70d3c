"""The result files: what was measured, on what, when."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

from benchmarks.timing import Round

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Record:
    """One comparison. shape names its sizes, path what ran; tflops and tbps (TB/s) are the package's own.

    ms and peer_ms: medians over all rounds. ratio: peer_ms / ms; above 1, the package is faster.
    """

    op: str
    shape: dict[str, int]
    counts: str
    dtype: str
    path: str
    ms: float
    peer: str
    peer_ms: float
    ratio: float
    tflops: float | None = None
    tbps: float | None = None
    variant: str | None = None  # which of the op's: its backward, the way back of permute, host cost, forward alone


def record(
    op: str,
    shape: dict[str, int],
    counts: str,
    dtype: str,
    path: str,
    peer: str,
    rounds: Sequence[Round],
    *,
    flops: float | None = None,
    num_bytes: float | None = None,
    variant: str | None = None,
) -> Record:
    ms, peer_ms = median(r.ms for r in rounds), median(r.peer_ms for r in rounds)
    return Record(
        op,
        shape,
        counts,
        dtype,
        path,
        round(ms, 4),
        peer,
        round(peer_ms, 4),
        round(peer_ms / ms, 3),
        tflops=None if flops is None else round(flops / ms / 1e9, 3),
        tbps=None if num_bytes is None else round(num_bytes / ms / 1e9, 3),
        variant=variant,
    )


def write(
    name: str,
    hardware: dict[str, str | int],
    records: list[Record],
    packages: Sequence[str] = ("torch", "triton"),
    **more: object,
) -> Path:
    """benchmarks/results/<name>: hardware, date, versions of those packages that are there, and the records."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    content = {
        **hardware,
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "records": [{k: v for k, v in asdict(r).items() if v is not None} for r in records],
        **more,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
