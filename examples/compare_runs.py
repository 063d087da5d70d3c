"""Draw the losses of several runs of train_moe_lm.py into one picture: `python compare_runs.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from moe_lm.errors import UserError
from moe_lm.log import RunLog
from moe_lm.plot import draw_comparison
from moe_lm.trainer import LOG


@dataclass(frozen=True)
class Comparison:
    """Draw training and validation loss of several runs over their steps, into one PNG.

    A run is named after the device it was computed on; after its folder too, if another one has that device. The losses
    can only be compared if the runs learned from one text: name it with --data, since the default text, the source of
    Python's standard library, depends on the Python that runs.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """output folders of the runs; log.jsonl is all that is read there"""
    output: Path = Path("runs/losses.png")
    """the picture"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 for an error."""
    given = tyro.cli(Comparison, args=arguments)
    try:
        logs = named_logs(given.runs)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        draw_comparison(logs, given.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or given.output}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"wrote {given.output}")
    return 0


def named_logs(folders: Sequence[Path]) -> dict[str, RunLog]:
    if not folders:
        raise UserError("runs: wanted at least one output folder, got none")
    logs = [RunLog.read(folder / LOG) for folder in folders]
    devices = [", then ".join(log.device.values()) for log in logs]
    names = devices
    if not all(devices) or len(set(devices)) < len(devices):
        names = [f"{folder} {device}".rstrip() for folder, device in zip(folders, devices, strict=True)]
    return dict(zip(names, logs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
