"""A target for tests that answers without a model: each token is a hash of the prompt and the tokens so far.

Run as a script it is a worker process, as `dstill_jax.data.worker` is for real targets. Environment variables make it
slow or make it fail.
"""

import hashlib
import os
import sys
import time
from dataclasses import dataclass

import numpy as np

from dstill_jax.data.backend import TargetFacts

STOP, HIDDEN, LAYERS = 3, 4, 6


class FakeTokenizer:
    """One token a character (its code point + 4), special tokens written <|name|>."""

    specials = {"<|start|>": 1, "<|end|>": STOP}
    chat_template = "fake"
    eos_token_id = STOP

    def encode(self, text, add_special_tokens=False):
        tokens = []
        while text:
            special = next((s for s in self.specials if text.startswith(s)), None)
            tokens.append(self.specials[special] if special else ord(text[0]) + 4)
            text = text[len(special) if special else 1 :]
        return tokens

    def decode(self, tokens):
        names = {token: name for name, token in self.specials.items()}
        return "".join(names.get(t) or (chr(t - 4) if t >= 4 else f"<{t}>") for t in tokens)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, chat_template, enable_thinking, **_):
        assert not tokenize
        text = "".join(f"<|start|>{m['role']}\n{m['content']}<|end|>\n" for m in messages)
        return text + ("<|start|>assistant\n" if add_generation_prompt else "")

    def __repr__(self):
        return "FakeTokenizer()"


@dataclass
class FakeCompletion:
    id: int
    tokens: list
    finish_reason: str
    features: np.ndarray | None


def fake_answer(prompt, seed, max_new_tokens):
    """The answer of the fake target: a pure function of the prompt and the seed."""
    new = []
    while len(new) < max_new_tokens:
        digest = hashlib.sha256(repr((seed, prompt, new)).encode()).digest()
        new.append(STOP if digest[0] < 20 else 4 + digest[1])
        if new[-1] == STOP:
            break
    return new


def fake_features(tokens, num_taps):
    """Row i is a function of tokens[: i + 1], as a causal target's features are."""
    width = (num_taps + 1) * HIDDEN
    sums = np.cumsum(tokens)[:-1] % 997
    return (sums[:, None] + np.arange(width) / 4).astype(np.float16)


class FakeBackend:
    tokenizer = FakeTokenizer()

    def __init__(self, config):
        self.config = config
        self.answered = []
        self.fingerprint = "fake-target"

    @property
    def facts(self):
        return TargetFacts(self.fingerprint, 300, HIDDEN, LAYERS, 2048, (STOP,))

    def load(self):
        if os.environ.get("FAKE_REFUSE"):
            from dstill_jax.errors import UserError

            raise UserError("the fake target refuses")

    def answer(self, requests, *, longest_prompt, shared_prefix, stop_token_ids):
        assert tuple(stop_token_ids) == (STOP,)
        requests = sorted(
            requests, key=lambda r: hashlib.sha256(str(r.tokens).encode()).digest()
        )  # not the given order
        for request in requests:
            assert len(request.tokens) <= longest_prompt
            assert list(request.tokens[: len(shared_prefix)]) == list(shared_prefix)
            time.sleep(float(os.environ.get("FAKE_SECONDS", 0)))
            if os.environ.get("FAKE_CRASH"):
                raise RuntimeError("the fake target broke")
            new = fake_answer(request.tokens, request.seed, self.config.max_new_tokens)
            features = None
            if self.config.record_features:
                features = fake_features([*request.tokens, *new], len(self.config.tap_ids))
            self.answered.append(request.id)
            yield FakeCompletion(request.id, new, "stop" if new[-1] == STOP else "length", features)


if __name__ == "__main__":
    from dstill_jax.data import worker

    sys.exit(worker.main(sys.argv[1:], FakeBackend))
