"""Weights in and out: Hugging Face folders, drafter checkpoints, and the embedded model and prompts.

`load` is the entry point; nothing is imported here, so that fetching files does not load jax.
"""
