"""Which rows of a block or tree see which, packed into bits. Computed once a round and shared by every layer.

A row's words are int32 [128]: bit t of word c says that it sees row 128 t + c. A tile of 128 columns is then one shift
and one mask of the words, with no movement across lanes, and 1024 rows cost 512 KB where a float32 mask costs 4 MB.
"""

import jax
import jax.numpy as jnp
from jax import Array

LANES = 128
MAX_ROWS = 1024


def check_rows(num_rows: int) -> None:
    """ValueError unless a block or tree may have this many rows."""
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"num_rows={num_rows} must be in 1..{MAX_ROWS}; verify a larger tree in several calls")


def _own_words(num_rows: int) -> Array:  # [N, 128]
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    return jnp.where(rows % LANES == jnp.arange(LANES, dtype=jnp.int32), jnp.int32(1) << (rows // LANES), 0)


def ancestor_words(
    parents: Array,  # int [B, N]
    valid: Array | None = None,  # bool [B, N]
) -> Array:
    """int32 [B, N, 128]: each row sees itself and its ancestors; rows in any order, parents before children or not.

    Args:
      parents: row of each row's parent, -1 for a root. A forest is allowed: chains that share nothing but the context
        are a forest. Cycles are not detected.
      valid: rows that are False see nothing and are seen by nobody; trees of several sizes share one shape.

    Raises:
      ValueError: shapes that do not match, or N outside 1..1024.
    """
    if parents.ndim != 2 or (valid is not None and valid.shape != parents.shape):
        raise ValueError(f"parents must be [B, N] and valid the same, got {parents.shape=} and {valid=}")
    num_rows = parents.shape[1]
    check_rows(num_rows)
    own = jnp.broadcast_to(_own_words(num_rows), (*parents.shape, LANES))
    if valid is not None:
        own = jnp.where(valid[..., None], own, 0)
    # One row more, the parent of roots: it sees nothing and is its own parent.
    words = jnp.pad(own, ((0, 0), (0, 1), (0, 0)))
    jumps = jnp.pad(jnp.where(parents < 0, num_rows, parents), ((0, 0), (0, 1)), constant_values=num_rows)
    gather = jax.vmap(lambda table, index: table[index])
    for _ in range((num_rows - 1).bit_length()):  # after k doublings a row holds its nearest 2^k ancestors and itself
        words, jumps = words | gather(words, jumps), gather(jumps, jumps)
    words = words[:, :num_rows]
    return words if valid is None else jnp.where(valid[..., None], words, 0)


def block_words(num_rows: int) -> Array:
    """int32 [1, N, 128]: every row sees every row, as the slots of a drafted block do. Serves any batch."""
    check_rows(num_rows)
    columns = jnp.arange(num_rows)
    words = jnp.zeros(LANES, jnp.int32).at[columns % LANES].add(jnp.int32(1) << (columns // LANES))
    return jnp.broadcast_to(words, (1, num_rows, LANES))


def chain_parents(chains: int, length: int, *, shared_root: bool = False) -> Array:
    """int32 [1, N] parents of several chains of `length` rows each, one after the other (D2SD, arXiv 2606.04446).

    With `shared_root` row 0 is one more row, the last committed token, and all chains grow from it: N = 1 + chains *
    length. One chain is ordinary causal attention. Broadcast to the batch, or pass as it is to `ancestor_words`.
    """
    if chains < 1 or length < 1:
        raise ValueError(f"{chains=} and {length=} must be at least 1")
    rows = jnp.arange(chains * length, dtype=jnp.int32)
    first = rows % length == 0
    if not shared_root:
        return jnp.where(first, -1, rows - 1)[None]
    return jnp.concatenate([jnp.full(1, -1, jnp.int32), jnp.where(first, 0, rows)])[None]


def unpack_words(words: Array) -> Array:
    """bool [B, N, N] from words [B, N, 128]: `[b, n, c]` says whether row n sees row c."""
    num_rows = words.shape[1]
    tiles = jnp.arange(-(-num_rows // LANES), dtype=jnp.int32)[:, None]
    bits = (words[:, :, None, :] >> tiles) & 1
    return bits.reshape(*words.shape[:2], -1)[..., :num_rows] > 0
