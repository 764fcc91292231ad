"""Shapes of public targets, so that a run can be planned before (or without) fetching gigabytes of weights.

From their `config.json` files. Loading a target never reads this table.
"""

from dstill_jax.config import Llama3RopeScaling, RopeConfig, TargetConfig


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> TargetConfig:
    return TargetConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qk_norm=True,
        attention_bias=False,
        tie_embeddings=tied,
        max_position_embeddings=40960,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    )


KNOWN = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, False),
    "meta-llama/Llama-3.1-8B-Instruct": TargetConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, Llama3RopeScaling(8.0, 1.0, 4.0, 8192)),
        qk_norm=False,
        attention_bias=False,
        tie_embeddings=False,
        max_position_embeddings=131072,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    ),
}
