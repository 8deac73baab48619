"""The examples of the optimizer run, learn, and move sums over inputs by weight decay alone.

Every framework works in a process of its own: they load in seconds and warn in their own ways. What
is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[2] / "examples" / "optimizer"

FRAMEWORKS = {
    "with_lightning.py": ["lightning"],
    "with_trainer.py": ["transformers", "accelerate"],
    "flower_server.py": ["flwr", "ray"],
    "nvflare_job.py": ["nvflare"],
    "with_pfl.py": ["pfl"],
    "with_opacus.py": ["opacus"],
    "with_optax.py": ["optax", "jax", "flax"],
}
"""Example to the packages that it needs."""
CLIENTS = {"flower_client.py", "nvflare_client.py"}
"""Run by the servers of their frameworks."""


def run(arguments: list[str], modules: list[str], place: Path) -> str:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    # Whatever asks for a network finds a proxy that is not there.
    closed = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    local = {"no_proxy": "127.0.0.1,localhost", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **closed, **quiet, **local}, cwd=place,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(printed: str) -> None:
    [(first, last)] = re.findall(r"^loss (\S+) -> (\S+)$", printed, re.MULTILINE)
    [drift] = re.findall(r"^sums over inputs .* by (\S+)$", printed, re.MULTILINE)
    assert float(last) < 0.7 * float(first)
    assert float(drift) < 1e-4


def test_every_example_is_short_and_is_run() -> None:
    found = {path.name: path.read_text().splitlines() for path in PLACE.glob("*.py")}
    assert set(found) == {"plain_torch.py", *FRAMEWORKS, *CLIENTS}
    assert max(map(len, found.values())) < 40


def test_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PLACE / "plain_torch.py"))
    check(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("script", FRAMEWORKS)
def test_framework(script: str, tmp_path: Path) -> None:
    check(run([str(PLACE / script)], FRAMEWORKS[script], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "modules"), [(0, ["transformers"]), (1, ["optax", "jax"])])
def test_blocks_of_the_page_run(number: int, modules: list[str], tmp_path: Path) -> None:
    page = (PLACE.parents[1] / "docs" / "adapters.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    run(["-c", blocks[number]], modules, tmp_path)


def test_page_names_every_example() -> None:
    page = (PLACE.parents[1] / "docs" / "adapters.md").read_text()
    assert set(re.findall(r"`(\w+\.py)`", page)) == {path.name for path in PLACE.glob("*.py")}
