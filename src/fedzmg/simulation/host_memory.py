"""Memory of the process on a CPU."""

import ctypes
import functools
import sys


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed memory: to map and clear it again takes 10 to 25 % of a mapped step."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
