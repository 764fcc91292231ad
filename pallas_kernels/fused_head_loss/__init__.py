"""Losses of hidden states under a large head, and its choices, without logits in memory."""

from pallas_kernels.fused_head_loss.api import fused_head_loss
from pallas_kernels.fused_head_loss.blocks import HeadTiles
from pallas_kernels.fused_head_loss.choice import fused_head_choice
from pallas_kernels.fused_head_loss.reference import head_choice_reference, head_losses_reference
from pallas_kernels.fused_head_loss.shares import HeadShares
from pallas_kernels.fused_head_loss.terms import KINDS, HeadChoice, HeadLosses, Term

__all__ = [
    "KINDS",
    "HeadChoice",
    "HeadLosses",
    "HeadShares",
    "HeadTiles",
    "Term",
    "fused_head_choice",
    "fused_head_loss",
    "head_choice_reference",
    "head_losses_reference",
]
