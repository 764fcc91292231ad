"""Networks: the target decoder and the block-diffusion drafter. The only package that imports flax."""
