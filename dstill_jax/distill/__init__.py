"""DStill: two training stages that teach a block-diffusion drafter to finish a block in one pass.

Pure functions (params, frozen, batch, key, progress) -> (loss sum, weight, metrics); `training/` drives them.
"""
