"""``vllm-spac budgets``: chooses a budget for each layer from a calibration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_spac.cli.calibrate import MASS_OF, check_target
from vllm_spac.cli.tables import print_table
from vllm_spac.cli.text import shown

if TYPE_CHECKING:
    from vllm_spac.budget.calibration import Calibration

EXAMPLES = """[bold]Examples[/]

vllm-spac budgets model.calibration.safetensors --mass 0.98 --output budgets.json

vllm serve ./model --plugin spac --spac-budget-file budgets.json   [dim]# serve with them[/]
"""


def budgets(
    calibration: Annotated[Path, typer.Argument(help="File from vllm-spac calibrate.")],
    mass: Annotated[float, typer.Option(help="Share of the mass that each layer keeps.")] = 0.98,
    mass_of: Annotated[str, typer.Option(help=MASS_OF)] = "selected",
    coverage: Annotated[
        str, typer.Option(help="What replaces an expert that the budget cut: substitution or truncation.")
    ] = "substitution",
    output: Annotated[Path | None, typer.Option(help="Write the budgets to this file, e.g. budgets.json.")] = None,
) -> None:
    """Choose a budget for each layer, for --spac-budget-file."""
    from vllm_spac.budget.calibration import Calibration
    from vllm_spac.budget.per_layer import choose, write_budgets

    found = Calibration.read(calibration)
    chosen, console = choose(found, mass, coverage, mass_of), Console()
    asked: dict[str, Any] = {"mass": mass, "mass_of": mass_of, "coverage": coverage}
    print_table(console, _table(found, chosen, **asked))
    if output is not None:
        check_target(output)
        write_budgets(output, found.fingerprint, chosen, asked)
        console.print(f"written: {shown(output)}", highlight=False, soft_wrap=True)


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
