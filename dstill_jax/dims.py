"""The letters that name array axes, used in every shape in this project.

======  ==========================================================================
B       batch rows
S       context length (tokens of a row)
N       new tokens of one forward pass
A       anchors (blocks) of a row
K       slots of a block (`block_size`); slot 0 holds the clean anchor token
D       model width
H, G    query heads, key/value heads
E       head size
F       MLP width
V       vocabulary size
L       layers
T       taps (target layers whose outputs condition the drafter)
C       capacity of a key/value cache, in tokens
W       drafted tokens of one round, at most K - 1
======  ==========================================================================

A mask is boolean and ``True`` always means "may attend" or "is counted".
"""

from typing import Any

Params = dict[str, Any]
"""A plain nested dict of arrays: what every public function takes for weights."""
