"""docs/claims.md: fifty statements, the counts of its verdicts, and commands that exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from fedzmg.theory import CHECKS

ROOT = Path(__file__).parents[1]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


TEXT = (ROOT / "docs" / "claims.md").read_text()
ROWS = [cells(line) for line in TEXT.splitlines() if re.match(r"\| \d+ \|", line)]
COUNTS = {
    name: int(count) for name, count in re.findall(r"^\| ([a-z ]+) \|.*\| (\d+) \|$", TEXT, re.M)
}


def test_statements_are_numbered_and_verdicts_counted() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 51))
    assert {len(row) for row in ROWS} == {5}
    found = Counter(next(v for v in COUNTS if row[-1].startswith(v)) for row in ROWS)
    assert found == COUNTS


def test_commands_name_things_that_exist() -> None:
    for _, _, command, outcome, verdict in ROWS:
        assert command or verdict == "to be run"
        for names in re.findall(r"theory ((?:[TE]\d+ ?)+)", command):
            assert set(names.split()) <= set(CHECKS), command
        assert set(re.findall(r"\b[TE]\d+\b", outcome)) <= set(CHECKS), outcome
        for names in re.findall(r"report ([\w -]+)", command):
            assert all((ROOT / "results" / name).is_dir() for name in names.split()), command
        for path in re.findall(r"(?:experiments|benchmarks)/[\w.-]+", command):
            assert (ROOT / path).is_file(), path


def test_the_field_and_the_ablations_show_every_row() -> None:
    """A table in reproduction.md has a row for every algorithm that was trained for it."""
    text = (ROOT / "docs" / "reproduction.md").read_text()

    def rows(heading: str) -> list[str]:
        """Return the first column of the first table below a heading."""
        body = re.split(rf"^#+ {re.escape(heading)}.*\n", text, flags=re.M)[1]
        table = re.search(r"(?:^\|.*\n)+", body, re.M)
        assert table is not None
        return [cells(line)[0].strip("`") for line in table[0].splitlines()[2:]]

    def trained(directory: str) -> set[str]:
        return {path.parent.name for path in (ROOT / "results" / directory).glob("*/*")}

    field = {name.replace(":", "-") for name in rows("CIFAR-100: the field, first step")}
    assert field == trained("field-grid")
    for heading, directory, others in (
        ("CIFAR-100: what the projection does", "cifar100-mechanism", 0),
        ("Projection, momentum, decay", "ablation-factors-study", 0),
        ("The same with Adam on the server", "ablation-factors-adam-study", 0),
        ("Which layers?", "ablation-layers-study", 2),
        ("Does centring the inputs", "ablation-centring-study", 0),
        ("Local GC, Global GC, GC-Fed", "ablation-centralization-study", 1),
        ("FedZMG-Adam with a projected", "ablation-hybrids-study", 3),
    ):
        assert len(rows(heading)) == len(trained(directory)) + others, heading
