"""Imports every module of both packages and fails if that loads an optional dependency or touches a device.

A script, run in a process of its own by test_imports.py and, on the installed wheel, by .ci/run:
`python -I import_everything.py [FOLDER OF THE PACKAGES]`.
"""

import importlib
import os
import pkgutil
import sys

# A platform that does not exist: whatever initialises a backend at import raises.
os.environ["JAX_PLATFORMS"] = "no_such_platform"

OPTIONAL = (
    "array_record",
    "gguf",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "tensorboardX",
    "tensorflow",
    "tensorflow_datasets",
    "tokenizers",
    "torch",
    "transformers",
)


def _loaded() -> list[str]:
    return [name for name in OPTIONAL if name in sys.modules]


def main(folder: str | None = None) -> None:
    """Raises AssertionError naming what was loaded, or the ImportError of the module that needs an extra."""
    if folder is not None:
        sys.path.insert(0, folder)
    library = importlib.import_module("dstill_jax")
    assert "jax" not in sys.modules, "`import dstill_jax` alone must not load jax"
    assert not _loaded(), f"`import dstill_jax` loaded {_loaded()}"
    modules = 0
    for package in (library, importlib.import_module("pallas_kernels")):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
            assert not _loaded(), (
                f"importing {module.name} loaded {_loaded()}; import it inside the function that needs it"
            )
            modules += 1
    print(f"{modules} modules imported, no optional dependency loaded, no device touched")


if __name__ == "__main__":
    main(*sys.argv[1:])
