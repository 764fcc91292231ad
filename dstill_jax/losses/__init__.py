"""Losses on drafted slots: what is compared with what, how slots are weighed, and the head."""
