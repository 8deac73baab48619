"""Run the command line; imports are inside the ``try``, for Ctrl-C may come meanwhile."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
FRAGILE = ("torch", "numpy")  # libraries that Ctrl-C breaks while they load


def main() -> None:
    """Load the commands and run the one that was typed; Ctrl-C until then is one line."""
    # Where the signal is ignored, as behind nohup, it stays so.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if usual:
            signal.signal(signal.SIGINT, _press)
        from fedzmg.cli import main as run_command

        run_command()
    except KeyboardInterrupt:
        _say()
        sys.exit(INTERRUPTED)
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _press(_: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") in FRAGILE:
            _say()
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _say() -> None:
    print("\nfedzmg: interrupted before anything was done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
