"""Draft trees walked in plain Python."""

from collections.abc import Sequence


def accepted_in_tree(tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool], text: Sequence[int]) -> int:
    """How many tokens of `text`, what the target writes after the anchor, lie along one path of a draft tree.

    Arguments as the fields of a `DraftTree` of one row: a parent of -1 is the anchor, parents come before children. What
    a round would accept of the tree if nothing cut it, for `AcceptanceCounts.from_matched`.
    """
    length = {-1: 0}  # of the text along the path to each node on it
    for node, (token, parent, real) in enumerate(zip(tokens, parents, valid, strict=True)):
        along = length.get(int(parent))
        if real and along is not None and along < len(text) and int(token) == int(text[along]):
            length[node] = along + 1
    return max(length.values())
