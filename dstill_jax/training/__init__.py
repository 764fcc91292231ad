"""Training: optimiser, state, step, checkpoints, metrics and the loop that ties them together."""

from dstill_jax.training.checkpoints import CheckpointStore, best_step, latest_step, load_metadata, load_params
from dstill_jax.training.config import OptimizerConfig, TrainConfig, to_dict
from dstill_jax.training.interrupt import Interrupted
from dstill_jax.training.loop import NonFiniteError, train
from dstill_jax.training.metrics import (
    ConsoleWriter,
    JsonlWriter,
    MetricWriter,
    MultiWriter,
    TensorBoardWriter,
    read_jsonl,
)
from dstill_jax.training.optimizer import Optimizer, build_optimizer, build_schedule
from dstill_jax.training.prefetch import Data
from dstill_jax.training.state import TrainState, init_state
from dstill_jax.training.step import LossFn, make_train_step

__all__ = [
    "CheckpointStore",
    "ConsoleWriter",
    "Data",
    "Interrupted",
    "JsonlWriter",
    "LossFn",
    "MetricWriter",
    "MultiWriter",
    "NonFiniteError",
    "Optimizer",
    "OptimizerConfig",
    "TensorBoardWriter",
    "TrainConfig",
    "TrainState",
    "best_step",
    "build_optimizer",
    "build_schedule",
    "init_state",
    "latest_step",
    "load_metadata",
    "load_params",
    "make_train_step",
    "read_jsonl",
    "to_dict",
    "train",
]
