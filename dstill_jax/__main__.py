"""`python -m dstill_jax` is `dstill`."""

import sys

from dstill_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
