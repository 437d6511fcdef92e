"""What a budget costs: ``calibrate`` records routing, ``budgets`` chooses one per layer, ``quality`` measures."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_spac.cli.tables import examples, print_table, say, shown
from vllm_spac.errors import ConfigError
from vllm_spac.system.untrusted import path_named

if TYPE_CHECKING:
    from vllm_spac.methods.moe_spec.calibration import Calibration

EXAMPLES = examples("""
vllm-spac quality ./model --prompts texts.jsonl --budgets 8,12,16,24,32 --calibration model.calibration.safetensors
vllm-spac quality ./model --prompts texts.jsonl --budgets 16,32 --mass 0.9,0.98 --rankings router --slots 25%
  --speculative-config '{"method": "eagle3", "model": "./eagle", "num_speculative_tokens": 8}'
vllm-spac quality ./model --prompts texts.jsonl --speculate restricted,predicted --slots 25%
  --predictor model.predictors.safetensors
[dim]Results are written point by point: the same command runs what is missing, other budgets are added.[/]
""")

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
    ] = "gate",
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
    from vllm_spac.methods.moe_spec.settings import check_mass_of
    from vllm_spac.tools.evaluation import engine as offline
    from vllm_spac.tools.evaluation import points as sweeps
    from vllm_spac.tools.evaluation.prompts import read

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
    length, digest = offline.length_of(text_tokens, new_tokens + 16, options), _digest(calibration)
    with offline.engine(model, spac, length, any(isinstance(t, str) for t in texts), **options) as llm:
        pieces = offline.tokens(llm, texts, text_tokens, limit_tokens)
        portable = drafts | ({"model": Path(drafts["model"]).name} if "model" in drafts else {})
        run = {"window": window, "slots": slots, "drafts": portable, "calibration": digest}
        run |= {"generate": generate, "new_tokens": new_tokens} if drafts or asked["speculate"] else {}
        run |= {"predictor": _digest(predictor, "--predictor"), "prefetch": prefetch} if predictor else {}
        _run(llm, pieces, run, asked, output, title)


def _run(llm: Any, pieces: list[list[int]], run: dict, asked: dict, output: Path, title: str | None) -> None:
    from vllm_spac.tools.evaluation.quality_run import QualityRun

    console = Console(stderr=True)
    with bar(console) as progress:
        running = QualityRun(llm, pieces, run, asked, output / "quality.json", progress)
        results = running.all(title)
    _show(results, output)


def _show(results: dict, output: Path) -> None:
    from vllm_spac.tools.evaluation import figures, quality_report

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)  # so that the table is not folded in a log
    print_table(console, quality_report.table(results))
    for skipped in results["skipped"]:
        say(console, f"left out: {shown(skipped)}")
    for sentence in quality_report.sentences(results):
        say(console, shown(sentence))
    figures.pareto(results, output / "pareto.png")
    figures.figures(results, output / "figures.png")
    names = ", ".join(str(output / name) for name in ("quality.json", "pareto.png", "figures.png"))
    say(console, f"written: {shown(names)}")


def _digest(path: Path | None, option: str = "--calibration") -> str | None:
    """Digest of the content of a file."""
    if path is None:
        return None
    import xxhash

    try:
        return xxhash.xxh3_64_hexdigest(path_named(path, option).read_bytes())
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error


BUDGETS_EXAMPLES = examples("""
vllm-spac budgets model.calibration.safetensors --mass 0.98 --output budgets.json
vllm serve ./model --plugin spac --spac-budget budgets.json   [dim]# serve with them[/]
""")


def budgets(
    calibration: Annotated[Path, typer.Argument(help="File from vllm-spac calibrate.")],
    mass: Annotated[float, typer.Option(help="Share of the mass that each layer keeps.")] = 0.98,
    mass_of: Annotated[str, typer.Option(help=MASS_OF)] = "selected",
    coverage: Annotated[
        str, typer.Option(help="What replaces an expert that the budget cut: substitution or truncation.")
    ] = "substitution",
    output: Annotated[Path | None, typer.Option(help="Write the budgets to this file, e.g. budgets.json.")] = None,
) -> None:
    """Choose a budget for each layer, for --spac-budget FILE."""
    from vllm_spac.methods.moe_spec.calibration import Calibration, choose, write_budgets

    found = Calibration.read(calibration)
    chosen, console = choose(found, mass, coverage, mass_of), Console()
    asked: dict[str, Any] = {"mass": mass, "mass_of": mass_of, "coverage": coverage}
    print_table(console, _table(found, chosen, **asked))
    if output is not None:
        check_target(output)
        write_budgets(output, found.fingerprint, chosen, asked)
        say(console, f"written: {shown(output)}")


def _table(calibration: Calibration, budgets: dict[str, int], mass: float, mass_of: str, coverage: str) -> Table:
    experts, uses = calibration.experts, calibration.counts
    title = (
        f"{shown(calibration.model)}: budgets for {100 * mass:g}% of the mass {mass_of} in steps of "
        f"{calibration.window} tokens, {coverage}"
    )
    mean = sum(budgets.values()) / len(budgets)
    caption = f"{mean:.1f} of {experts} experts on average; calibrated on {calibration.tokens:,} tokens"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("layer", "budget", "of", f"{mass_of} kept", "experts used"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for number, (name, budget) in enumerate(budgets.items()):
        held = float(calibration.curve(mass_of)[number, budget - 1])
        table.add_row(shown(name), str(budget), str(experts), f"{100 * held:.2f}%", str(int((uses[number] > 0).sum())))
    return table


CALIBRATE_EXAMPLES = examples("""
vllm-spac calibrate allenai/OLMoE-1B-7B-0924 --prompts texts.jsonl --window 9 --slots 25%
vllm-spac calibrate ./model --prompts book.txt --limit-tokens 100000 --output model.calibration.safetensors
[dim]Interrupted with Ctrl-C, the same command continues.[/]
""")

Model = Annotated[str, typer.Argument(help="A folder or a name on the hub, as for vllm serve.")]
Prompts = Annotated[
    Path,
    typer.Option(help='JSON lines with "text" or "prompt", or plain text separated by blank lines or NUL.'),
]
Slots = Annotated[str, typer.Option(help="Experts in fast memory, as --spac-slots.")]
DiskDir = Annotated[Path | None, typer.Option(help="Folder of the packed experts, as --spac-disk-dir.")]
TextTokens = Annotated[int, typer.Option(help="Longer texts are split into pieces of this many tokens.", min=2)]
LimitTokens = Annotated[int | None, typer.Option(help="Stop after this many tokens.", min=2)]
Window = Annotated[int, typer.Option(help="Tokens of a verify step: 1 + its draft tokens.", min=1)]
Engine = Annotated[str | None, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")]

MASS_OF = "The mass of --mass: selected, the routing weights of selected experts, or scores, all router scores."

_SAVE_SECONDS = 10


def calibrate(
    model: Model,
    prompts: Prompts,
    window: Window = 9,
    output: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="MODEL.calibration.safetensors")
    ] = None,
    slots: Slots = "auto",
    disk_dir: DiskDir = None,
    text_tokens: TextTokens = 512,
    limit_tokens: LimitTokens = None,
    engine: Engine = None,
) -> None:
    """Run the model on texts, and record how its routers select experts: for budgets, and the rankings that need it."""
    from vllm_spac.tools.evaluation import engine as offline
    from vllm_spac.tools.evaluation.prompts import checksum, read

    output = output or Path(f"{re.split('[/]', model.rstrip('/'))[-1]}.calibration.safetensors")
    check_target(output)
    texts, options, spac = read(prompts), offline.options_of(engine, "--engine"), offline.spac_of(slots, disk_dir)
    tokenizer, length = any(isinstance(text, str) for text in texts), offline.length_of(text_tokens, 1, options)
    with offline.engine(model, spac, length, tokenizer, **options) as llm:
        pieces = offline.tokens(llm, texts, text_tokens, limit_tokens)
        _run_calibration(llm, pieces, window, checksum(pieces), output)


def _run_calibration(llm: Any, pieces: list[list[int]], window: int, source: str, output: Path) -> None:
    from vllm_spac.tools.evaluation.engine import Interruptible, ask, read

    progress_file, console = output.with_name(f"{output.name}.progress"), Console(stderr=True)
    done = ask(llm, "calibrate", window, source, str(progress_file))
    if done:
        console.print(f"resuming after {done} of {len(pieces)} texts", highlight=False)
    tokens, saved = sum(map(len, pieces[:done])), time.monotonic()
    with Interruptible() as interruption, bar(console) as progress:
        task = progress.add_task("calibrating", total=sum(map(len, pieces)), completed=tokens)
        for number, ids in enumerate(pieces[done:], done + 1):
            read(llm, ids)
            progress.update(task, completed=ask(llm, "calibrated_text"))
            if interruption.asked or time.monotonic() - saved > _SAVE_SECONDS:
                ask(llm, "save_progress", str(progress_file))
                saved = time.monotonic()
            if interruption.asked and number < len(pieces):
                progress.stop()
                console.print(f"stopped after {number} of {len(pieces)} texts; the same command continues")
                raise typer.Exit(130)
    count = ask(llm, "save_calibration", str(output.absolute()))
    progress_file.unlink(missing_ok=True)
    say(Console(), f"{shown(output)}: {count:,} tokens of {len(pieces)} texts")


def bar(console: Console) -> Progress:
    """A progress bar that shows the completed and the total count."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def check_target(path: Path, option: str = "--output") -> None:
    """Raises ``ConfigError`` if ``path`` has no folder to be written to; called before minutes of work."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"cannot be written: {path.absolute().parent} is no folder"
        raise ConfigError(f"{path} {problem}; name another file with {option}")
