"""``vllm-spac predictors``: ``train`` makes predictors of experts, ``measure`` their recall."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vllm_spac.cli.quality import DiskDir, Engine, Model, Prompts, Slots, TextTokens, bar, check_target
from vllm_spac.cli.tables import examples, print_table, print_text, shown
from vllm_spac.errors import ConfigError
from vllm_spac.system.files import write_text, writing

if TYPE_CHECKING:
    from rich.progress import Progress

    from vllm_spac.decisions.predictor_file import Identity, PredictorFile, Training
    from vllm_spac.decisions.predictors._samples import Samples
    from vllm_spac.tools.evaluation.collection import Collected
    from vllm_spac.tools.evaluation.evaluated_model import EvaluatedModel

TRAIN_EXAMPLES = examples("""
vllm-spac predictors train allenai/OLMoE-1B-7B-0924 --prompts texts.jsonl --output olmoe.predictors.safetensors
vllm-spac predictors train ./model --prompts book.txt --output model.predictors.safetensors --reach 3 --slots 25%
vllm-spac predictors train ./model --prompts book.txt --output model.predictors.safetensors --only neural
[dim]Interrupted with Ctrl-C, the same command reads the texts again and continues with the next predictor.[/]
""")
EXAMPLES = examples("""
vllm-spac predictors measure ./model --prompts held-out.jsonl --predictor model.predictors.safetensors
  --json recall.json
vllm-spac predictors measure ./model --prompts held-out.jsonl --predictor model.predictors.safetensors
  --json recall.json --slots 50%
[dim]Use other texts than for predictors train.[/]
""")
LimitTokens = Annotated[int, typer.Option(help="Stop after this many tokens; all are kept in memory.", min=4)]

_SAVE_SECONDS = 10
_OTHERS = 8  # of so many texts, one is not fitted to


def train(
    model: Model,
    prompts: Prompts,
    output: Annotated[Path, typer.Option(help="File to write, e.g. model.predictors.safetensors.")],
    reach: Annotated[int, typer.Option(help="Layers that predictors look ahead.", min=1, max=8)] = 1,
    only: Annotated[
        str | None,
        typer.Option(help="Train these alone, e.g. neural; of hybrid, all.", show_default="all"),
    ] = None,
    slots: Slots = "auto",
    disk_dir: DiskDir = None,
    text_tokens: TextTokens = 512,
    limit_tokens: LimitTokens = 50_000,
    engine: Engine = None,
) -> None:
    """Train predictors of the next layers' experts on texts."""
    from vllm_spac.decisions.predictor_file import closure
    from vllm_spac.tools.evaluation import engine as offline
    from vllm_spac.tools.evaluation.evaluated_model import EvaluatedModel
    from vllm_spac.tools.evaluation.prompts import checksum, read

    check_target(output)
    wanted = None if only is None else [name.strip() for name in only.split(",")]
    closure(wanted)  # refused before minutes of work
    texts, options, spac = read(prompts), offline.options_of(engine, "--engine"), offline.spac_of(slots, disk_dir)
    length = offline.length_of(text_tokens, _behind(options), options)
    with (
        offline.engine(model, spac, length, _encodes(texts), **options) as llm,
        bar(_console()) as progress,
    ):
        pieces, others = _split(_limited(offline.tokens(llm, texts, text_tokens, limit_tokens), limit_tokens))
        evaluated = EvaluatedModel(llm)
        identity = _identity(evaluated.facts())
        _check_reach(reach, len(identity.layers))
        collected = _collect(evaluated, pieces + others, len(pieces), progress)
    training = _training(
        model, identity, collected, fitted=len(pieces), reach=reach, source=checksum(pieces + others), only=wanted
    )
    progress_file = output.with_name(f"{output.name}.progress")
    _train(training, progress_file)
    made = training.result()
    made.save(output)
    progress_file.unlink(missing_ok=True)
    _left_out(made)
    written = f"{shown(output)}: {', '.join(made.names)}; {made.tokens:,} tokens of {len(pieces)} texts"
    print_text(Console(), written)


def measure(
    model: Model,
    prompts: Prompts,
    predictor: Annotated[Path, typer.Option(help="File from vllm-spac predictors train.")],
    json_output: Annotated[Path, typer.Option("--json", help="File to write the results to.")],
    slots: Annotated[
        str, typer.Option(help="Experts in fast memory, as --spac-slots; misses are those of an LRU cache per layer.")
    ] = "25%",
    disk_dir: DiskDir = None,
    text_tokens: TextTokens = 512,
    limit_tokens: LimitTokens = 50_000,
    engine: Engine = None,
) -> None:
    """Measure how many of the experts that routers choose each predictor names before, on other texts."""
    from vllm_spac.decisions.predictor_file import PredictorFile
    from vllm_spac.tools.evaluation import engine as offline
    from vllm_spac.tools.evaluation.evaluated_model import EvaluatedModel
    from vllm_spac.tools.evaluation.prompts import read

    check_target(json_output, "--json")
    size = _slots(slots)
    PredictorFile.read(predictor)  # refused before minutes of work; which model it is of, only the engine knows
    texts, options, spac = read(prompts), offline.options_of(engine, "--engine"), offline.spac_of(slots, disk_dir)
    length = offline.length_of(text_tokens, _behind(options), options)
    with (
        offline.engine(model, spac, length, _encodes(texts), **options) as llm,
        bar(_console()) as progress,
    ):
        evaluated = EvaluatedModel(llm)
        facts = evaluated.facts()
        file = PredictorFile.load(predictor, _identity(facts), facts["experts"])
        pieces = _limited(offline.tokens(llm, texts, text_tokens, limit_tokens), limit_tokens)
        collected = _collect(evaluated, pieces, 0, progress)
    results = _measured(file, collected.samples, size)
    _write_json(json_output, results)
    title = f"{file.identity.model}: {collected.samples.rows:,} tokens, misses with {slots} of the experts"
    _show(results, file, title)


def _collect(evaluated: EvaluatedModel, texts: list[list[int]], fitted: int, progress: Progress) -> Collected:
    task = progress.add_task("reading texts", total=sum(map(len, texts)))
    return evaluated.collect(texts, fitted, lambda rows: progress.update(task, completed=rows))


def _training(
    model: str,
    identity: Identity,
    collected: Collected,
    *,
    fitted: int,
    reach: int,
    source: str,
    only: list[str] | None,
) -> Training:
    from vllm_spac.decisions.predictor_file import Training
    from vllm_spac.decisions.predictors._trained import Material, Sizes
    from vllm_spac.tools.evaluation.collection import gates_of

    every = collected.samples
    samples, others = every.texts(0, fitted), every.texts(fitted, len(every.starts))
    sizes = Sizes(every.layers, every.experts, every.top_k, every.hidden.shape[2], reach)
    gates = gates_of(model, identity.layers, samples)
    return Training(Material(sizes, samples, others, gates, collected.outputs), identity, source, only)


def _train(training: Training, progress_file: Path) -> None:
    from vllm_spac.tools.evaluation.engine import Interruptible

    console = _console()
    if progress_file.exists():
        training.load_progress(progress_file)
        console.print(f"resuming after {training.done} of {training.stages} stages", highlight=False)
    saved = time.monotonic()
    with Interruptible() as interruption, bar(console) as progress:
        task = progress.add_task("training", total=training.stages, completed=training.done)
        for name in training.run():
            progress.update(task, completed=training.done, description=f"training {name}")
            if interruption.asked or time.monotonic() - saved > _SAVE_SECONDS:
                training.save_progress(progress_file)
                saved = time.monotonic()
            if interruption.asked and training.done < training.stages:
                progress.stop()
                console.print(f"stopped after {training.done} of {training.stages} stages; the same command continues")
                raise typer.Exit(130)


def _measured(file: PredictorFile, samples: Samples, slots: Any) -> dict[str, dict]:
    from vllm_spac.tools.evaluation.predictor_recall import cache_of, history, measure, misses

    missed = misses(samples, cache_of(slots, samples.experts))
    found = {name: file.build(name) for name in file.names} | history(samples)
    results = {}
    with bar(_console()) as progress:
        for name, one in progress.track(sorted(found.items()), description="measuring"):
            results[name] = measure(one, samples, missed)
    return results


def _show(results: dict[str, dict], file: PredictorFile, title: str) -> None:
    from vllm_spac.tools.evaluation.predictor_recall import table

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # so that the table is not folded in a log
    caption = f"R@k: share of the {file.sizes.top_k} chosen experts among the first {file.sizes.top_k} that were named"
    print_table(console, table(results, shown(title), caption))
    _left_out(file)


def _left_out(file: PredictorFile) -> None:
    from vllm_spac.decisions.predictor_file import NOT_WANTED

    for name, why in file.left_out.items():
        if why != NOT_WANTED:
            print_text(Console(), f"left out: {name}: {shown(why)}")


def _write_json(path: Path, results: dict[str, dict]) -> None:
    with writing(f"--json: {path}"):
        write_text(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def _limited(pieces: list[list[int]], limit: int) -> list[list[int]]:
    """Returns ``pieces``, and says so if they may be cut off at the limit."""
    if (tokens := sum(map(len, pieces))) >= limit - 1:
        _console().print(f"the first {tokens:,} tokens are used: --limit-tokens {limit}", highlight=False)
    return pieces


def _split(pieces: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the texts to fit to, and others, one in ``_OTHERS``, by which ``hybrid_predictor`` chooses."""
    others = pieces[_OTHERS - 1 :: _OTHERS] or pieces[-1:]
    fitted = [piece for piece in pieces if not any(piece is other for other in others)]
    if not fitted:
        raise ConfigError("there is one text only; use two or more, or a smaller --text-tokens, which splits it")
    return fitted, others


def _check_reach(reach: int, layers: int) -> None:
    if reach >= max(2, layers):
        raise ConfigError(f"--reach {reach}: the model has {layers} MoE layers; use at most {max(1, layers - 1)}")


def _behind(options: dict) -> int:
    """Returns how many tokens of a request follow a text: the next one and its drafts."""
    speculation = options.get("speculative_config") or {}
    return 1 + int(speculation.get("num_speculative_tokens") or 0)


def _slots(text: str) -> Any:
    from vllm_spac.config.types import SlotCount as Size

    try:
        size = Size.parse(text)
    except ValueError as error:
        raise ConfigError(f"--slots: {error}") from error
    if size == Size():
        raise ConfigError("--slots auto: misses depend on it; use a number of experts per layer or a percentage")
    return size


def _identity(facts: dict) -> Identity:
    from vllm_spac.decisions.predictor_file import Identity

    return Identity(facts["fingerprint"], facts["model"], tuple(facts["layers"]))


def _encodes(texts: list) -> bool:
    return any(isinstance(text, str) for text in texts)


def _console() -> Console:
    return Console(stderr=True)
