"""Every name that a function reads exists: linters cannot tell, since axes such as "B" look like undefined names."""

import builtins
import dis
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

REPO = Path(__file__).parents[1]
FOLDERS = ("dstill_jax", "pallas_kernels", "configs", "experiments", "tests")
FILES = sorted(path for folder in FOLDERS for path in (REPO / folder).rglob("*.py"))
IMPLICIT = {"__file__", "__name__", "__doc__", "__path__", "__qualname__", "__module__", "__annotations__"}


def nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def undefined(source: str) -> set[str]:
    """Names that are read as global ones anywhere in the file, and that neither it nor Python defines."""
    module = compile(source, "file", "exec")
    stored, read = set(), set()
    for code in nested(module):
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
                stored.add(instruction.argval)
            elif instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                read.add(instruction.argval)
    return read - stored - set(dir(builtins)) - IMPLICIT


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_no_name_is_undefined(path: Path) -> None:
    assert not undefined(path.read_text(encoding="utf-8"))


def test_an_import_that_was_forgotten_is_found() -> None:
    source = (
        "import os\n\ndef f(x: Float[Array, 'B']):\n    def g():\n        return os.getpid(x, jnp.sum)\n    return g\n"
    )
    assert undefined(source) == {"jnp", "Float", "Array"}
