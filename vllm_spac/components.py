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
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if module.name != "base" and not module.name.startswith("_")
    )


def find(family: str, name: str) -> type[Any]:
    """The class called ``name`` in ``family``; ``ConfigError`` when there is none, or it is not of the family."""
    if ":" in name:
        return _outside(family, name)
    if name not in names(family):
        raise ConfigError(f"spac: {family} has no {name!r}; use one of {', '.join(names(family))}")
    module = importlib.import_module(f"vllm_spac.{family}.{name}")
    found = [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and issubclass(value, base(family))
    ]
    if len(found) != 1:
        raise ConfigError(f"vllm_spac.{family}.{name} must hold one component, found {len(found)}")
    return found[0]


def base(family: str) -> type:
    """The abstract class that each component of ``family`` derives from."""
    module = importlib.import_module(f"vllm_spac.{family}.base")
    abstract = inspect.getmembers(module, inspect.isabstract)
    [found] = [value for _, value in abstract if value.__module__ == module.__name__]
    return found


def build(family: str, name: str, **knobs: Any) -> Any:
    """An instance of the component ``name`` of ``family``."""
    return find(family, name)(**knobs)


def _outside(family: str, name: str) -> type:
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        problem = f"{type(error).__name__}: {error}"
        remedy = "name package.module:Class, with its folder on PYTHONPATH"
        raise ConfigError(f"spac: cannot load {name!r} for {family}: {problem}; {remedy}") from error
    parent = base(family)
    if not inspect.isclass(found) or not issubclass(found, parent):
        raise ConfigError(
            f"spac: {name!r} is not one of {family}; derive it from {parent.__module__}.{parent.__name__}"
        )
    return found
