"""Adds ``--plugin spac`` and one ``--spac-*`` flag per knob to stock ``vllm serve``."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any

from vllm_spac.config.config import SpacConfig, check_knob, value_forms
from vllm_spac.config.former import FORMER
from vllm_spac.config.types import flag
from vllm_spac.errors import ConfigError, brief, printable
from vllm_spac.integration.hooks import patches


def install() -> None:
    """Add the flags to ``EngineArgs.add_cli_args`` and fold them into ``additional_config``."""
    patches.install(f"{patches.ENGINE_ARGS}.add_cli_args", _adding)
    patches.install(f"{patches.ENGINE_ARGS}.from_cli_args", _folding)


def _adding(add_cli_args: Callable) -> Callable:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_cli_args(parser)
        parser._get_option_tuples = _whole(parser)  # type: ignore[method-assign, assignment]  # of this parser
        group = parser.add_argument_group(
            "SpacConfig", "Keeps experts outside fast memory, e.g. --plugin spac --spac-slots 25%."
        )
        group.add_argument(
            "--plugin", choices=["spac"], action="append", default=argparse.SUPPRESS, help="Serve with a plugin: spac."
        )
        forms = value_forms()
        for name, field in SpacConfig.model_fields.items():
            text = (field.description or "").replace("%", "%%")
            if name in forms:
                text += f" One of {', '.join(forms[name])}."
            if field.default is not None:
                text += f" (default: {str(field.default).lower()})"
            # Without a default, a flag that is not given adds no attribute, and the help no "(default: None)".
            group.add_argument(flag(name), type=_knob(name), default=argparse.SUPPRESS, help=text)
        return parser

    return add


def _whole(parser: argparse.ArgumentParser) -> Callable[[str], list]:
    """Refuses ``--spac-*`` flags that are not written in full; argparse asks this of flags that it does not know."""
    abbreviated = parser._get_option_tuples

    def of(text: str) -> list:
        given = text.partition("=")[0]
        if given.startswith("--spac"):
            knob = given[len("--spac-") :].replace("-", "_")
            if knob in FORMER:
                parser.error(f"{printable(given)} is gone; {FORMER[knob]}")
            near = difflib.get_close_matches(knob, SpacConfig.model_fields, n=1, cutoff=0.75)
            hint = f"did you mean {flag(near[0])}?" if near else "vllm-spac knobs lists all"
            parser.error(f"there is no flag {printable(given)}; {hint}")
        return abbreviated(text)

    return of


def _folding(from_cli_args: Callable) -> Callable:
    def from_args(cls, args: argparse.Namespace) -> Any:
        apply_flags(args)
        made = from_cli_args(cls, args)
        made.spac_command = True
        return made

    return from_args


def apply_flags(args: argparse.Namespace) -> None:
    """Move the ``--spac-*`` flags of ``args`` into ``args.additional_config["spac"]``."""
    knobs = {
        name: value for name in SpacConfig.model_fields if (value := getattr(args, f"spac_{name}", None)) is not None
    }
    asked = "spac" in (getattr(args, "plugin", None) or [])
    given = getattr(args, "additional_config", None)
    if not isinstance(given, dict | None):
        if not knobs and not asked:
            return  # not the plugin's: vLLM handles it
        raise refused(f"--additional-config must be a JSON object, e.g. '{{\"spac\": {{}}}}', not {brief(given)}")
    additional = dict(given or {})
    if knobs and not asked and "spac" not in additional:
        raise refused(f"{flag(next(iter(knobs)))} needs --plugin spac")
    if not asked and "spac" not in additional:
        return
    spac = additional.get("spac", {})
    additional["spac"] = {**spac, **knobs} if isinstance(spac, dict) else spac
    try:
        SpacConfig.parse(additional["spac"])
    except ConfigError as error:
        raise refused(error) from None
    args.additional_config = additional


def refused(problem: object) -> SystemExit:
    """Returns the exception that ends a command with one line and exit code 1."""
    return SystemExit(f"vllm: error: {printable(problem)}")


def _knob(name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return check_knob(name, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
