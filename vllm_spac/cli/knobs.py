"""``vllm-spac knobs``: lists every knob with its flag, values and default, from the configuration itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

EXAMPLES = """[bold]Examples[/]

vllm-spac knobs

vllm-spac knobs --markdown > vllm_spac/KNOBS.md   [dim]# a test compares the file with the configuration[/]
"""

_ELSEWHERE = "see right"  # values that the description states
_HEAD = """# Knobs

Flags of `vllm serve --plugin spac`, and keys of `additional_config["spac"]`. From `vllm-spac knobs --markdown`.

| knob | flag | values | default | what it does |
|---|---|---|---|---|
"""


def knobs(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown document.")] = False,
) -> None:
    """List every knob of the plugin."""
    if markdown:
        print(document(), end="")
        return
    console = Console()
    for name, option, values, default, text in rows():
        console.print(f"[bold]{name}[/]  {option}" + (f"  [dim]default: {escape(default)}[/]" if default else ""))
        if values and values != _ELSEWHERE:
            console.print(Padding(f"[dim]{escape(values)}[/]", (0, 0, 0, 4)), highlight=False)
        console.print(Padding(escape(text), (0, 0, 1, 4)), highlight=False)


def document() -> str:
    """The text of ``vllm_spac/KNOBS.md``."""
    lines = (
        f"| `{name}` | `{option}` | {values} | `{default}` | {text} |" for name, option, values, default, text in rows()
    )
    from vllm_spac.config import component_knobs

    families = "\n".join(
        f"- `{knob}`: a file of `{name.family.replace('.', '/')}/`" for knob, name in component_knobs().items()
    )
    return f"{_HEAD}{chr(10).join(lines)}\n\nKnobs that name a component of a family:\n\n{families}\n"


def rows() -> list[tuple[str, str, str, str, str]]:
    """(knob, flag, values, default, description) of each knob, in the order of the configuration."""
    from vllm_spac.config import SpacConfig, component_knobs  # imports torch, which takes seconds
    from vllm_spac.knobs.types import flag

    found, components = [], component_knobs()
    for name, field in SpacConfig.model_fields.items():
        default = "" if field.default is None else str(field.default)
        values = ", ".join(components[name].values()) if name in components else _values(field.annotation)
        found.append((name, flag(name), values, default, (field.description or "").replace("|", "/")))
    return found


def _values(annotation: Any) -> str:
    kinds = [annotation, *get_args(annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return ", ".join(map(str, get_args(kind)))
    names = {"Path": "a path", "int": "a number", "float": "a share", "bool": "true, false", "str": _ELSEWHERE}
    return next((names[kind.__name__] for kind in kinds if getattr(kind, "__name__", "") in names), "")
