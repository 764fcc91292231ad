"""Pallas kernels, importable on their own: nothing here imports more than jax, numpy and the standard library.

One folder an operation, the same files in each: `api` (public function and dispatch), `reference` (plain JAX, shipped,
the specification), one file a kernel, `vjp` where there is a gradient, and `blocks` (validated block sizes). Tuned
block sizes are JSON under `tuning/`. A kernel receives the device kind as an argument and never asks the machine.
"""
