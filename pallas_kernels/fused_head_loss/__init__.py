"""Losses of hidden states under a large head, without its logits in memory."""

from pallas_kernels.fused_head_loss.api import fused_head_loss
from pallas_kernels.fused_head_loss.blocks import HeadTiles
from pallas_kernels.fused_head_loss.reference import head_losses_reference
from pallas_kernels.fused_head_loss.terms import KINDS, HeadLosses, Term

__all__ = ["KINDS", "HeadLosses", "HeadTiles", "Term", "fused_head_loss", "head_losses_reference"]
