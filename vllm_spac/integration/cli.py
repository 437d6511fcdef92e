"""``--plugin spac`` and one ``--spac-*`` flag a knob, on stock ``vllm serve``."""

from __future__ import annotations

import argparse
import os
from importlib.metadata import entry_points

from vllm_spac.config import SpacConfig, check_knob, flag
from vllm_spac.errors import ConfigError

_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
    "vllm.endpoint_plugins",
)


def install(engine_args: type) -> None:
    """Add the flags to ``EngineArgs.add_cli_args`` and fold them into ``additional_config``."""
    add_cli_args = engine_args.add_cli_args
    from_cli_args = engine_args.from_cli_args.__func__

    def add(parser):
        parser = add_cli_args(parser)
        group = parser.add_argument_group(
            "SpacConfig", "Experts outside fast memory, e.g. --plugin spac --spac-slots 25%%."
        )
        group.add_argument("--plugin", choices=["spac"], action="append", help="Serve with a plugin: spac.")
        for name, field in SpacConfig.model_fields.items():
            text = (field.description or "").replace("%", "%%")
            switch = {"nargs": "?", "const": "true", "metavar": "BOOL"} if field.annotation is bool else {}
            group.add_argument(flag(name), type=_knob(name), default=None, help=text, **switch)
        return parser

    def from_args(cls, args: argparse.Namespace):
        fold(args)
        return from_cli_args(cls, args)

    engine_args.add_cli_args = staticmethod(add)
    engine_args.from_cli_args = classmethod(from_args)


def fold(args: argparse.Namespace) -> None:
    """Move the ``--spac-*`` flags of ``args`` into ``args.additional_config["spac"]``."""
    knobs = {
        name: value for name in SpacConfig.model_fields if (value := getattr(args, f"spac_{name}", None)) is not None
    }
    asked = "spac" in (getattr(args, "plugin", None) or [])
    additional = dict(getattr(args, "additional_config", None) or {})
    if knobs and not asked and "spac" not in additional:
        raise SystemExit(f"vllm: error: {flag(next(iter(knobs)))} needs --plugin spac")
    if not asked and "spac" not in additional:
        return
    additional["spac"] = {**additional.get("spac", {}), **knobs}
    try:
        SpacConfig.parse(additional["spac"])
    except ConfigError as error:
        raise SystemExit(f"vllm: error: {error}") from None
    args.additional_config = additional
    _allow_endpoint()


def _knob(name: str):
    def parse(text: str) -> str:
        try:
            return check_knob(name, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _allow_endpoint() -> None:
    """vLLM loads an endpoint plugin only when ``VLLM_PLUGINS`` names it, and then loads no plugin it does not name."""
    if "VLLM_PLUGINS" in os.environ:
        return
    names = {entry.name for group in _PLUGIN_GROUPS[:-1] for entry in entry_points(group=group)}
    os.environ["VLLM_PLUGINS"] = ",".join(sorted(names | {"spac"}))
