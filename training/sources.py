"""The table of text sources, and their packages on this machine. Knows registries, not what text is."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("sources.toml")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One row of `sources.toml`."""

    name: str
    kind: str
    registry: str
    packages: tuple[str, ...]
    format: str
    licence: str
    copyright: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    root: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    held_out: bool = False
    min_cjk: float = 0.0
    share: float = 1.0

    def wants(self, path: str) -> bool:
        """Whether the file at this path of the unpacked package is text we take."""
        if any(re.search(pattern, path) for pattern in self.exclude):
            return False
        return any(re.search(pattern, path) for pattern in self.include)


def load_sources(table: Path = TABLE) -> tuple[Source, ...]:
    """All sources, in order of priority."""
    rows = tomllib.loads(table.read_text(encoding="utf-8"))["source"]
    return tuple(
        Source(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows
    )


def fetch(source: Source, work: Path) -> dict[str, str]:
    """Downloads and unpacks what is missing; returns the version of each package."""
    return {package: _fetch_one(source.registry, package, work) for package in source.packages}


def files(source: Source, work: Path) -> Iterator[tuple[str, bytes]]:
    """(path in the package, bytes) of every wanted file, in sorted order."""
    for package in source.packages:
        root = work / "unpacked" / _folder(package)
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not path.is_symlink() and source.wants(name):
                yield f"{_folder(package)}/{name}", path.read_bytes()


def _folder(package: str) -> str:
    return re.split(r"==|@(?=\d)", package)[0].replace("/", "-").lower()


def _fetch_one(registry: str, package: str, work: Path) -> str:
    target = work / "unpacked" / _folder(package)
    downloads = work / "downloads" / _folder(package)
    if not target.exists():
        downloads.mkdir(parents=True, exist_ok=True)
        _DOWNLOAD[registry](package, downloads)
        archive = _only_file(downloads)
        partial = target.with_name(target.name + ".part")
        partial.mkdir(parents=True, exist_ok=True)
        _UNPACK[registry](archive, partial)
        partial.rename(target)
    return _version(registry, package, _only_file(downloads))


def _only_file(folder: Path) -> Path:
    found = [path for path in folder.iterdir() if path.is_file()]
    if len(found) != 1:
        raise ValueError(f"`{folder}` must hold one downloaded archive. Got {len(found)}.")
    return found[0]


def _version(registry: str, package: str, archive: Path) -> str:
    if registry == "debian":
        return archive.name.split("_")[1].replace("%3a", ":")
    return re.split(r"==|@(?=\d)", package)[1]


def _download_debian(package: str, folder: Path) -> None:
    # apt drops its rights to a user who may not write here; as root it then warns and goes on.
    subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True, capture_output=True)


def _download_pypi(package: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", "-d"]
    subprocess.run([*command, str(folder), package], check=True, capture_output=True)


def _download_npm(package: str, folder: Path) -> None:
    subprocess.run(["npm", "pack", "-s", package], cwd=folder, check=True, capture_output=True)


def _unpack_debian(archive: Path, folder: Path) -> None:
    subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True)


def _unpack_wheel(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(folder)


def _unpack_npm(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


_DOWNLOAD = {"debian": _download_debian, "pypi": _download_pypi, "npm": _download_npm}
_UNPACK = {"debian": _unpack_debian, "pypi": _unpack_wheel, "npm": _unpack_npm}
