"""README, guide and examples run as printed; every command in them exists."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import typer

from fedzmg.cli import app

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        pytest.param("docs/guide.md", marks=pytest.mark.slow),
        "docs/data.md",
        "docs/diagnose.md",
        "docs/optimizer.md",
        "docs/models.md",
    ],
)
def test_blocks_of_a_page_run_in_order(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))  # dataclasses look it up
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)
    assert capsys.readouterr().out


@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
def test_examples_run_and_stay_short(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / script
    assert len(path.read_text().splitlines()) <= 60
    runpy.run_path(str(path))
    assert capsys.readouterr().out


def test_own_model_and_data_fit_in_fifteen_lines() -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 15


def test_page_of_algorithms_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build_docs.py", "--check"])
    runpy.run_path(str(ROOT / "tools" / "build_docs.py"), run_name="__main__")


def test_readme_names_every_algorithm_and_task() -> None:
    from fedzmg import algorithms, tasks

    text = (ROOT / "README.md").read_text()
    for name in [*algorithms.ALGORITHMS, *tasks.TASKS]:
        assert f"`{name}`" in text


FILES = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/experiments.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("text", FILES, ids=lambda text: text.splitlines()[0])
def test_files_of_experiments_are_valid_and_complete(text: str, tmp_path: Path) -> None:
    from fedzmg.experiment.specs import files, plan

    path = tmp_path / "my.toml"
    path.write_text(text)
    spec = files.read(path)
    assert isinstance(spec, plan.Plan)
    spec.check()
    given = tomllib.loads(text)
    assert set(given) == set(type(spec).model_fields)
    assert set(given["stop"]) == set(type(spec.stop).model_fields)  # type: ignore[attr-defined]
    used = set().union(*given["algorithms"].values())
    assert used >= set(plan.Variant.model_fields) - {"axes"}
    assert ("axes" in used) == (given["kind"] == "grid")


@pytest.mark.parametrize("text", FILES, ids=lambda text: text.splitlines()[0])
def test_defaults_of_experiments_are_the_real_ones(text: str) -> None:
    from fedzmg.experiment.specs import files

    given = tomllib.loads(text)
    fields = files.SPECS[given["kind"]].model_fields
    checked = 0
    for key, comment in re.findall(r"^(\w+) = .*?  +# (.*)$", text.split("\n[")[0], re.MULTILINE):
        if other := re.search(r'\bdefault ("[^"]*"|\[.*?\]|[\d.]+)', comment):
            assert json.loads(other[1]) == fields[key].default, key
        elif comment.startswith("default"):
            assert given[key] == fields[key].default, key
        else:
            continue
        checked += 1
    assert checked >= 9


def test_grid_and_study_of_experiments_belong_together() -> None:
    grid, study = map(tomllib.loads, FILES)
    assert study["rates"] == "runs/my-grid"
    for variant in grid["algorithms"].values():
        variant.pop("axes", None)
    for key in ("task", "algorithms", "preset", "protocol"):
        assert grid[key] == study[key]


ALL = typer.main.get_command(app)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: str) -> list[str]:
    """Lines of blocks that begin with the command or end with it, and what sentences quote."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    blocks = "".join(block for language, block in found if language != "python")
    in_blocks = re.findall(r"^(?:.* && )?(fedzmg .*)$", blocks, re.MULTILINE)
    return in_blocks + re.findall(r"`(fedzmg [^`]+)`", page)


def check_command(line: str) -> None:
    """Read the words of a line as the command would, and do nothing."""
    _, *words = shlex.split(line, comments=True)
    command = ALL
    while hasattr(command, "commands"):
        assert words, f"{line}: no command"
        assert words[0] in command.commands, f"{line}: no such command"
        command = command.commands[words.pop(0)]
    if words:  # a sentence may name just the command
        command.make_context(line, words)
    for file in re.findall(r"experiments/\S+\.toml", line):
        assert (ROOT / file).is_file(), f"{line}: no such file"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path) -> None:
    for line in commands(page.read_text()):
        check_command(line)


def test_wrong_commands_would_be_found() -> None:
    assert len([line for page in PAGES for line in commands(page.read_text())]) > 80
    page = "```\ncd x && fedzmg report a --page-only  # words\n```\nSee `fedzmg list`."
    assert commands(page) == ["fedzmg report a --page-only  # words", "fedzmg list"]
    for wrong in ("reprot a", "report a --pages-only", "study x --rounds", "data gets cifar100",
                  "grid experiments/none.toml", "diff a", "watch a b"):  # fmt: skip
        with pytest.raises(Exception, match=r"[Nn]o such|not a valid|Missing|unexpected"):
            check_command(f"fedzmg {wrong}")
