"""Memory of the process on a CPU."""

import ctypes
import functools
import sys


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next result instead of returning it to the system.

    Otherwise every page of a large result is mapped and cleared again, which takes 10 to 25 % of a
    mapped step's time. Systems without glibc keep their own ways.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
