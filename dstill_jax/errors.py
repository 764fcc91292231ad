"""The one exception that means "the user can fix this".

Raised by every layer before work starts; the command line prints its message on one line and exits 2.
"""

import numbers


class UserError(ValueError):
    """Bad input: the message names the field or file, the value found, and what to do about it."""


def whole(name: str, value: object) -> int:
    """A whole number, or a UserError that names it: 2.7 drafted tokens are a mistake, not 2."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UserError(f"{name}={value!r} must be a whole number")
    return int(value)


def number(name: str, value: object) -> float:
    """A number, or a UserError that names it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UserError(f"{name}={value!r} must be a number")
    return float(value)


class MissingExtraError(UserError, ImportError):
    """An optional dependency is absent; the message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package!r} is not installed; run: pip install 'dstill-jax[{extra}]'")
