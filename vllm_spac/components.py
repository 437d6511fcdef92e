"""Build a component by the name of its file: a new policy is one new file and nothing else.

A family is a sub-package with a ``base.py``. Each other module of it holds one subclass of the base.
``package.module:Class`` names a component from outside.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from vllm_spac.errors import ConfigError


def names(family: str) -> list[str]:
    """Names of the components of ``family``, sorted."""
    package = importlib.import_module(f"vllm_spac.{family}")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "base")


def find(family: str, name: str) -> type:
    """The class called ``name`` in ``family``; ``ConfigError`` when there is none."""
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
            if not inspect.isclass(found):
                raise TypeError("it is not a class")
            return found
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(f"spac: cannot load {name!r} for {family}: {error}") from error
    if name not in names(family):
        raise ConfigError(f"spac: {family} has no {name!r}; use one of {', '.join(names(family))}")
    module = importlib.import_module(f"vllm_spac.{family}.{name}")
    base = importlib.import_module(f"vllm_spac.{family}.base")
    bases = {value for _, value in inspect.getmembers(base, inspect.isclass)}
    found = [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and bases.intersection(value.__mro__)
    ]
    if len(found) != 1:
        raise ConfigError(f"vllm_spac.{family}.{name} must hold one component, found {len(found)}")
    return found[0]


def build(family: str, name: str, **knobs: Any) -> Any:
    """An instance of the component ``name`` of ``family``."""
    return find(family, name)(**knobs)
