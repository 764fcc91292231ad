"""For processes that hold libtpu, the TPU compiler, and no TPU: they compile for slices that are not attached.

Imports nothing, so that it can act before jax is loaded.
"""

import os
from pathlib import Path

# Read by libtpu when it loads. They name no device: they keep it from asking a metadata server which one it has, and
# from complaining at start-up, in every process, when there is no answer.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock is for running; several processes may compile at once
}


def tpu_attached() -> bool:
    """Whether the system shows a TPU."""
    return any([*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")])


def prepare_environment() -> None:
    """Sets what is not set already. On a machine with a TPU it belongs into processes that only compile."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
