"""What may import what, how long a file may be, and which strings may not stand in the repository."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# Imports go from a later line to an earlier one, or stay within a line.
LAYERS = (
    {"allocator", "errors", "dims", "config", "keys", "overrides", "locks", "paths"},
    {"blocks", "refinement", "losses", "sharding", "models"},
    {"distill", "decoding"},
    {"training", "data", "weights", "evaluation"},
    {"runs", "run_inputs"},
    {"planning"},
    {"cli", "commands", "demo", "__main__"},
)
NEVER = {
    "decoding": {"training", "data", "distill"},
    "training": {"decoding"},
    "distill": {"decoding"},
}

LINE_LIMIT = 400
LONGER_FILES: dict[str, str] = {}  # path -> why it may be longer

# Written so that this file does not match itself.
FORBIDDEN = re.compile(r"/(wor[k]|roo[t]|far[m])/|/tm[p]/[a-z]|pythonhoste[d]|pyp[i]\.org")


def unit_of(module: str) -> str:
    """The folder or file directly under dstill_jax that `module` belongs to; "" for dstill_jax itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported_modules(path: Path, source: str | None = None) -> list[tuple[int, str]]:
    """(line, absolute module) of every import in the file, also inside functions and under TYPE_CHECKING."""
    package = path.relative_to(REPO).parent.parts
    found = []
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            # `from package import name` may name a module: both readings are recorded.
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def import_violations(path: Path, source: str | None = None) -> list[str]:
    """The imports of one dstill_jax file that go against LAYERS or NEVER, or load flax outside models/."""
    parts = path.relative_to(REPO / "dstill_jax").with_suffix("").parts
    unit, rank = parts[0], {name: i for i, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for line, module in imported_modules(path, source):
        top, where = module.split(".")[0], f"{'/'.join(parts)}.py:{line} imports {module}"
        if top == "flax" and unit != "models":
            wrong.append(f"{where}: only models/ may")
        if top != "dstill_jax" or (other := unit_of(module)) not in rank or other == unit:
            continue
        if rank[other] > rank.get(unit, len(LAYERS)):  # a part without a layer has a test of its own
            wrong.append(f"{where}: a lower layer may not import a higher one")
        if other in NEVER.get(unit, ()):
            wrong.append(f"{where}: {unit} never imports {other}")
    return wrong


def library_files() -> list[Path]:
    return [
        path
        for path in sorted((REPO / "dstill_jax").rglob("*.py"))
        if path.parent.name != "dstill_jax" or path.stem != "__init__"
    ]


def test_every_part_of_the_library_has_a_layer() -> None:
    known = set().union(*LAYERS)
    units = {path.relative_to(REPO / "dstill_jax").with_suffix("").parts[0] for path in library_files()}
    assert not units - known


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without `__init__.py` imports, but what walks packages (the import check for one) passes it by."""
    tops = (REPO / "dstill_jax", REPO / "pallas_kernels")
    folders = {path.parent for top in tops for path in top.rglob("*.py")}
    assert not [str(folder.relative_to(REPO)) for folder in folders if not (folder / "__init__.py").exists()]


def test_imports_go_one_way() -> None:
    wrong = [message for path in library_files() for message in import_violations(path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("models/layers.py", "from dstill_jax.decoding import sampling"),
        ("models/layers.py", "import dstill_jax.training.loop"),
        ("blocks.py", "from dstill_jax import cli"),
        ("decoding/loop.py", "def f():\n    from dstill_jax.data.prompts import PromptRow"),
        ("decoding/loop.py", "from ..distill import stage1"),
        ("decoding/proposers/chain.py", "from ...training.step import step"),
        ("training/loop.py", "from dstill_jax.decoding.session import Request"),
        ("losses/token.py", "import flax.linen as nn"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str) -> None:
    assert import_violations(REPO / "dstill_jax" / file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("models/layers.py", "import flax.linen as nn"),
        ("decoding/loop.py", "from dstill_jax.models.target import forward\nfrom . import sampling\nimport jax"),
        ("data/generate.py", "from dstill_jax.decoding.session import Request"),
    ],
)
def test_a_right_import_passes(file: str, source: str) -> None:
    assert not import_violations(REPO / "dstill_jax" / file, source)


def test_kernels_import_only_jax_numpy_and_the_standard_library() -> None:
    allowed = {"jax", "numpy", "pallas_kernels"} | sys.stdlib_module_names
    wrong = [
        f"{path.relative_to(REPO)}:{line} imports {module}"
        for path in sorted((REPO / "pallas_kernels").rglob("*.py"))
        for line, module in imported_modules(path)
        if module.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_loads_no_optional_dependency_and_no_device() -> None:
    script = Path(__file__).parent / "import_everything.py"
    done = subprocess.run([sys.executable, "-I", str(script), str(REPO)], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def python_files() -> list[Path]:
    folders = ("dstill_jax", "pallas_kernels", "configs", "experiments", "tests")
    return sorted(path for folder in folders for path in (REPO / folder).rglob("*.py"))


def test_files_are_short_enough_to_be_about_one_noun() -> None:
    lengths = {str(path.relative_to(REPO)): len(path.read_text().splitlines()) for path in python_files()}
    long = {name for name, lines in lengths.items() if lines > LINE_LIMIT}
    assert long == set(LONGER_FILES), {name: lengths.get(name) for name in long ^ set(LONGER_FILES)}


def repository_texts() -> list[Path]:
    """Every text file of the repository: outputs, caches and environments (hidden folders) are not part of it."""
    texts = [path for path in REPO.iterdir() if path.is_file() and path.suffix in {".md", ".toml", ""}]
    for folder in ("dstill_jax", "pallas_kernels", "configs", "experiments", "tests", "docs", ".ci"):
        texts += [path for path in (REPO / folder).rglob("*") if path.is_file()]
    return [
        path for path in texts if path.suffix in {".py", ".md", ".toml", ".json", ".jsonl", ".txt", ".sh", ".ipynb", ""}
    ]


def test_no_machine_path_or_registry_host_in_the_repository() -> None:
    found = [
        f"{path.relative_to(REPO)}:{number}: {line.strip()[:120]}"
        for path in repository_texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if FORBIDDEN.search(line)
    ]
    assert not found, "\n".join(found)
