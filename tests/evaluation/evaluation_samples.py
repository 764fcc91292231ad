"""Made-up prompts and arms on them, for the tests of this folder."""

from dstill_jax.evaluation import MethodResult, digest_tokens, hash_prompts

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
PROMPTS_HASH = hash_prompts(PROMPTS)
TOKENS = (6, 8, 4, 10)


def make_arm(name: str, rounds: list[list[int]], seconds: list[float] | None, **fields) -> MethodResult:
    """An arm on `PROMPTS` in which the prefill gives no token."""
    fields = {
        "method": "dflash",
        "drafted_length": 3,
        "prompts_hash": PROMPTS_HASH,
        "passes": 1,
        "drafter": name,
        "output_digests": tuple(digest_tokens(range(n)) for n in TOKENS),
    } | fields
    tokens = tuple(sum(response) for response in rounds)
    return MethodResult(name=name, tokens=tokens, acceptance_lengths=rounds, seconds=seconds, **fields)
