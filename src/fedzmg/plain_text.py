"""Removal of control characters from text that is shown, which could take over a terminal."""

import re
import unicodedata


def printable(text: object) -> str:
    """Return lines without control and formatting characters; surrogates go, too."""
    spaced = re.sub(r"[\t\r\v\f\x85\u2028\u2029]", " ", str(text).replace("\r\n", "\n"))
    if spaced.isascii() and spaced.replace("\n", "").isprintable():
        return spaced
    return "".join(c for c in spaced if c == "\n" or unicodedata.category(c)[0] != "C")


def plain(text: object) -> str:
    """Return the same in one line."""
    return printable(text).replace("\n", " ")
