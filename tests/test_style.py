"""House rules that a machine can check: first words of docstrings, sizes of files and packages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "fedzmg"
QUESTION = re.compile(r"\W*(What|Which|Whose|How|Whether|Where|When|Who|Of)\b")


def string_statements(path: Path) -> list[tuple[int, str]]:
    """Return docstrings and the strings below fields and constants."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def test_docstrings_do_not_begin_with_a_question_word() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in string_statements(path)
        if QUESTION.match(text)
    ]
    assert found == []


def test_files_and_packages_stay_small() -> None:
    paths = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.jinja")]
    lines = {path: len(path.read_text().splitlines()) for path in paths}
    assert {path.name: count for path, count in lines.items() if count > 400} == {}
    sizes: dict[str, int] = {}
    for path, count in lines.items():
        package = path.relative_to(SOURCE).parts[0]
        sizes[package] = sizes.get(package, 0) + count
    assert {package: count for package, count in sizes.items() if count > 5_000} == {}
    assert sum(n for path, n in lines.items() if path.suffix == ".py") < 40_000
