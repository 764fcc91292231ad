"""How this process's C library treats memory that was freed. Called by the command line and its worker processes.

XLA takes the temporaries of a program from the C library and gives them back after every call. glibc asks the system
for such large pieces and returns them at once, so that a training step on a CPU begins with thousands of page faults.
"""

import ctypes
import os

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1
_CHOSEN_BY_USER = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Keeps up to 2 GiB of freed memory in the process, to be used again; with other C libraries than glibc, nothing.

    Worth a quarter of the time of a small drafter's training step on a CPU. Settings in the environment come first.

    Returns: whether it was done.
    """
    if any(name in os.environ for name in _CHOSEN_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl; others; Windows
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _LARGEST))
