#!/usr/bin/env python3
"""Builds the documentation as a searchable site: the repository's Markdown as it is, its links checked.

``python .ci/docs.py`` writes .cache/docs/site/index.html and fails if a link leads nowhere; ``--serve`` shows the site
at http://127.0.0.1:8000. mkdocs-material is installed into .cache/docs/venv the first time, and nowhere else.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "docs"
NEEDS = ("mkdocs==1.6.1", "mkdocs-material==9.8.2")
_LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")  # to a file of the repository


def tracked() -> list[str]:
    """Paths of the repository's files."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def linked(page: Path) -> set[Path]:
    """Files and folders that a page links to, below the repository."""
    found = {(page.parent / target).resolve() for target, _ in _LINK.findall(page.read_text(encoding="utf-8"))}
    return {path for path in found if path.is_relative_to(ROOT)}


def gather(into: Path) -> None:
    """Copies every page, and every file that one links to."""
    shutil.rmtree(into, ignore_errors=True)
    pages = [ROOT / name for name in tracked() if name.endswith(".md")]
    wanted = set(pages).union(*(linked(page) for page in pages))
    for path in sorted(wanted):
        if path.is_file():
            target = into / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="show the site on this machine until Ctrl-C")
    serve = parser.parse_args().serve
    python = FOLDER / "venv" / "bin" / "python"
    uv = ROOT / ".venv" / "bin" / "uv"
    if not (python.parent / "mkdocs").exists():
        subprocess.run([uv, "venv", "--quiet", "--clear", FOLDER / "venv"], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *NEEDS], check=True)
    gather(FOLDER / "pages")
    command = ["serve"] if serve else ["build", "--strict", "--quiet"]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # a notice of the theme about its own future
    built = subprocess.run([python, "-m", "mkdocs", *command, "--config-file", ROOT / ".ci" / "mkdocs.yml"], env=quiet)
    if built.returncode == 0 and not serve:
        print(f"docs: {FOLDER / 'site' / 'index.html'}")
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
