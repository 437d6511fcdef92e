"""``vllm-spac quality sweep``: what a budget of experts costs in quality, and saves in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_spac import components
from vllm_spac.cli.tables import compact, examples, print_table, print_text, shown
from vllm_spac.errors import ConfigError
from vllm_spac.system.host_memory import gib
from vllm_spac.system.untrusted import path_named
from vllm_spac.tools.evaluation.points import AGREEMENT, COVERAGES, MODES, PERPLEXITY, SPECULATED, Point, loads

EXAMPLES = examples("""
vllm-spac quality sweep ./model --prompts texts.jsonl --budgets 8,16,32
vllm-spac quality sweep ./model --prompts texts.jsonl --budgets 16,32 --mass 0.9,0.98 --rankings router --slots 25%
  --speculative-config '{"method": "eagle3", "model": "./eagle", "num_speculative_tokens": 8}'
vllm-spac quality sweep ./model --prompts texts.jsonl --speculate restricted,predicted --slots 25%
  --predictor model.predictors.safetensors
[dim]Results are written point by point: the same command runs what is missing, other budgets are added.[/]
""")

SPECULATE = "Also evaluate speculated execution, as --spac-speculate: restricted, predicted, separated by commas."


def sweep(
    model: Model,
    prompts: Prompts,
    budgets: Annotated[str, typer.Option(help="Experts per layer (B), separated by commas.")] = "",
    mass: Annotated[str, typer.Option(help="Shares of the mass to keep, separated by commas.")] = "",
    mass_of: Annotated[str, typer.Option(help=MASS_OF)] = "selected",
    speculate: Annotated[str, typer.Option(help=SPECULATE)] = "",
    predictor: Annotated[
        Path | None, typer.Option(help="File from vllm-spac predictors train, for --speculate.")
    ] = None,
    prefetch: Annotated[
        str, typer.Option(help="With --predictor, the predictor of the file, as --spac-prefetch.")
    ] = "gate",
    rankings: Annotated[str | None, typer.Option(help="router, selected.", show_default="all")] = None,
    coverages: Annotated[str, typer.Option(help="substitution, truncation.")] = "substitution,truncation",
    window: Window = 9,
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Also generate, with these drafts, as for vllm serve.")
    ] = None,
    generate: Annotated[int, typer.Option(help="Number of texts to generate after.", min=1)] = 4,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate after each text.", min=2)] = 64,
    output: Annotated[Path, typer.Option(help="Folder for quality.json.")] = Path("quality"),
    slots: Slots = "auto",
    disk_dir: DiskDir = None,
    text_tokens: TextTokens = 512,
    limit_tokens: LimitTokens = None,
    engine: Engine = None,
) -> None:
    """Sweep budgets and speculated execution: perplexity, agreement and bytes and, with drafts, speed."""
    from vllm_spac.methods.moe_spec.settings import check_mass_of
    from vllm_spac.tools.evaluation import engine as offline
    from vllm_spac.tools.evaluation.prompts import read

    check_mass_of(mass_of)
    known = components.serving("rankings")
    asked = {
        "rankings": known if rankings is None else _names(rankings, "--rankings", known),
        "coverages": _names(coverages, "--coverages", COVERAGES),
        "budgets": _numbers(budgets, "--budgets", int),
        "masses": _numbers(mass, "--mass", float),
        "mass_of": mass_of,
        "speculate": _names(speculate, "--speculate", MODES) if speculate.strip() else [],
    }
    if asked["speculate"] and predictor is None:
        raise ConfigError("--speculate needs --predictor FILE; write it with `vllm-spac predictors train`")
    if not asked["budgets"] and not asked["masses"] and not asked["speculate"]:
        raise ConfigError(
            "nothing to evaluate; name budgets (--budgets 8,16,32), masses (--mass 0.9,0.98) or --speculate restricted"
        )
    options = offline.options_of(engine, "--engine")
    drafts = offline.options_of(speculative_config, "--speculative-config")
    if drafts:
        options["speculative_config"] = drafts
    texts, spac = read(prompts), offline.spac_of(slots, disk_dir, predictor, prefetch)
    length = offline.length_of(text_tokens, new_tokens + 16, options)
    with offline.engine(model, spac, length, any(isinstance(t, str) for t in texts), **options) as llm:
        pieces = offline.tokens(llm, texts, text_tokens, limit_tokens)
        portable = drafts | ({"model": Path(drafts["model"]).name} if "model" in drafts else {})
        run = {"window": window, "slots": slots, "drafts": portable}
        run |= {"generate": generate, "new_tokens": new_tokens} if drafts or asked["speculate"] else {}
        run |= {"predictor": _digest(predictor), "prefetch": prefetch} if predictor else {}
        _run(llm, pieces, run, asked, output / "quality.json")


def _run(llm: Any, pieces: list[list[int]], run: dict, asked: dict, file: Path) -> None:
    from vllm_spac.tools.evaluation.quality_run import QualityRun

    with bar(Console(stderr=True)) as progress:
        results = QualityRun(llm, pieces, run, asked, file, progress).all()
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)  # so that the table is not folded in a log
    print_table(console, quality_table(results))
    for skipped in results["skipped"]:
        print_text(console, f"left out: {shown(skipped)}")
    for sentence in sentences(results):
        print_text(console, shown(sentence))
    print_text(console, f"written: {shown(file)}")


def _names(text: str, option: str, known: Sequence[str]) -> list[str]:
    """Names of the command line; ``ConfigError`` if one is unknown or twice."""
    asked = _listed(text, option)
    if unknown := [name for name in asked if name not in known]:
        raise ConfigError(f"{option}: there is no {unknown[0]!r}; use some of {', '.join(known)}")
    return asked


def _numbers(text: str, option: str, number: type) -> list:
    """Numbers of the command line, in ascending order; none in a blank text."""
    try:
        return sorted({number(item) for item in _listed(text, option)}) if text.strip() else []
    except ValueError as error:
        raise ConfigError(f"{option}: {error}; use numbers with commas between them") from error


def _listed(text: str, option: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items or len(set(items)) < len(items):
        raise ConfigError(f"{option}: {text!r} is empty or names something twice; use names with commas between them")
    return items


def _digest(path: Path) -> str:
    """Digest of the content of the file of ``--predictor``."""
    import xxhash

    try:
        return xxhash.xxh3_64_hexdigest(path_named(path, "--predictor").read_bytes())
    except OSError as error:
        raise ConfigError(f"--predictor: {path} cannot be read: {error.strerror}") from error


# -- what a sweep found ------------------------------------------------------------------------------------------------


def quality_table(results: dict) -> Table:
    """Returns a table of all points, with generation where it was run.

    ``read``: bytes per generated token over those without a budget.
    """
    natural, generation, rows = results["natural"], results["generation"], list[tuple[str, ...]]()
    speeds = {Point.of(item): item for item in generation}
    pairs = list(dict.fromkeys((item["ranking"], item["coverage"]) for item in results["points"]))
    for pair in pairs:
        of_pair = [item for item in results["points"] if (item["ranking"], item["coverage"]) == pair]
        for item in sorted(of_pair, key=lambda item: item["distinct"]):
            point, read = Point.of(item), loads(item, generation)
            speed = _speed(speeds[point], read) if point in speeds else ("",) * 4
            rows.append((*map(shown, pair), *_quality_cells(item, point, natural), *speed))
        rows.append(())
    heads = ["ranking", "coverage", "bound", "perplexity", "agreement", "KL", "dropped", "experts", "bytes saved"]
    heads += ["accepted", "tokens/s", "hits", "read"]
    table = compact(shown(results["title"]), heads, rows[:-1], left=("ranking", "coverage"))
    reference = results["reference"]
    table.caption = (
        f"no budget: perplexity {reference['perplexity']:.3f} over {reference['tokens']:,} tokens, "
        f"{natural['distinct']:.1f} distinct experts per layer and step of {results['window']} rows"
    )
    return table


def _quality_cells(item: dict, point: Point, natural: dict) -> tuple[str, ...]:
    return (
        point.bound,
        f"{100 * item['perplexity_change']:+.2f}%",
        f"{100 * item['agreement']:.2f}%",
        f"{item['kl']:.4f}",
        f"{100 * item['dropped']:.1f}%",
        f"{item['distinct']:.1f}",
        _saved(item, natural),
    )


def _speed(item: dict, read: float | None) -> tuple[str, ...]:
    ratio = "" if read is None else f"{read:.2f} x"
    return (
        f"{item['acceptance_length']:.2f}",
        f"{item['tokens_per_second']:.1f}",
        f"{100 * item['hit_rate']:.0f}%",
        ratio,
    )


def _saved(item: dict, natural: dict) -> str:
    """Returns the share of a verify step's expert bytes that a point saves."""
    return f"{100 * (1 - item['distinct'] / natural['distinct']):.1f}%"


def sentences(results: dict) -> list[str]:
    """Returns the findings: the cheapest point that keeps the quality, and what generation without a budget takes."""
    found, generation = [_verdict(results)], results["generation"]
    exact = next((item for item in generation if not item.get("ranking")), None)
    if exact:
        verified = f", {exact['distinct']:.1f} distinct experts per layer and verify step" if exact["distinct"] else ""
        found.append(
            f"generation without a budget: {exact['tokens_per_second']:.1f} tokens/s, acceptance length "
            f"{exact['acceptance_length']:.3f}{verified}"
        )
        ratios = [(Point.of(item), loads(item, generation)) for item in results["points"]]
        if dear := ", ".join(f"{point} ({ratio:.2f} x)" for point, ratio in ratios if ratio is not None and ratio > 1):
            found.append(f"cost more loads than they save, in bytes per token over no budget: {dear}")
        found += [_speculated(item, exact) for item in generation if item.get("ranking") == SPECULATED]
    return found


def _verdict(results: dict) -> str:
    natural, chosen, step = results["natural"], results["verdict"], results["step_bytes_per_expert"]
    asked = f"top-1 agreement of {100 * AGREEMENT:g}% and perplexity within {100 * PERPLEXITY:g}%"
    if chosen is None:
        near = max(results["points"], key=lambda item: item["agreement"])
        return (
            f"no budget of this sweep keeps a {asked}; the closest, {Point.of(near)}, has {_quality(near)} and saves "
            f"{_saved(near, natural)} of the bytes"
        )
    return (
        f"{Point.of(chosen)} keeps a {asked} with the fewest experts: {_quality(chosen)}; {chosen['distinct']:.1f} of "
        f"{natural['distinct']:.1f} distinct experts per layer, which saves {_saved(chosen, natural)} of the bytes "
        f"({gib(step * (natural['distinct'] - chosen['distinct']))} of {gib(step * natural['distinct'])} per step)"
    )


def _quality(item: dict) -> str:
    agreed, change = (
        f"{100 * item[name]:{sign}.2f} +- {100 * item[f'{name}_error']:.2f}%"
        for name, sign in (("agreement", ""), ("perplexity_change", "+"))
    )
    return f"agreement {agreed}, perplexity {change} (standard errors over tokens)"


def _speculated(item: dict, exact: dict) -> str:
    """Bytes and tokens of speculated execution, beside those of the exact model with the same reads ahead."""
    both = [f"{gib(each['bytes_per_token'])} per token at {100 * each['hit_rate']:.0f}% hits" for each in (item, exact)]
    return (
        f"generation with speculated execution, {item['coverage']}: {both[0]} (exact: {both[1]}), "
        f"{item['tokens_per_second']:.1f} tokens/s, {100 * item['dropped']:.1f}% of the routing weight dropped, "
        f"{100 * item['equal']:.0f}% of the tokens before the first that differs"
    )


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


def bar(console: Console) -> Progress:
    """A progress bar that shows the completed and the total count."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def check_target(path: Path, option: str = "--output") -> None:
    """Raises ``ConfigError`` if ``path`` has no folder to be written to; called before minutes of work."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"cannot be written: {path.absolute().parent} is no folder"
        raise ConfigError(f"{path} {problem}; name another file with {option}")
