"""Settings of every test: CPU, no network, no silent broadcasting, fixed seeds, a cache folder of its own."""

import atexit
import os
import shutil
import tempfile

# Before jax or a hub client is imported. Set JAX_PLATFORMS to run the same tests on another device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
# Most of the time of the tests is compilation, and of the same programs again and again: each is compiled once in a run,
# for all workers and the processes that they start.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="dstill-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import random
from collections.abc import Iterator

import hypothesis
import jax
import numpy as np
import pytest

# Fixed examples, and no deadline: the first example of a shape pays for its compilation.
hypothesis.settings.register_profile("dstill", derandomize=True, deadline=None, database=None, max_examples=25)
hypothesis.settings.load_profile("dstill")


@pytest.fixture(autouse=True)
def fixed_global_seeds() -> None:
    """Tests draw from generators of their own; libraries that use the global ones get the same numbers each time."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("dstill_cache"))


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, empty_cache: str) -> None:
    """Fast tests neither read nor write the user's cache; slow ones share it, since they fetch a model of 98 MB."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("DSTILL_CACHE", empty_cache)


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """For modules that compile much and compute little: XLA's expensive passes are left out, which halves their time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
