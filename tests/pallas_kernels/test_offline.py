"""A process with the TPU compiler and no TPU starts quietly, on the CPU."""

import os
import subprocess
import sys

from pallas_kernels import offline


def test_jax_starts_without_a_word_of_the_tpu_that_is_not_there(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    program = (
        "from pallas_kernels import offline; offline.prepare_environment(); import jax; print(jax.default_backend())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "tpu" not in done.stderr.lower(), done.stderr
    assert (done.stdout.strip() == "tpu") == offline.tpu_attached()


def test_what_is_set_already_stays(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    offline.prepare_environment()
    assert os.environ["TPU_WORKER_ID"] == "3"
