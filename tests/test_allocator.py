"""Memory that is freed and asked for again costs page faults once, not every time."""

import os
import platform
import subprocess
import sys

GLIBC = platform.libc_ver()[0] == "glibc"
SCRIPT = """
import resource
from dstill_jax.allocator import keep_freed_memory

kept = keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
length = 64 << 20
piece = b"x" * length
del piece
before = faults()
for _ in range(10):
    piece = b"x" * length
    del piece
print(kept, (faults() - before) * resource.getpagesize() / length)
"""


def faulted(**environment: str) -> tuple[str, float]:
    """(What the function said, how often the piece's pages were asked of the system in ten uses.)"""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=settings | environment, capture_output=True, text=True, check=True
    )
    kept, times = done.stdout.split()
    return kept, float(times)


def test_a_large_piece_is_used_again() -> None:
    kept, times = faulted()
    assert kept == str(GLIBC)
    assert times < 0.5 or not GLIBC


def test_settings_in_the_environment_come_first() -> None:
    kept, times = faulted(MALLOC_TRIM_THRESHOLD_="0")
    assert kept == "False"
    assert times > 5 or not GLIBC  # every use asks anew
