"""The package says what it needs, the wheel holds what it should, and the public names are the promised ones."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import dstill_jax

REPO = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower().replace("_", "-")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this tree with the installed build backend: no index is asked."""
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(out),
        ".",
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_core_dependencies_are_those_of_the_design() -> None:
    """And etils, which orbax brings: its paths are what makes a bucket a checkpoint folder."""
    assert {name_of(line) for line in PROJECT["dependencies"]} == {
        *("jax", "flax", "optax", "orbax-checkpoint"),
        *("numpy", "jaxtyping", "safetensors", "rich"),
        "etils",
    }


def test_nothing_is_pinned_from_above() -> None:
    lines = PROJECT["dependencies"] + [line for extra in EXTRAS.values() for line in extra]
    assert not [line for line in lines if re.search(r"<|==|~=", line.partition(";")[0])]  # after it: for which platform


def test_tensorflow_and_torch_are_in_no_extra() -> None:
    names = {name_of(line) for extra in EXTRAS.values() for line in extra}
    assert not {name for name in names if re.fullmatch(r"tensorflow(-cpu|-text)?|tf-nightly|torch", name)}
    assert set(EXTRAS) == {"data", "tpu", "embedded", "report", "dev"}


def test_no_extra_pulls_tensorflow_in_through_another_package() -> None:
    with pytest.raises(PackageNotFoundError):
        version("tensorflow")


def test_version_has_a_changelog_entry() -> None:
    assert f"## {dstill_jax.__version__}" in (REPO / "CHANGELOG.md").read_text()


def test_wheel_holds_both_packages_and_the_licence_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert wheel.name == f"dstill_jax-{dstill_jax.__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {
        *("dstill_jax", "pallas_kernels", f"dstill_jax-{dstill_jax.__version__}.dist-info")
    }
    assert [name for name in names if name.endswith("LICENSE")]
    in_tree = {
        str(path.relative_to(REPO)) for top in ("dstill_jax", "pallas_kernels") for path in (REPO / top).rglob("*.py")
    }
    assert in_tree <= set(names)


def test_wheel_imports_alone_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = REPO / "tests" / "import_everything.py"
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(tmp_path)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    where = "import sys; sys.path.insert(0, sys.argv[1]); import dstill_jax; print(dstill_jax.__file__)"
    done = subprocess.run([sys.executable, "-I", "-c", where, str(tmp_path)], cwd="/", capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "dstill_jax" / "__init__.py")


def test_command_is_installed_with_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "dstill = dstill_jax.cli:main" in archive.read(entry_points).decode()


def test_public_names_are_pinned() -> None:
    assert dstill_jax.__all__ == [
        *("DraftTree", "UserError", "__version__", "build_tree", "draft_logits", "generate"),
        *("load_drafter", "load_target", "save_drafter"),
    ]


def test_public_names_resolve_and_an_unknown_one_is_an_attribute_error() -> None:
    for name in dstill_jax.__all__:
        assert getattr(dstill_jax, name) is not None
        assert name in dir(dstill_jax)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dstill_jax.no_such_name


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "dstill_jax", "--version"], capture_output=True, text=True, cwd=REPO)
    assert (done.returncode, done.stderr) == (0, "") and dstill_jax.__version__ in done.stdout
