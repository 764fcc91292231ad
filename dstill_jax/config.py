"""Model configurations: what a target and a drafter are, as validated frozen dataclasses.

Read by `models/` (to build), `weights/` (to load and save) and everything that needs a shape.
"""

from dataclasses import dataclass

from dstill_jax.errors import UserError


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, half-split layout."""

    theta: float
    scaling: Llama3RopeScaling | None = None


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise UserError(f"{type(config).__name__}.{name} must be positive, got {value}")


def _require_heads(config: "TargetConfig | DrafterConfig") -> None:
    _require_positive(
        config, "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"
    )
    if config.num_heads % config.num_kv_heads:
        raise UserError(
            f"num_heads={config.num_heads} must be a multiple of num_kv_heads={config.num_kv_heads} (grouped heads)"
        )
    if config.head_dim % 2:
        raise UserError(f"head_dim={config.head_dim} must be even for rotary embeddings")


@dataclass(frozen=True)
class TargetConfig:
    """A decoder-only target of the Qwen3 or Llama-3 family."""

    family: str  # "qwen3" or "llama"; decides nothing beyond the fields below, kept for names and messages
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool  # RMSNorm on each query and key head (Qwen3)
    attention_bias: bool  # bias on q, k, v and o projections
    tie_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a text
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _require_heads(self)
        _require_positive(self, "rms_norm_eps", "max_position_embeddings")
        for name, ids in (("bos_token_id", (self.bos_token_id,)), ("eos_token_ids", self.eos_token_ids)):
            for i in ids:
                if i is not None and not 0 <= i < self.vocab_size:
                    raise UserError(
                        f"{name} has {i}, outside the vocabulary of {self.vocab_size} tokens; mend the config"
                    )


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter (arXiv 2602.06036): Qwen3-shaped layers over target features."""

    vocab_size: int  # of the target: the drafter borrows its embedding and head
    hidden_size: int  # D, the target's width
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    block_size: int  # K: the anchor slot and K - 1 drafted slots
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # output of block i (0-based), before the final norm
    num_target_layers: int
    max_position_embeddings: int
    causal: bool = False  # slots of a block see each other in both directions unless set

    def __post_init__(self) -> None:
        _require_heads(self)
        if self.block_size < 2:
            raise UserError(
                f"block_size={self.block_size} leaves no slot to draft; it counts the anchor slot, so use 2 or more"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"mask_token_id={self.mask_token_id} is outside the target's vocabulary of {self.vocab_size} rows;"
                " pick an unused row of the embedding"
            )
        if not self.target_layer_ids:
            raise UserError("target_layer_ids is empty; name at least one target layer to tap")
        for i in self.target_layer_ids:
            if not 0 <= i < self.num_target_layers:
                raise UserError(f"target_layer_ids has {i}, but the target has layers 0..{self.num_target_layers - 1}")
        if len(set(self.target_layer_ids)) < len(self.target_layer_ids):
            raise UserError(f"target_layer_ids={self.target_layer_ids} names a layer more than once")

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """T points spread evenly from layer 1 to layer L - 3, rounded half to even (arXiv 2602.06036, section 5).

    A single tap takes layer L // 2.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    last = num_target_layers - 3
    if num_taps < 1 or last < num_taps:
        raise UserError(f"cannot spread {num_taps} taps over layers 1..{last} of a {num_target_layers}-layer target")
    return tuple(round(1 + i * (last - 1) / (num_taps - 1)) for i in range(num_taps))


def check_drafter_matches(config: DrafterConfig, target: TargetConfig) -> None:
    """Stop unless the drafter was made for a target of this shape; the error names both values.

    Raises:
      UserError: on vocabulary, width, number of target layers, tapped layers or mask token.
    """
    for ours, theirs in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("num_target_layers", "num_layers"),
    ):
        if getattr(config, ours) != getattr(target, theirs):
            raise UserError(
                f"the drafter has {ours}={getattr(config, ours)} but the target has {theirs}={getattr(target, theirs)};"
                " use the target that the drafter was trained for"
            )
    for i in config.target_layer_ids:
        if not 0 <= i < target.num_layers:
            raise UserError(f"the drafter taps layer {i} but the target has layers 0..{target.num_layers - 1}")
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise UserError(
            f"the drafter's mask_token_id={config.mask_token_id} is outside the target's"
            f" {target.vocab_size} embedding rows"
        )
    if config.mask_token_id in target.eos_token_ids:
        raise UserError(
            f"the drafter's mask_token_id={config.mask_token_id} is an end-of-text token of the target"
            f" {target.eos_token_ids}; the mask must be a token that text never contains"
        )
