"""The drafters that experiment 004 ships: small, whole, and as good as their card says."""

import json
from pathlib import Path

import numpy as np
import pytest

from dstill_jax.data.prompt_sets import read_prompts, render
from dstill_jax.decoding.generate import generate
from dstill_jax.weights.embedded import fetch
from dstill_jax.weights.load import load_drafter, load_target
from dstill_jax.weights.safetensors_io import open_weights

SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "004_smollm2_at_scale"


@pytest.mark.parametrize("name", ["drafter", "drafter_stage1"])
def test_the_shipped_weights_are_bfloat16_and_small(name: str) -> None:
    folder = SHIPPED / name
    assert {tensor.dtype for tensor in open_weights(folder).tensors.values()} == {"BF16"}
    assert (folder / "model.safetensors").stat().st_size <= 20e6
    config = json.loads((folder / "config.json").read_text())
    assert (config["block_size"], config["num_target_layers"]) == (8, 30)


@pytest.mark.slow
def test_the_shipped_drafter_is_as_good_as_its_card_says_and_changes_no_token() -> None:
    target = load_target(fetch("smollm2"))
    prompts = render(target, read_prompts("gsm8k", 20))
    options = {"max_new_tokens": 96}
    drafted = generate(
        target, prompts, "dflash", load_drafter(str(SHIPPED / "drafter"), target), draft_tokens=3, **options
    )
    assert drafted.tokens == generate(target, prompts, **options).tokens
    tau = np.concatenate(drafted.acceptance_lengths).mean()  # committed tokens over rounds, of all prompts
    assert 2.42 < tau < 2.46, tau  # the card says 2.44
