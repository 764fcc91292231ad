"""Decoding as it is defined: one token, one full forward pass without a cache, NumPy filters. And a forced proposer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dstill_jax.decoding.session import Request, Session
from dstill_jax.models import target as target_lib

WIDTH = 64
PROMPTS = [[7], [1, 2, 3, 4, 5], list(range(32)), [9] * 20, [3, 1] * 6, [30, 2, 30], [11, 12]]
REQUESTS = [Request(i, tokens, seed=5) for i, tokens in enumerate(PROMPTS)]
NEW = 20


@functools.partial(jax.jit, static_argnames="config")
def _next_logits(config, params, row, length):
    hidden = target_lib.forward(config, params, row[None], jnp.arange(WIDTH)[None]).hidden
    return target_lib.head(config, params, hidden)[0, length - 1]


def numpy_filter(logits: np.ndarray, top_k: int | None, top_p: float | None) -> np.ndarray:
    """-inf where top-k, then top-p, exclude a token of one row; ties of the last kept token are kept."""
    logits = np.asarray(logits, np.float64)
    if top_k is not None:
        logits = np.where(logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1], logits, -np.inf)
    if top_p is not None:
        p = np.exp(logits - logits.max())
        p /= p.sum()
        order = np.argsort(-logits, kind="stable")
        mass, last = 0.0, 0
        for i in order:
            mass, last = mass + p[i], i
            if mass >= top_p:
                break
        logits = np.where(logits >= logits[last], logits, -np.inf)
    return logits


def decode(target, request: Request, new: int = NEW, temperature=0.0, top_k=None, top_p=None, stops=()) -> list[int]:
    row = np.zeros(WIDTH, np.int32)
    n = len(request.tokens)
    row[:n] = request.tokens
    key = jax.random.fold_in(jax.random.key(request.seed), request.id)
    out: list[int] = []
    while len(out) < new and not (out and out[-1] in stops):
        logits = np.asarray(_next_logits(target.config, target.params, row, n))
        if temperature:
            logits = numpy_filter(logits / np.float32(temperature), top_k, top_p)
            logits = logits + np.asarray(jax.random.gumbel(jax.random.fold_in(key, n), logits.shape))
        row[n] = int(np.argmax(logits))
        out.append(int(row[n]))
        n += 1
    return out


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Knows the text of each row and drafts `pattern[(round + row) % len]` right tokens, then a wrong one."""

    draft_tokens: int
    pattern: tuple[int, ...]

    def propose(self, spec, weights, state) -> Array:
        text = weights.drafter["text"]
        slots = jnp.arange(self.draft_tokens)
        right = jnp.take_along_axis(text, jnp.minimum(state.length[:, None] + slots, WIDTH - 1), axis=1)
        turn = (state.rounds + jnp.arange(text.shape[0])) % len(self.pattern)
        number = jnp.asarray(self.pattern)[turn]
        return jnp.where(slots < number[:, None], right, (right + 1) % spec.target.vocab_size)


def oracle_session(target, requests, texts, pattern, width: int = 4, **options) -> Session:
    """A session whose row b, request b, is drafted by an oracle that expects `texts[b]` after the prompt."""
    session = Session(
        target, method="lookup", draft_tokens=width, batch_size=len(requests), max_prompt_tokens=32, **options
    )
    known = np.zeros((len(requests), WIDTH), np.int32)
    for row, request, text in zip(known, requests, texts, strict=True):
        row[: len(request.tokens) + len(text)] = [*request.tokens, *text]
    session.spec = dataclasses.replace(session.spec, proposer=Oracle(width, pattern))
    session.weights = session.weights._replace(drafter={"text": jnp.asarray(known)})
    return session


def run(session: Session, requests) -> dict:
    return {done.id: done for done in session.run(requests)}
