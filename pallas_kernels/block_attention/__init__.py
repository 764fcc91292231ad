"""Block attention: see `block_attention`. The reference is the specification."""

from pallas_kernels.block_attention.api import block_attention, context_attention
from pallas_kernels.block_attention.blocks import BlockSizes
from pallas_kernels.block_attention.reference import reference
from pallas_kernels.block_attention.visibility import Visibility, visible_intervals

__all__ = ["BlockSizes", "Visibility", "block_attention", "context_attention", "reference", "visible_intervals"]
