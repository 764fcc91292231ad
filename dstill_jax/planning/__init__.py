"""`dstill plan`: compile a run for a TPU slice that is not attached, and say what it would need and could reach."""

from dstill_jax.planning.decode import plan_decoding
from dstill_jax.planning.plan import fit_to_slice, plan, search

__all__ = ["fit_to_slice", "plan", "plan_decoding", "search"]
