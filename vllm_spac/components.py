"""Builds components by the name of their file: a new policy is one new file and nothing else.

A family is a sub-package with a ``base.py``. Each other module of it contains one subclass of the base, or is a folder
whose module ``<family>.py`` contains it. Modules whose names begin with an underscore are shared by the family.
``package.module:Class`` names a component outside this package. No engine can serve with a component whose ``offline``
is not empty; it holds the reason.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any

from vllm_spac.errors import ConfigError
from vllm_spac.system.printable import brief

OUTSIDE = "package.module:Class"


@dataclass(frozen=True)
class ComponentName:
    """The type of a knob that names a component, as metadata of ``str``; pydantic validates it.

    Attributes:
        family: folder below ``vllm_spac``, with dots.
        noun: what its components are called in an error.
        others: accepted values in addition to the names of components.
    """

    family: str
    noun: str
    others: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.check_name, handler(source))

    def check_name(self, value: Any) -> Any:
        """Returns ``value`` if it names a component that an engine can serve with, is None or is one of ``others``.

        Raises:
            ValueError: any other value; the message contains what was found and the known names.
        """
        if value is None or value in self.others:
            return value
        if not isinstance(value, str) or (":" not in value and value not in names(self.family)):
            raise ValueError(f"no {self.noun} is called {brief(value)}; {self._known()}, or {OUTSIDE}")
        try:
            found = find(self.family, value)
        except ConfigError as error:
            raise ValueError(f"{error}, or {self._known()}") from error
        if inspect.isabstract(found):
            lacks = ", ".join(sorted(found.__abstractmethods__))
            raise ValueError(f"it cannot be built: it is abstract and lacks {lacks}")
        if found.offline:
            reason = f"the {self.noun} {brief(value)} cannot serve: {found.offline}"
            raise ValueError(f"{reason}; {self._known()}, or {OUTSIDE}")
        return value

    def values(self) -> list[str]:
        """Values of the knob: ``others``, the components that can serve, and the form of an outside name."""
        return [*self.others, *serving(self.family), OUTSIDE]

    def _known(self) -> str:
        return f"use one of {', '.join([*self.others, *serving(self.family)])}"


def names(family: str) -> list[str]:
    """Returns the names of the components of ``family``, sorted."""
    package = importlib.import_module(f"vllm_spac.{family}")
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if module.name != "base" and not module.name.startswith("_")
    )


def serving(family: str) -> list[str]:
    """Returns the names of the components of ``family`` that an engine can serve with, sorted."""
    return [name for name in names(family) if not find(family, name).offline]


def find(family: str, name: str) -> type[Any]:
    """Returns the class called ``name`` in ``family``.

    Raises:
        ConfigError: there is none, or it is not a subclass of the family's base.
    """
    if ":" in name:
        return _outside(family, name)
    if name not in names(family):
        raise ConfigError(f"spac: {family} has no {name!r}; use one of {', '.join(names(family))}")
    module = importlib.import_module(f"vllm_spac.{family}.{name}")
    if getattr(module, "__path__", None) is not None:  # a folder
        module = importlib.import_module(f"{module.__name__}.{family.rpartition('.')[2]}")
    found = [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and issubclass(value, base(family))
    ]
    if len(found) != 1:
        raise ConfigError(f"vllm_spac.{family}.{name} must hold one component, found {len(found)}")
    return found[0]


def base(family: str) -> type[Any]:
    """Returns the abstract class that each component of ``family`` derives from."""
    module = importlib.import_module(f"vllm_spac.{family}.base")
    abstract = inspect.getmembers(module, inspect.isabstract)
    [found] = [value for _, value in abstract if value.__module__ == module.__name__]
    return found


def build(family: str, name: str, **knobs: Any) -> Any:
    """Returns an instance of the component ``name`` of ``family``, constructed with ``knobs``."""
    return find(family, name)(**knobs)


def _outside(family: str, name: str) -> type[Any]:
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        problem = f"{type(error).__name__}: {error}"
        remedy = f"name {OUTSIDE}, with its folder on PYTHONPATH"
        raise ConfigError(f"spac: cannot load {name!r} for {family}: {problem}; {remedy}") from error
    parent = base(family)
    if not inspect.isclass(found) or not issubclass(found, parent):
        what = f"the class {found.__qualname__}" if inspect.isclass(found) else f"no class but {brief(found)}"
        raise ConfigError(
            f"spac: {name!r} is {what}, which is not one of {family}; derive it from "
            f"{parent.__module__}.{parent.__name__}"
        )
    return found
