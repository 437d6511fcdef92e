"""Tries every MoE architecture of the installed vLLM, stock against the plugin, and writes the table of verdicts.

    python tests/upstream/families.py [--only NAME,NAME] [--again] [--minutes M]

Each architecture gets a process of its own (``one_family.py``), forked from one that has imported vLLM, and a time
limit. The result is written after each, so an interrupted run continues where it stopped; ``--again`` tries those that
were tried already. The table is for one version of vLLM: with another, everything is tried again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "parity")]

import forked  # noqa: E402
import moe_architectures  # noqa: E402
from moe_architectures import Architecture  # noqa: E402

from vllm_spac.system import machine  # noqa: E402
from vllm_spac.system.files import replacing  # noqa: E402

RESULT, TABLE = HERE / "families.json", HERE / "FAMILIES.md"
EMULATED = HERE / "families_emulated.json"  # written by hand: the emulation of a GPU is no part of this repository
LIMIT_SECONDS = 1200
VERDICTS = {
    "served": "served exactly: stock vLLM's tokens with a quarter of the experts in slots",
    "stood": "served exactly so, both with stand-ins for layers whose kernels a CPU has not (`stand_ins.py`)",
    "refused": "refused by the plugin",
    "stock": "stock vLLM cannot serve it on a CPU",
    "differs": "other tokens than stock vLLM's: a bug",
    "fails": "the plugin fails: a bug",
    "checkpoint": "no useful tiny checkpoint",
    "apart": "not tried, for the reason given",
    "unwritten": "no tiny checkpoint is written yet",
    "pending": "not run yet",
}
_BRIEFLY = {
    "served": "served exactly",
    "stood": "served exactly, stand-ins",
    "stock": "stock cannot",
    "apart": "not tried",
    "checkpoint": "no checkpoint",
}
_HEADINGS = {
    "text": "Text",
    "multimodal": "With images, video or sound",
    "transformers": "Served by vLLM's Transformers backend",
    "draft": "Draft models and MTP heads",
    "pooling": "Embeddings and classification",
}
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Exit))(?:: (.*))?$")
_LOGGED = re.compile(r"^(?:\[rank\d+\]: |\(\w+ pid=\d+\) |ERROR [\d-]+ [\d:]+ \[[\w.]+:\d+\] )*\s*")
# What the tiny checkpoint lacks of a published one: names of weights (w13 and w2 are vLLM's own names), fields of its
# configuration, a tokenizer.
_LACKING = re.compile(
    r"not initialized from checkpoint|KeyError(?!.*\.w(13|2)_)|no module or parameter named"
    r"|Config' object has no attribute|please check config|Tokenizer not available|Can't load image processor"
)


def read() -> dict:
    """Returns the content of the result file; an empty one if there is none."""
    return json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"vllm": None, "rows": {}}


def emulated() -> dict:
    """Returns what ran on emulated CUDA: a version of vLLM, a sentence on how, and a detail by architecture."""
    return json.loads(EMULATED.read_text(encoding="utf-8"))


def try_one(architecture: Architecture) -> tuple[str, str]:
    """Returns (verdict, detail) of one architecture, whatever becomes of its process."""
    with tempfile.TemporaryDirectory(prefix="spac-family-") as folder:
        try:
            done = forked.run([HERE / "one_family.py", architecture.name, folder], timeout=LIMIT_SECONDS)
            out, err, code = done.stdout, done.stderr, done.returncode
        except AssertionError as late:
            out, err, code = str(late), f"TimeoutError: no answer within {LIMIT_SECONDS} s\n", -signal.SIGKILL
        if os.environ.get("SPAC_FAMILIES_LOG"):
            Path(os.environ["SPAC_FAMILIES_LOG"], f"{architecture.name}.log").write_text(out + err)
        return judge(out, err, code, folder)


def judge(out: str, err: str, code: int, folder: str) -> tuple[str, str]:
    """Returns (verdict, detail) from what a process printed, its exit status and the folder it wrote to."""
    said = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
    if said and "verdict" in said[-1]:
        return said[-1]["verdict"], _plain(said[-1]["detail"], folder)
    stage = said[-1]["stage"] if said else "checkpoint"
    verdict = {"checkpoint": "checkpoint", "stock": "stock", "plugin": "fails"}[stage]
    err = re.sub(r"(validation errors? for \w+)\n\s*", r"\1: ", err)  # pydantic says on the next line what is wrong
    errors = list(_errors(err.splitlines()))
    # vLLM logs why it cannot import a model, and raises an error that refers to its log.
    told = [error for error in errors if "failed to be inspected" not in error]
    reason = (told or errors or [f"exit status {code}"])[-1]
    if verdict == "fails" and ": spac: " in reason:  # an engine in a further process
        verdict, reason = "refused", reason.partition(": spac: ")[2]
    if verdict == "stock" and _LACKING.search(reason):
        verdict = "checkpoint"
    return verdict, _plain(reason, folder)


def _errors(lines: list[str]) -> Iterator[str]:
    """Yields the errors that a traceback names; one without a text, with the assertion that failed."""
    failed = "it has no text"
    for line in lines:
        line = _LOGGED.sub("", line).rstrip()
        failed = line if line.startswith("assert ") else failed
        if (match := _ERROR.match(line)) is not None:
            yield f"{match[1]}: {match[2] or failed}"


def _plain(text: str, folder: str) -> str:
    """One line without this machine's paths."""
    text = " ".join(text.replace(folder, "CHECKPOINT").split())
    text = re.sub(r"/\S*/site-packages/", "", text)
    return text if len(text) <= 240 else f"{text[:237]}..."


def rows(found: list[Architecture], content: dict) -> list[tuple[Architecture, str, str]]:
    """Returns (architecture, verdict, detail) for each of ``found``, also for those that were not tried."""
    import tiny_models
    import untried

    lines = []
    for one in found:
        row = content["rows"].get(one.name)
        if row is not None:
            lines.append((one, row["verdict"], row["detail"]))
        elif one.name in tiny_models.TINY:
            lines.append((one, "pending", ""))
        elif one.name in untried.REASONS:
            lines.append((one, "apart", untried.REASONS[one.name]))
        elif one.group == "pooling":
            lines.append((one, "apart", "emits no tokens"))
        else:
            lines.append((one, "unwritten", ""))
    return lines


def document(found: list[Architecture], content: dict) -> str:
    """Returns the table in Markdown."""
    lines, ran = rows(found, content), emulated()
    exactly = sum(told.startswith("served exactly") for told in ran["rows"].values())
    counts = [f"{sum(verdict == name for _, verdict, _ in lines)} {text}" for name, text in VERDICTS.items()]
    text = [
        "# MoE architectures",
        "",
        f"The {len(found)} architectures of vLLM {content['vllm']} that can build experts, and MTP heads of them.",
        "Where a tiny random checkpoint can be made (`tiny_models.py`: the real configuration class, small sizes),",
        "stock vLLM serves it on a CPU in bf16, then the plugin with a quarter of the experts in slots. Models for",
        "images, video and sound get text only. MTP heads run with the models that they draft for.",
        "`python tests/upstream/families.py` writes this page; loads and whole messages are in `families.json`.",
        "With stand-ins `tests/parity/test_stood_in.py` also serves DeepSeek-V4, MiniMax-M3, Kimi and LongCat over",
        "pointers, the first two with V2's runner in emulated full graphs, too.",
        "",
        *(f"- {count}" for count in counts if not count.startswith("0 ")),
        "",
        f"Last column: vLLM {ran['vllm']} with its V2 runner on emulated CUDA, {exactly} served exactly. Where a",
        "kernel of attention or of a recurrent layer cannot be emulated, a plain attention stands in for it in both.",
    ]
    heads = f"| architectures | on a CPU | why | vLLM {ran['vllm']}, emulated |", "|---|---|---|---|"
    for group, heading in _HEADINGS.items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for one, verdict, detail in lines:
            if one.group == group:
                why, told = _why(verdict, detail), _short(ran["rows"].get(one.name, ""))
                told = told.removesuffix(f": {why}")  # the same reason
                alike.setdefault((_BRIEFLY.get(verdict, verdict), why, told), []).append(one.name)
        text += ["", f"## {heading}", "", *heads, *(_row(names, *cells) for cells, names in alike.items())]
    newer = ran["rows"].keys() - {one.name for one in found}
    text += ["", f"## Only in vLLM {ran['vllm']}", "", *heads]
    text += [_row([name], "", "", _short(ran["rows"][name])) for name in sorted(newer, key=str.lower)]
    return "\n".join(text) + "\n"


def _why(verdict: str, detail: str) -> str:
    if verdict == "stood":
        return f"for {detail.partition('; stand-ins: ')[2]}"
    return "" if verdict == "served" else _short(detail)


def _short(detail: str) -> str:
    """Without numbers of slots and loads, or the name of a draft model's target; of an error its begin."""
    detail = re.sub(r"(a separate draft model) for [^:]+", r"\1", detail)
    detail = re.sub(r"drafts for \w+(?=, (which stock|whose MoE))", "as its target", detail)
    detail = re.sub(r": \d+ of \d+ experts in slots, \d+ loads(, of the head \d+ of \d+, \d+ loads)?", "", detail)
    error, says = detail.partition(": ")[::2]
    if not re.fullmatch(r"\w+Error", error):
        return detail
    says = re.sub(r"^1 validation error for \w+: Value error, | \[type=.*", "", says)
    return says if len(says) <= 60 else f"{says[:60].rpartition(' ')[0]} …"


def _row(names: list[str], *cells: str) -> str:
    """A line of a table in Markdown."""
    escaped = (cell.replace("|", chr(92) + "|") for cell in cells)
    return " | ".join([f"| {', '.join(f'`{name}`' for name in names)}", *escaped]).rstrip() + " |"


def write(found: list[Architecture], content: dict) -> None:
    """Writes the result and the table."""
    for path, text in ((RESULT, json.dumps(content, indent=1) + "\n"), (TABLE, document(found, content))):
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")


def main(
    only: Annotated[str, typer.Option(help="names of architectures, separated by commas; default: all")] = "",
    again: Annotated[bool, typer.Option(help="also try those that were tried already")] = False,
    minutes: Annotated[float, typer.Option(help="start no architecture after this many minutes")] = 1e6,
) -> None:
    """Try every MoE architecture of the installed vLLM and write the table of verdicts."""
    import tiny_models
    import vllm

    found, content = moe_architectures.find(), read()
    if content["vllm"] != vllm.__version__:
        content = {"vllm": vllm.__version__, "rows": {}}
    names = {name for name in only.split(",") if name} or {one.name for one in found}
    if unknown := names - {one.name for one in found}:
        sys.exit(f"families: vLLM {vllm.__version__} has no MoE architecture {', '.join(sorted(unknown))}")
    content["rows"] = {one.name: content["rows"][one.name] for one in found if one.name in content["rows"]}
    todo = [one for one in found if one.name in names & set(tiny_models.TINY)]
    todo = [one for one in todo if again or one.name not in content["rows"]]
    end = time.monotonic() + 60 * minutes
    with tqdm(todo, unit="architecture") as bar:
        for one in bar:
            if time.monotonic() > end:
                break
            bar.set_postfix_str(one.name)
            verdict, detail = try_one(one)
            if "No module named 'torchvision'" in detail:
                bar.write(f"{one.name}: not tried: needs torchvision, a build that matches torch", file=sys.stderr)
                continue
            content["rows"][one.name] = {"verdict": verdict, "detail": detail}
            content["versions"], content["commit"] = machine.versions(), machine.code(ROOT)["commit"]
            write(found, content)
            bar.write(f"{one.name}: {verdict}: {detail}", file=sys.stderr)
    write(found, content)


if __name__ == "__main__":
    typer.run(main)
