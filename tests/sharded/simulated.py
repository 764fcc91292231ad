"""Functions of test files run in processes of their own: the number of simulated devices is fixed when jax starts.

`python simulated.py FILE FUNCTION ARGUMENTS_AS_JSON` calls a function and prints its result as JSON.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def environment(devices: int) -> dict[str, str]:
    """Of a process that imports what this one imports and sees so many simulated devices."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def call(file: str, function: str, devices: int = 8, **arguments) -> Any:
    """`function(**arguments)` of a file in this folder, in a process with so many simulated devices."""
    command = [sys.executable, __file__, Path(file).stem, function, json.dumps(arguments)]
    done = subprocess.run(command, env=environment(devices), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def called_in(file: str) -> Callable[..., Any]:
    """`call`, for functions of that file."""
    return functools.partial(call, file)


if __name__ == "__main__":
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # as the fixture `quick_compilation`
    module = importlib.import_module(sys.argv[1])
    print(json.dumps(getattr(module, sys.argv[2])(**json.loads(sys.argv[3]))))
