"""Byte-level BPE tokenizers: building them from parts, training small ones, writing them as Hugging Face files.

Called by `gguf` (rebuilds the tokenizer of a GGUF file) and `tiny` (trains one). Needs the `tokenizers` package.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstill_jax.errors import MissingExtraError, UserError

if TYPE_CHECKING:
    import tokenizers

SPLIT_RULES = ("gpt-2", "smollm")
"""Pre-tokenizer rules: `gpt-2` = the GPT-2 regular expression; `smollm` = each digit on its own, then the same."""


def build_tokenizer(
    tokens: Sequence[str], merges: Sequence[str], split_rule: str, special: Iterable[int], added: Iterable[int] = ()
) -> "tokenizers.Tokenizer":
    """A byte-level BPE tokenizer from its vocabulary and merges.

    A byte for which the vocabulary has no token is left out of the encoding, as the models' own tokenizers do.

    Args:
        tokens: token of each id, bytes written in the usual printable alphabet.
        merges: "left right" pairs, best first.
        split_rule: one of `SPLIT_RULES`.
        special: ids of control tokens: matched in text as a whole, skipped when decoding for display.
        added: ids of tokens that are matched as a whole but are ordinary text.

    Raises:
        UserError: unknown rule, doubled token, or a merge that is not a pair of known tokens.
    """
    package = _tokenizers()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UserError(f"the vocabulary has {len(tokens) - len(vocabulary)} doubled tokens; ids would be ambiguous")
    pairs = [_split_merge(merge, vocabulary) for merge in merges]
    tokenizer = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=pairs))
    _set_byte_level(tokenizer, split_rule)
    tokenizer.add_special_tokens([package.AddedToken(tokens[i], special=True, normalized=False) for i in special])
    tokenizer.add_tokens([package.AddedToken(tokens[i], special=False, normalized=False) for i in added])
    if tokenizer.get_vocab_size() != len(tokens):
        raise UserError(f"the rebuilt tokenizer has {tokenizer.get_vocab_size()} tokens, expected {len(tokens)}")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> "tokenizers.Tokenizer":
    """Trains a byte-level BPE of `vocab_size` tokens with the `gpt-2` rule; `special` take ids 0, 1, 2, ..."""
    package = _tokenizers()
    tokenizer = package.Tokenizer(package.models.BPE())
    _set_byte_level(tokenizer, "gpt-2")
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        raise UserError(
            f"vocab_size={vocab_size} is too small for byte-level BPE; it needs at least {len(alphabet) + len(special)}"
        )
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def write_tokenizer_files(
    folder: Path,
    tokenizer: "tokenizers.Tokenizer",
    *,
    chat_template: str | None,
    model_max_length: int,
    **named_tokens: str | None,
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, readable by `transformers.AutoTokenizer`.

    Args:
        named_tokens: `bos_token=`, `eos_token=`, `pad_token=`, `unk_token=`, `mask_token=`; None ones are left out.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        # Named, so that no reader rebuilds the tokenizer by the rules of a model family instead of reading the file.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    config |= {name: token for name, token in named_tokens.items() if token is not None}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _set_byte_level(tokenizer: "tokenizers.Tokenizer", split_rule: str) -> None:
    package = _tokenizers()
    pre, byte_level = package.pre_tokenizers, package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split_rule == "smollm":
        tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), byte_level])
    elif split_rule == "gpt-2":
        tokenizer.pre_tokenizer = byte_level
    else:
        raise UserError(f"pre-tokenizer rule {split_rule!r} is not supported; known rules: {', '.join(SPLIT_RULES)}")
    tokenizer.decoder = package.decoders.ByteLevel()


def _split_merge(merge: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise UserError(f"merge {merge!r} is not a pair of tokens that makes a token")
    return left, right


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "embedded") from error
    return tokenizers
