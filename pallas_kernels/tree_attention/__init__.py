"""Attention of block or tree rows over a long cache and each other, for drafting and verification."""

from pallas_kernels.tree_attention.api import KEY_LAYOUTS, tree_attention
from pallas_kernels.tree_attention.blocks import TreeBlocks
from pallas_kernels.tree_attention.reference import tree_attention_reference
from pallas_kernels.tree_attention.trees import ancestor_words, block_words, chain_parents, unpack_words

__all__ = [
    "KEY_LAYOUTS",
    "TreeBlocks",
    "ancestor_words",
    "block_words",
    "chain_parents",
    "tree_attention",
    "tree_attention_reference",
    "unpack_words",
]
