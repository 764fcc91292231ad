"""Where a number was measured: versions, commit, hashes of prompts and of outputs. Called by whoever fills a result."""

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from dstill_jax.errors import UserError

_PACKAGES = ("dstill-jax", "jax", "jaxlib", "flax", "optax", "numpy", "transformers")


def hash_prompts(prompts: Iterable[Sequence[int]]) -> str:
    """Hex SHA-256 over the rendered token ids of all prompts, in order.

    Two results compare only if this is equal, so a template that renders differently (thinking mode, system prompt,
    date) can never pass for a better drafter.
    """
    digest = hashlib.sha256()
    count = 0
    for prompt in prompts:
        digest.update(digest_tokens(prompt).encode())
        count += 1
    if not count:
        raise UserError("hash_prompts needs at least one prompt, got none")
    return digest.hexdigest()


def digest_tokens(tokens: Sequence[int]) -> str:
    """Hex SHA-256 of one token list (ids in decimal, comma-separated): equal digests mean equal tokens."""
    return hashlib.sha256(",".join(str(int(token)) for token in tokens).encode()).hexdigest()


def installed_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of Python, of the operating system and of the packages that are installed, by name."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def current_commit(file: str | Path = __file__) -> str | None:
    """Commit of the checkout that tracks `file`, by default the one this package runs from; None outside a checkout.

    `-dirty` is appended if tracked files differ from the commit.
    """
    here = Path(file).resolve()
    # An installed copy may lie in a virtual environment inside somebody else's checkout: ask whether git tracks us.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("-dirty" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
