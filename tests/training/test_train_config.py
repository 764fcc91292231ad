"""Training configs refuse what they cannot use, and say which field it was."""

import dataclasses
import json
import math

import pytest

from dstill_jax.errors import UserError
from dstill_jax.training import OptimizerConfig, TrainConfig, to_dict


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("learning_rate", "1e-3"),
        ("learning_rate", True),
        ("warmup_fraction", 1.0),
        ("warmup_fraction", -0.1),
        ("final_lr_fraction", 1.5),
        ("b1", 1.0),
        ("b2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -1.0),
        ("clip_norm", 0.0),
        ("clip_norm", "1"),
        ("ema_decay", 1.0),
        ("ema_decay", None),
    ],
)
def test_optimizer_field_out_of_range_or_of_the_wrong_type_is_named(name, value):
    with pytest.raises(UserError, match=rf"OptimizerConfig\.{name} must be"):
        OptimizerConfig(**{"learning_rate": 1e-3, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total_steps", 0),
        ("total_steps", 10.0),
        ("total_steps", True),
        ("accumulate_steps", 0),
        ("seed", -1),
        ("save_every", 0),
        ("keep_last", 0),
        ("log_every", 0),
        ("prefetch", 0),
        ("profile_steps", (0, 3)),
        ("profile_steps", (5, 3)),
        ("profile_steps", (5,)),
        ("progress", 1),
    ],
)
def test_train_field_out_of_range_or_of_the_wrong_type_is_named(name, value):
    with pytest.raises(UserError, match=rf"TrainConfig\.{name} must be"):
        TrainConfig(**{"total_steps": 10, name: value})


def test_configs_survive_json():
    train = TrainConfig(total_steps=9, profile_steps=(3, 5))
    optimizer = OptimizerConfig(learning_rate=1, clip_norm=None)
    assert TrainConfig(**json.loads(json.dumps(to_dict(train)))) == train
    assert OptimizerConfig(**json.loads(json.dumps(to_dict(optimizer)))) == optimizer
    assert isinstance(optimizer.learning_rate, float)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig(total_steps=9).seed = 4
