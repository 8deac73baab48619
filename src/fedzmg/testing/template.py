"""Texts that ``fedzmg new algorithm`` writes: an algorithm and its test."""

from pathlib import Path


def algorithm_file(name: str) -> str:
    """Return a file that defines an algorithm of this name."""
    words = "".join(word.capitalize() for word in name.split("_"))
    return _text("algorithm.txt").replace("@NAME@", name).replace("@CLASS@", words)


def pytest_file(module: str) -> str:
    """Return the test of a module that defines an algorithm."""
    return _text("algorithm_test.txt").replace("@MODULE@", module)


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
