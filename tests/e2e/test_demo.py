"""The demo on the tiny target: runs whole, survives kill -9, and ends with the same drafters. Takes some minutes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ARMS = ("a1", "stage1", "a1c", "a4")


def command(out: Path) -> list[str]:
    program = "import sys; from dstill_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["demo", "--target", "tiny", "--minutes", "0.2", "--out", str(out), "--json", f"{out}.json"]
    return [sys.executable, "-c", program, *arguments]


def test_a_demo_killed_again_and_again_ends_with_the_same_drafters(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), check=True)
    for seconds in (8, 25, 40, 50):
        process = subprocess.Popen(command(killed))
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command(killed), check=True)
    for arm in ARMS:
        weights = [folder / arm / "drafter" / "model.safetensors" for folder in (whole, killed)]
        assert weights[0].read_bytes() == weights[1].read_bytes(), arm
    results = [json.loads(Path(f"{folder}.json").read_text()) for folder in (whole, killed)]
    outputs = [[arm["output_digests"] for arm in result["arms"]] for result in results]
    assert outputs[0] == outputs[1]
    assert all(digests == outputs[0][0] for digests in outputs[0])  # lossless: every arm says what plain decoding says
    assert (whole / "report.html").stat().st_size > 10_000
