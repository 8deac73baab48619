"""The README, the guide and the examples run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/data.md"])
def test_blocks_of_a_page_run_in_order(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)
    assert capsys.readouterr().out


@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
def test_examples_run_and_stay_short(script: str) -> None:
    path = ROOT / "examples" / script
    assert len(path.read_text().splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_own_model_and_data_fit_in_fifteen_lines() -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 15


def test_page_of_algorithms_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "build_docs.py"), "--check"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_readme_names_every_algorithm_and_task() -> None:
    from fedzmg import algorithms, tasks

    text = (ROOT / "README.md").read_text()
    for name in [*algorithms.ALGORITHMS, *tasks.TASKS]:
        assert f"`{name}`" in text
