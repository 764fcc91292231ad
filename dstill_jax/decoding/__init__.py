"""Lossless speculative decoding: propose, verify in one target pass, commit, repeat, on the device."""
