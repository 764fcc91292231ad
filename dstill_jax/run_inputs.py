"""What a run learns from its data before the first step: whether they fit, the scale of taps, the training vocabulary."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dstill_jax.config import DrafterConfig
from dstill_jax.data.joined import Dataset
from dstill_jax.dims import Params
from dstill_jax.distill import initialise
from dstill_jax.errors import UserError
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import Drafter
from dstill_jax.models.target import Target

_SCALE_ROWS = 64
_LOOKED_AT = 256  # rows in which the mask token is looked for


def check_features(data: str | tuple[str, ...], dataset: Dataset, drafter: DrafterConfig, target: Target) -> bool:
    """Whether features have to be computed in the step. Stored ones must be of this target and of these taps."""
    inputs = dataset.provenance.get("inputs", {})
    made_by = inputs.get("target_fingerprint")
    if made_by not in (None, target.fingerprint):
        raise UserError(
            f"{data} holds answers of target {str(made_by)[:12]}, the run's target is"
            f" {target.fingerprint[:12]}; prepare the data with this target"
        )
    if not dataset.feature_width:
        return True
    stored = tuple(inputs.get("tap_ids", ()))
    if stored != drafter.target_layer_ids:
        raise UserError(
            f"{data} stores taps {stored}, the drafter reads {drafter.target_layer_ids}; prepare it with those"
            " tap_ids, or without features"
        )
    return False


def check_mask(dataset: Dataset, mask: int) -> None:
    """Raises UserError when the first rows hold the mask token of a new drafter as text."""
    for i in range(min(_LOOKED_AT, len(dataset))):
        if count := int((dataset[i].tokens == mask).sum()):
            raise UserError(
                f"new.mask_token_id={mask} stands {count} times in row {i} of the data, where it could not be told from a"
                " slot to fill; pick an id that texts never contain"
            )


def tap_scale(dataset: Dataset, drafter: DrafterConfig, target: Target, seq_len: int, mesh: Mesh | None) -> np.ndarray:
    """From the first rows of the dataset, as far as batches show them: the same whatever is drawn later."""
    width = drafter.num_taps * drafter.hidden_size
    rows = range(min(_SCALE_ROWS, len(dataset)))
    if dataset.feature_width:
        return initialise.tap_scale(np.concatenate([dataset.features(i)[:-1][:seq_len, :width] for i in rows]))

    def forward(params: Params, tokens: np.ndarray, positions: np.ndarray) -> jax.Array:
        return target_lib.forward(target.config, params, tokens, positions, tap_ids=drafter.target_layer_ids).taps

    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    forward = jax.jit(forward, out_shardings=everywhere)
    parts = []
    for i in rows[:8]:
        tokens = np.asarray(dataset[i].tokens[:seq_len], np.int32)
        padded = np.zeros(-(-len(tokens) // 128) * 128, np.int32)
        padded[: len(tokens)] = tokens
        positions = np.arange(len(padded), dtype=np.int32)[None]
        taps = np.asarray(forward(target.params, padded[None], positions))
        parts.append(taps[0, : len(tokens)].astype(np.float32))
    return initialise.tap_scale(np.concatenate(parts))


def training_vocabulary(
    size: int | None,
    seq_len: int,
    dataset: Dataset,
    target: Target,
    drafter: DrafterConfig,
    given: Sequence[Drafter],
) -> np.ndarray | None:
    """Token ids to train on, ascending; None: all. Those of the drafters given, or the most frequent of the data."""
    known = {d.vocabulary for d in given if d.vocabulary is not None}
    if len(known) > 1:
        raise UserError(f"{given[0].source} and {given[1].source} draft other tokens; take drafters of one vocabulary")
    if known:
        kept = np.asarray(known.pop())
        if size not in (None, len(kept), len(kept) + 1):  # drafters of before left the mask out of what was asked for
            raise UserError(
                f"RunConfig.vocabulary={size}, but {given[0].source} drafts {len(kept)} tokens; give that"
                " many, or leave it out"
            )
        return kept
    if size is None:
        return None
    seen = (dataset[i] for i in range(len(dataset)))
    labels = (row.tokens[:seq_len][row.loss_mask[:seq_len]] for row in seen)  # prompts are read, and never drafted
    return initialise.training_vocabulary(labels, target.config.vocab_size, size, drafter.mask_token_id)
