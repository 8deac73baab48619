"""``python -m fedzmg``."""

from fedzmg.cli import main

main()
