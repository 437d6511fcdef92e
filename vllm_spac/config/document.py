"""The list of all knobs: ``vllm-spac knobs``, and the document ``KNOBS.md``."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from vllm_spac.config.config import SpacConfig, component_knobs, value_forms
from vllm_spac.config.evidence import WINS
from vllm_spac.config.types import flag

ELSEWHERE = "see right"  # values that the description states
NONE = "no result of ours"  # in which another value than the default wins
_HEAD = """# Knobs

Flags of `vllm serve --plugin spac`, and keys of `additional_config["spac"]`. From `vllm-spac knobs --markdown`.
*Wins in*: a file of `benchmarks/results` in which a value other than the default does better.

| knob | flag | values | default | what it does | wins in |
|---|---|---|---|---|---|
"""


def document() -> str:
    """The text of ``vllm_spac/KNOBS.md``."""
    wins = {name: f"{value}: `{file}`" for name, (value, file) in WINS.items()}
    lines = (
        f"| `{name}` | `{option}` | {values} | {f'`{default}`' if default else ''} | {text} | {wins.get(name, NONE)} |"
        for name, option, values, default, text in rows()
    )
    families = "\n".join(
        f"- `{knob}`: a file of `{name.family.replace('.', '/')}/`" for knob, name in component_knobs().items()
    )
    return f"{_HEAD}{chr(10).join(lines)}\n\nKnobs that name a component of a family:\n\n{families}\n"


def rows() -> list[tuple[str, str, str, str, str]]:
    """(knob, flag, values, default, description) of each knob, in the order of the configuration."""
    found, forms = [], value_forms()
    for name, field in SpacConfig.model_fields.items():
        default = "" if field.default is None else str(field.default)
        values = ", ".join(forms[name]) if name in forms else _values(field.annotation)
        found.append((name, flag(name), values, default, (field.description or "").replace("|", "/")))
    return found


def _values(annotation: Any) -> str:
    kinds = [annotation, *get_args(annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return ", ".join(map(str, get_args(kind)))
    names = {"Path": "a path", "int": "a number", "float": "a share", "str": ELSEWHERE}
    return next((names[kind.__name__] for kind in kinds if getattr(kind, "__name__", "") in names), "")
