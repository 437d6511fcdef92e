"""``vllm-spac tune``: measures ways to serve a model on this machine, and keeps what is faster than the default."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_spac.cli.tables import examples, print_table, say, shown
from vllm_spac.errors import ConfigError
from vllm_spac.system.untrusted import path_named

if TYPE_CHECKING:
    from vllm_spac.config.tuned_profile import Candidate, Departure, Measured, TunedProfile
    from vllm_spac.tools.planning.planned_machine import PlannedMachine
    from vllm_spac.tools.planning.planned_model import ServedModel
    from vllm_spac.tools.tuning.candidates import Allowed
    from vllm_spac.tools.tuning.measurer import Measurer
    from vllm_spac.tools.tuning.progress import ProgressFile
    from vllm_spac.tools.tuning.session import Session, TuneOutcome

EXAMPLES = examples("""
vllm-spac tune ./Qwen3-30B-A3B
vllm-spac tune ./Qwen3-30B-A3B --minutes 30 --prompts mine.jsonl --eagle3 ./Qwen3-30B-A3B-eagle3
vllm-spac tune ./model --slots 25% --engine '{"enforce_eager": true}' --minutes 5
vllm-spac tune ./model --eagle3 ./head --lossy --quality quality/quality.json   [dim]# with budgets[/]
[dim]Interrupted with Ctrl-C, the same command continues.[/]
""")

_PROMPT_TOKENS = 512  # longer prompts are cut


def tune(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or a name in the Hugging Face cache.")],
    minutes: Annotated[float, typer.Option(help="Time to spend, after the first start.", min=0.1)] = 10.0,
    prompts: Annotated[
        Path | None, typer.Option(help="As for vllm-spac quality.", show_default="24 prompts of the package")
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate after each prompt.", min=2)] = 64,
    slots: Annotated[str | None, typer.Option(help="As --spac-slots, for all.", show_default="as many as fit")] = None,
    fast_memory: Annotated[
        str | None, typer.Option(help="Fast memory that the engine may take, e.g. 8GiB, instead of all.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens per request, as --max-model-len: fewer leave more slots.", min=2)
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Also with these drafts, as for vllm serve.")
    ] = None,
    eagle3: Annotated[Path | None, typer.Option(help="Also with drafts of this EAGLE-3 head.")] = None,
    predictor_file: Annotated[
        Path | None, typer.Option(help="Also with the predictors of this file, from vllm-spac train-predictor.")
    ] = None,
    allow_rounding: Annotated[
        bool, typer.Option("--allow-rounding", help="Also CPU experts and pointers: exact up to rounding.")
    ] = False,
    lossy: Annotated[bool, typer.Option("--lossy", help="Also budgets, which change tokens; see --quality.")] = False,
    quality: Annotated[
        Path, typer.Option(help="With --lossy, results of vllm-spac quality, whose budgets are tried.")
    ] = Path("quality/quality.json"),
    engine: Annotated[str | None, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")] = None,
    disk_dir: Annotated[
        Path | None,
        typer.Option(help="As --spac-disk-dir; the profile is put there.", show_default="~/.cache/vllm_spac"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an interrupted run has measured.")] = False,
    measurer: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure ways to serve a model here, end to end, and keep the fastest if it beats the default."""
    from vllm_spac.system.machine import DISK_DIR, gpu_names
    from vllm_spac.tools.evaluation.engine import options_of
    from vllm_spac.tools.planning.planned_model import ServedModel
    from vllm_spac.tools.tuning.candidates import Allowed, budgets

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    if slots is not None and fast_memory is not None:
        raise ConfigError("--slots and --fast-memory limit the same memory; use one of them")
    options, drafts = options_of(engine, "--engine"), options_of(speculative_config, "--speculative-config")
    if Path(drafts.get("model", "")).is_dir() and drafts.get("model"):
        drafts["model"] = str(Path(drafts["model"]).absolute())  # vllm serve may be started elsewhere
    if drafts:
        _check_drafts(drafts)
    if context is not None:
        options.setdefault("max_model_len", context)
    served = ServedModel.read(model, "slots", on_cpu=not gpu_names())
    if served.source != "headers":
        if Path(model).exists():
            raise ConfigError(f"{model} has no weights to measure; name a folder with *.safetensors")
        raise ConfigError(f"the weights of {model} are not here to measure; run: hf download {model}")
    asked: dict[Departure, bool] = {"rounding": allow_rounding, "lossy": lossy}
    departures = frozenset(name for name, given in asked.items() if given)
    allowed = Allowed(
        slots=_checked_slots(slots),
        limited=fast_memory is not None,
        context=context,
        drafts=drafts or None,
        eagle3=None if eagle3 is None else _folder(eagle3, "--eagle3"),
        predictor_file=None if predictor_file is None else str(predictor_file.absolute()),
        predictors=_predictors(predictor_file),
        budgets=budgets(quality, served) if lossy else (),
        engine=options,
        departures=departures,
    )
    folder = path_named(disk_dir or DISK_DIR, "--disk-dir").absolute()
    texts, checksum = _prompts(prompts)
    machine = _machine(served, folder, fast_memory)
    arguments = {
        "tokens": output_tokens,
        "prompts": checksum,
        "slots": slots,
        "fast_memory": fast_memory,
        "context": context,
        "drafts": drafts,
        "eagle3": allowed.eagle3,
        "predictors": allowed.predictor_file,
        "departures": sorted(departures),
        "budgets": [budget.name for budget in allowed.budgets],
        "engine": options,
        "measurer": measurer,
    }
    chosen = _measurer(measurer, model, disk_dir, options)
    _Run(model, served, machine, allowed, folder, arguments, options).run(
        texts, output_tokens, 60 * minutes, chosen, fresh, disk_dir
    )


class _Run:
    """One run of the command, from its checked arguments to the profile."""

    def __init__(
        self,
        model: str,
        served: ServedModel,
        machine: PlannedMachine,
        allowed: Allowed,
        folder: Path,
        arguments: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        from vllm_spac.config import tuned_profile
        from vllm_spac.integration.hooks import device
        from vllm_spac.storage.checkpoint.headers import find_folder
        from vllm_spac.system.machine import Machine

        self._model, self._served, self._machine, self._allowed = model, served, machine, allowed
        self._folder, self._arguments, self._options = folder, dict(arguments), dict(options)
        self._identity = tuned_profile.identity(find_folder(model))
        self._here = Machine.here(folder, device.names())
        self._versions = tuned_profile.relevant_versions()
        self._console = Console(stderr=True)

    def run(
        self, texts: Sequence, tokens: int, seconds: float, measurer: Measurer, fresh: bool, disk_dir: Path | None
    ) -> None:
        from vllm_spac.tools.tuning import session
        from vllm_spac.tools.tuning.candidates import candidates, left_out

        file = self._file(fresh)
        found = candidates(self._served, self._machine, self._allowed)
        if (sentence := left_out(self._served, self._machine, found)) is not None:
            say(self._console, shown(sentence))
        longest = f"about {session.minutes(seconds)}, after the first start, which packs the experts"
        say(self._console, f"{len(found)} ways to serve are measured in {longest}; Ctrl-C keeps what was found")
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%")
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True) as progress:
            task = progress.add_task("", total=seconds)

            def tell(text: str, spent: float) -> None:
                left = f", at most {session.minutes(max(0.0, seconds - spent))} left" if spent else ""
                progress.update(task, completed=spent, description=shown(text + left))

            def report(text: str) -> None:
                say(progress.console, f"[dim]{shown(text)}[/]")

            one = session.Session(found, texts, tokens, seconds, measurer, file, tell, report=report)
            outcome = self._measured(one, file, disk_dir)
        self._finish(outcome, list(one.candidates.values()), file, disk_dir)

    def _file(self, fresh: bool) -> ProgressFile:
        from vllm_spac.tools.tuning.progress import ProgressFile, key_of

        key = key_of(self._identity, self._here, self._versions, self._arguments)
        file = ProgressFile(self._folder, key)
        if fresh:
            file.remove()
        file.load()
        file.save()  # before any work is done
        if file.content.runs:
            text = f"continuing, {len(file.content.runs)} measurements are there; --fresh begins again"
            self._console.print(text, highlight=False)
        return file

    def _measured(self, one: Session, file: ProgressFile, disk_dir: Path | None) -> TuneOutcome:
        from vllm_spac.tools.tuning import session
        from vllm_spac.tools.tuning.measurer import MeasuringError
        from vllm_spac.tools.tuning.session import last_line

        try:
            return one.run()
        except KeyboardInterrupt:
            found = one.stopped()
            kept = f"{len(file.content.runs)} measurements are kept; the same command continues"
            say(self._console, shown(f"stopped: {session.best_so_far(found)}; {kept}"))
            if found.contender is not None:
                by_hand = session.command(self._model, found.contender, disk_dir)
                say(self._console, f"[green]to serve so:[/] {shown(by_hand)}")
            raise typer.Exit(130) from None
        except MeasuringError as error:
            for line in str(error).splitlines():
                say(self._console, f"[dim]{shown(line)}[/]")
            raise ConfigError(
                f"an engine that is needed for a comparison failed: {last_line(str(error))}; see its log above, change "
                "--engine, --slots or --context, and run the same command"
            ) from error

    def _finish(
        self, outcome: TuneOutcome, candidates: list[Candidate], file: ProgressFile, disk_dir: Path | None
    ) -> None:
        from vllm_spac.config.tuned_profile import path_of
        from vllm_spac.tools.tuning import session

        console, rows = Console(), session.measured(outcome, candidates)
        print_table(console, _table(self._model, rows))
        for sentence in session.sentences(outcome):
            say(console, shown(sentence))
        problems = list(session.errors(outcome))
        for problem in problems:
            say(self._console, f"[bold red]error:[/] {shown(problem)}")
        if outcome.undecided and not problems:
            console.print("no profile was written: the same command with more --minutes continues", highlight=False)
            return
        path = path_of(self._folder, self._identity)
        self._profile(outcome, rows).write(path)
        say(console, f"written: {shown(path)}")
        if count := len(outcome.untried):
            console.print(f"{count} were not tried: the same command with more --minutes continues", highlight=False)
        else:
            file.remove()
        if outcome.choice.group != "baseline":
            where = "" if disk_dir is None else f" --spac-disk-dir {disk_dir}"
            where += f" --spac-tuned auto@allow={allow}" if (allow := outcome.choice.allowance) else ""
            console.print(f"[green]run:[/] vllm serve {shown(self._model)} --plugin spac{shown(where)}", soft_wrap=True)
            by_hand = session.command(self._model, outcome.choice, disk_dir)
            say(console, f"[dim]the same by hand: {shown(by_hand)}[/]")
        if self._options:
            text = json.dumps(self._options)
            say(console, f"[dim]measured with the engine arguments {shown(text)}[/]")
        if problems:
            raise typer.Exit(1)

    def _profile(self, outcome: TuneOutcome, rows: Sequence[Measured]) -> TunedProfile:
        from vllm_spac.config.tuned_profile import TunedProfile, digests
        from vllm_spac.system.machine import now

        kept = outcome.choice if outcome.choice.group != "baseline" else None
        return TunedProfile(
            model=self._model,
            identity=self._identity,
            machine=self._here,
            versions=self._versions,
            choice=outcome.choice.name,
            knobs=dict(kept.knobs or {}) if kept else {},
            speculative_config=dict(kept.drafts) if kept and kept.drafts else None,
            ratio=outcome.ratio,
            measured=tuple(rows),
            files={} if kept is None else digests(kept.knobs or {}),
            engine=self._options,
            arguments=self._arguments,
            command=shlex.join(["vllm-spac", *sys.argv[1:]]),
            date=now(),
        )


def _table(model: str, rows: Sequence[Measured]) -> Table:
    tried, waiting = [row for row in rows if row.rounds], [row.name for row in rows if not row.rounds]
    table = Table(
        title=f"{shown(model)}: measured here, one request at a time",
        title_justify="left",
        caption=f"no time was left for: {shown('; '.join(waiting))}" if waiting else None,
        caption_justify="left",
    )
    for name in ("choice", "tokens/s", "over the default", "first token", "rounds", "tokens", "remark"):
        table.add_column(name, justify="left" if name in ("choice", "tokens", "remark") else "right", overflow="fold")
    for row in tried:
        cells = (
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
            "-" if row.speed is None else f"{row.speed:.2f}",
            "-" if row.first_token is None else f"{row.first_token:.3f} s",
            str(row.rounds) if row.rounds else "-",
            shown(row.tokens or "-"),
            shown("; ".join(filter(None, (row.note, row.problem)))),
        )
        table.add_row(shown(row.name), *cells)
    return table


def _check_drafts(drafts: dict[str, Any]) -> None:
    from vllm_spac.config.tuned_profile import Drafts

    try:
        Drafts.check(drafts)
    except ValueError as error:
        raise ConfigError(
            f"--speculative-config has what a profile may not set ({error}); tune without it, and serve with it"
        ) from None


def _checked_slots(slots: str | None) -> str | None:
    from vllm_spac.config.types import SlotCount

    if slots is None:
        return None
    try:
        SlotCount.parse(slots)
    except ValueError as error:
        raise ConfigError(f"--slots {error}") from error
    return slots


def _folder(path: Path, option: str) -> str:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{option} {path} is no folder of a model: it has no config.json")
    return str(path.absolute())


def _predictors(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    from vllm_spac.decisions.predictor_file import PredictorFile

    return tuple(PredictorFile.read(path).names)


def _prompts(path: Path | None) -> tuple[list[str | list[int]], str]:
    """Returns the prompts, and a checksum of them."""
    from vllm_spac.tools.evaluation.prompts import checksum, read

    packaged = files("vllm_spac.tools.tuning").joinpath("prompts.jsonl")
    found = read(path if path is not None else Path(str(packaged)))
    return found, checksum([list(text.encode()) if isinstance(text, str) else text for text in found])


def _machine(served: ServedModel, folder: Path, fast_memory: str | None) -> PlannedMachine:
    """Returns this machine; measures it first, unless ``vllm-spac profile`` has."""
    from vllm_spac.cli.plan import size_of
    from vllm_spac.cli.profile import measure_first
    from vllm_spac.tools.planning.planned_machine import HERE, UTILIZATION, PlannedMachine, profile_path

    fast = size_of("fast", fast_memory)
    with suppress(ConfigError):
        return _limited(PlannedMachine.of(HERE, folder=folder), fast, UTILIZATION)
    measure_first(max(served.checkpoint.expert_bytes), folder, profile_path(folder))
    return _limited(PlannedMachine.of(HERE, folder=folder), fast, UTILIZATION)


def _limited(machine: PlannedMachine, fast: int | None, share: float) -> PlannedMachine:
    """Returns the machine with ``fast`` bytes of fast memory for vLLM, which is host memory where there is no GPU."""
    if fast is None:
        return machine
    whole = int(fast / share) + 1
    return replace(machine, gpu=whole) if machine.gpu else replace(machine, host=whole)


def _measurer(name: str, model: str, disk_dir: Path | None, options: dict) -> Measurer:
    """Returns what starts engines; ``package.module:Class`` names one of another kind."""
    if name:
        module, _, kind = name.partition(":")
        return getattr(importlib.import_module(module), kind)()
    from vllm_spac.tools.tuning.measurer import ProcessMeasurer

    return ProcessMeasurer(model, disk_dir, options, _PROMPT_TOKENS)
