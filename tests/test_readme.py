"""The README's Python runs, block after block as a reader would type it, and its make targets exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run() -> None:
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
    assert blocks
    namespace: dict[str, Any] = {}
    for block in blocks:
        above = README[: block.start(1)].count("\n")  # so that a traceback shows the README's own line numbers
        exec(compile("\n" * above + block.group(1), str(ROOT / "README.md"), "exec"), namespace)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake (\w+)", "\n".join(code_in(README)))) <= targets


def test_paths_exist() -> None:
    named = {word for code in code_in(README) for word in re.findall(r"[\w./-]+/[\w.-]+\.(?:py|md|json)\b", code)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def code_in(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
