"""``vllm-spac quality``: what budgets and speculated execution cost in quality and save in bytes and time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_spac.cli.calibrate import (
    MASS_OF,
    DiskDir,
    Engine,
    LimitTokens,
    Model,
    Prompts,
    Slots,
    TextTokens,
    Window,
    bar,
)
from vllm_spac.cli.tables import print_table
from vllm_spac.cli.text import shown
from vllm_spac.errors import ConfigError

EXAMPLES = """[bold]Examples[/]

vllm-spac quality ./model --prompts texts.jsonl --budgets 8,12,16,24,32 --calibration model.calibration.safetensors

vllm-spac quality ./model --prompts texts.jsonl --budgets 16,32 --mass 0.9,0.98 --rankings router --slots 25%
--speculative-config '{"method": "eagle3", "model": "./eagle", "num_speculative_tokens": 8}'

vllm-spac quality ./model --prompts texts.jsonl --speculate restricted,predicted --slots 25%
--predictor model.predictors.safetensors

[dim]Results are written point by point: the same command runs what is missing, other budgets are added.[/]
"""

SPECULATE = "Also evaluate speculated execution, as --spac-speculate: restricted, predicted, separated by commas."
ALPHAS = (
    "Also weigh votes, by these powers, separated by commas: a row counts P^alpha, with P the product of the "
    "probabilities that the model without a budget gives the tokens of its window up to this row, as a perfectly "
    "calibrated draft would."
)


def quality(
    model: Model,
    prompts: Prompts,
    budgets: Annotated[str, typer.Option(help="Experts per layer (B), separated by commas.")] = "",
    mass: Annotated[str, typer.Option(help="Shares of the mass to keep, separated by commas.")] = "",
    mass_of: Annotated[str, typer.Option(help=MASS_OF)] = "selected",
    alphas: Annotated[str, typer.Option(help=ALPHAS)] = "",
    speculate: Annotated[str, typer.Option(help=SPECULATE)] = "",
    predictor: Annotated[
        Path | None, typer.Option(help="File from vllm-spac train-predictor, for --speculate.")
    ] = None,
    prefetch: Annotated[
        str, typer.Option(help="With --predictor, the predictor of the file, as --spac-prefetch.")
    ] = "linear",
    rankings: Annotated[
        str | None, typer.Option(help="router, static, coactivation, resident, oracle.", show_default="all")
    ] = None,
    coverages: Annotated[str, typer.Option(help="substitution, truncation.")] = "substitution,truncation",
    window: Window = 9,
    calibration: Annotated[
        Path | None, typer.Option(help="File from vllm-spac calibrate, for static and coactivation.")
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Also generate, with these drafts, as for vllm serve.")
    ] = None,
    generate: Annotated[int, typer.Option(help="Number of texts to generate after.", min=1)] = 4,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate after each text.", min=2)] = 64,
    output: Annotated[Path, typer.Option(help="Folder for quality.json and the pictures.")] = Path("quality"),
    title: Annotated[str | None, typer.Option(help="Title of the pictures.", show_default="MODEL")] = None,
    slots: Slots = "auto",
    disk_dir: DiskDir = None,
    text_tokens: TextTokens = 512,
    limit_tokens: LimitTokens = None,
    engine: Engine = None,
) -> None:
    """Sweep budgets and speculated execution: perplexity, agreement and bytes and, with drafts, speed."""
    from vllm_spac.budget.limits import check_mass_of
    from vllm_spac.evaluation import points as sweeps
    from vllm_spac.evaluation.prompts import read
    from vllm_spac.integration.evaluation import engine as offline

    check_mass_of(mass_of)
    asked = {
        "rankings": sweeps.rankings(rankings, calibration is not None),
        "coverages": sweeps.coverages(coverages),
        "budgets": sweeps.bounds(budgets, "--budgets", int),
        "masses": sweeps.bounds(mass, "--mass", float),
        "mass_of": mass_of,
        "alphas": sweeps.bounds(alphas, "--alphas", float),
        "speculate": sweeps.modes(speculate, predictor is not None),
    }
    if not asked["budgets"] and not asked["masses"] and not asked["speculate"]:
        raise ConfigError(
            "nothing to evaluate; name budgets (--budgets 8,16,32), masses (--mass 0.9,0.98) or --speculate restricted"
        )
    options = offline.options_of(engine, "--engine")
    drafts = offline.options_of(speculative_config, "--speculative-config")
    if drafts:
        options["speculative_config"] = drafts
    texts, spac = read(prompts), offline.spac_of(slots, disk_dir, calibration, predictor, prefetch)
    length, digest = text_tokens + new_tokens + 16, _digest(calibration)
    with offline.engine(model, spac, length, any(isinstance(t, str) for t in texts), **options) as llm:
        pieces = offline.tokens(llm, texts, text_tokens, limit_tokens)
        run = {"window": window, "slots": slots, "drafts": _portable(drafts), "calibration": digest}
        run |= {"generate": generate, "new_tokens": new_tokens} if drafts or asked["speculate"] else {}
        run |= {"predictor": _digest(predictor, "--predictor"), "prefetch": prefetch} if predictor else {}
        _run(llm, pieces, run, asked, output, title)


def _run(llm: Any, pieces: list[list[int]], run: dict, asked: dict, output: Path, title: str | None) -> None:
    from vllm_spac.integration.evaluation.quality_run import QualityRun

    console = Console(stderr=True)
    with bar(console) as progress:
        running = QualityRun(llm, pieces, run, asked, output / "quality.json", progress)
        results = running.all(title)
    _show(results, output)


def _show(results: dict, output: Path) -> None:
    from vllm_spac.evaluation import figures, report

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)  # so that the table is not folded in a log
    print_table(console, report.table(results))
    for skipped in results["skipped"]:
        console.print(f"left out: {shown(skipped)}", highlight=False, soft_wrap=True)
    for sentence in report.sentences(results):
        console.print(shown(sentence), highlight=False, soft_wrap=True)
    figures.pareto(results, output / "pareto.png")
    figures.figures(results, output / "figures.png")
    names = ", ".join(str(output / name) for name in ("quality.json", "pareto.png", "figures.png"))
    console.print(f"written: {shown(names)}", highlight=False, soft_wrap=True)


def _portable(drafts: dict) -> dict:
    """The speculative config without folders of this machine."""
    return drafts | ({"model": Path(drafts["model"]).name} if "model" in drafts else {})


def _digest(path: Path | None, option: str = "--calibration") -> str | None:
    """Digest of the content of a file."""
    if path is None:
        return None
    import xxhash

    try:
        return xxhash.xxh3_64_hexdigest(path.expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error
