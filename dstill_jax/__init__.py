"""Block-diffusion drafters for lossless speculative decoding: train, distil, verify, measure, export.

The names below are loaded on first use, so that `import dstill_jax` is quick and touches neither a device nor an
optional dependency.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstill_jax.decoding.generate import draft_logits as draft_logits
    from dstill_jax.decoding.generate import generate as generate
    from dstill_jax.decoding.trees import DraftTree as DraftTree
    from dstill_jax.decoding.trees import build_tree as build_tree
    from dstill_jax.errors import UserError as UserError
    from dstill_jax.weights.load import load_drafter as load_drafter
    from dstill_jax.weights.load import load_target as load_target
    from dstill_jax.weights.load import save_drafter as save_drafter

__version__ = "0.1.0"

_HOME = {
    "DraftTree": "dstill_jax.decoding.trees",
    "UserError": "dstill_jax.errors",
    "build_tree": "dstill_jax.decoding.trees",
    "draft_logits": "dstill_jax.decoding.generate",
    "generate": "dstill_jax.decoding.generate",
    "load_drafter": "dstill_jax.weights.load",
    "load_target": "dstill_jax.weights.load",
    "save_drafter": "dstill_jax.weights.load",
}

__all__ = [
    "DraftTree",
    "UserError",
    "__version__",
    "build_tree",
    "draft_logits",
    "generate",
    "load_drafter",
    "load_target",
    "save_drafter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not come through here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
