"""The one exception that means "the user can fix this".

Raised by every layer before work starts; the command line prints its message on one line and exits 2.
"""


class UserError(ValueError):
    """Bad input: the message names the field or file, the value found, and what to do about it."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is absent; the message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package!r} is not installed; run: pip install 'dstill-jax[{extra}]'")
