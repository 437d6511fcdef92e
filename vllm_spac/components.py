"""Builds components by the name of their file: a new policy is one new file and nothing else.

``FAMILIES`` names the families. A component is a module with one subclass of its family's base: ``NAME.py`` in the
folder of its family, or ``NAME_NOUN.py``, e.g. ``utility_policy.py``, in a folder of ``methods/`` or of
``execution/``. In a family's folder, modules whose names begin with an underscore are shared.
``package.module:Class`` names a component outside this package. No engine can serve with a component whose ``offline``
is not empty; it holds the reason.

Where arguments are accepted, ``name@argument=value@...`` sets keyword arguments of the component's constructor, e.g.
``utility@upper=1``. Values are Python literals, or text; that of ``file`` is a path, and has no ``@``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from vllm_spac.errors import ConfigError, brief
from vllm_spac.system.untrusted import path_of

OUTSIDE = "package.module:Class"
WITH_ARGUMENTS = "name@argument=value"
FILE = "file"  # the argument whose value is a path
_COUNT = r"[1-9][0-9]{0,5}"


@dataclass(frozen=True)
class Family:
    """A family of components."""

    base: str  # module with the abstract class, below ``vllm_spac``
    noun: str  # ends the names of its modules in shared folders
    folder: str | None = None  # holds nothing else than this family; None: there is none


FAMILIES = {
    "policies": Family("decisions.policies.base", "policy", "decisions.policies"),
    "stores": Family("storage.base", "store", "storage"),
    "balancers": Family("decisions.balancers.base", "balancer", "decisions.balancers"),
    "cpu_kernels": Family("cpu_kernels.base", "cpu_kernel", "cpu_kernels"),
    "predictors": Family("decisions.predictors.base", "predictor", "decisions.predictors"),
    "rankings": Family("methods.moe_spec.rankings", "ranking"),
    "executions": Family("execution.base", "execution"),
}


@dataclass(frozen=True)
class Argument:
    """An argument in ``name@argument=value`` that is not a component's.

    Attributes:
        values: words that it may be, or the least and the most number, which is whole if these are; none for a path.
    """

    default: Any
    values: tuple[Any, ...]

    def check(self, name: str, value: Any) -> None:
        """Raises ``ValueError``, with what would be right, if the argument ``name`` cannot be ``value``."""
        if not self.values:
            path_of(value)
            return
        if isinstance(self.values[0], str):
            right, instead = value in self.values, f"use {name}={f' or {name}='.join(self.values)}"
        else:
            least, most = self.values
            whole = isinstance(least, int)
            right = type(value) in ((int,) if whole else (int, float)) and least <= value <= most
            instead = f"use a {'whole number' if whole else 'number'} from {least} to {most}"
        if not right:
            raise ValueError(f"{name}={brief(value)}: {instead}")


def filled(name: str, values: Mapping[str, Any], known: Mapping[str, Argument]) -> dict[str, Any]:
    """Returns all arguments of ``name``; ``ValueError`` for one that is not ``known``, or has a wrong value."""
    _check_known(name, list(known), values)
    for argument, value in values.items():
        known[argument].check(argument, value)
    return {argument: each.default for argument, each in known.items()} | dict(values)


@dataclass(frozen=True)
class ComponentName:
    """The type of a knob that names a component, as metadata of ``str``; pydantic validates it.

    Attributes:
        settings: arguments that are accepted besides, by name.
    """

    family: str  # a key of ``FAMILIES``
    noun: str  # what its components are called in an error
    others: tuple[str, ...] = ()  # accepted values in addition to the names of components
    arguments: bool = False  # whether ``name@argument=value`` is accepted for arguments of the component
    settings: Mapping[str, Argument] = field(default_factory=dict, hash=False)
    counts: bool = False  # whether a number from 1 on is accepted, too

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.check_name, handler(source))

    def check_name(self, value: Any) -> Any:
        """Returns ``value`` if it names a component that an engine can serve with, is None or is one of ``others``.

        Raises:
            ValueError: any other value; the message contains what was found and the known names.
        """
        if self.counts and type(value) is int:
            value = str(value)
        if value is None or self._names_none(value):
            return value
        if not isinstance(value, str):
            raise ValueError(f"no {self.noun} is called {brief(value)}; {self._known()}, or {OUTSIDE}")
        name, given = parse(value) if self.arguments or self.settings else (value, {})
        if ":" not in name and name not in names(self.family):
            raise ValueError(f"no {self.noun} is called {brief(name)}; {self._known()}, or {OUTSIDE}")
        try:
            found = find(self.family, name)
        except ConfigError as error:
            raise ValueError(f"{error}, or {self._known()}") from error
        if inspect.isabstract(found):
            lacks = ", ".join(sorted(found.__abstractmethods__))
            raise ValueError(f"it cannot be built: it is abstract and lacks {lacks}")
        if found.offline:
            reason = f"the {self.noun} {brief(value)} cannot serve: {found.offline}"
            raise ValueError(f"{reason}; {self._known()}, or {OUTSIDE}")
        known = [*(arguments_of(found) if self.arguments else ()), *self.settings]
        _check_known(name, known, given)
        for argument in given.keys() & self.settings.keys():
            self.settings[argument].check(argument, given[argument])
        return value

    def is_ours(self, value: Any) -> bool:
        """Whether ``value`` imports nothing from outside: no component, or the name alone of one of this package."""
        return self._names_none(value) or value in names(self.family)

    def _names_none(self, value: Any) -> bool:
        return value in self.others or (self.counts and re.fullmatch(_COUNT, str(value)) is not None)

    def values(self) -> list[str]:
        """Values of the knob: ``others``, the components that can serve, and the forms of other values."""
        forms = [OUTSIDE, WITH_ARGUMENTS] if self.arguments else [OUTSIDE]
        return [*self._names(), *forms]

    def _names(self) -> list[str]:
        return [*self.others, *(["N"] if self.counts else []), *serving(self.family)]

    def _known(self) -> str:
        return f"use one of {', '.join(self._names())}"


@cache
def modules(family: str) -> dict[str, str]:
    """Returns the names of the components of ``family``, sorted, with their modules."""
    kind = FAMILIES[family]
    found = {}
    if kind.folder is not None:
        own = importlib.import_module(f"vllm_spac.{kind.folder}")
        for module in pkgutil.iter_modules(own.__path__):
            if module.name != "base" and not module.name.startswith("_") and not module.ispkg:
                found[module.name] = f"{own.__name__}.{module.name}"
    methods = importlib.import_module("vllm_spac.methods")
    shared = [f"{methods.__name__}.{module.name}" for module in pkgutil.iter_modules(methods.__path__) if module.ispkg]
    for package in ("vllm_spac.execution.host", "vllm_spac.execution.device", *shared):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if (name := module.name.removesuffix(f"_{kind.noun}")) != module.name:
                found[name] = f"{package}.{module.name}"
    return dict(sorted(found.items()))


def names(family: str) -> list[str]:
    """Returns the names of the components of ``family``, sorted."""
    return list(modules(family))


def serving(family: str) -> list[str]:
    """Returns the names of the components of ``family`` that an engine can serve with, sorted."""
    return [name for name in names(family) if not find(family, name).offline]


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Splits ``name@argument=value@...`` into the name and the arguments.

    Raises:
        ConfigError: a part after ``@`` has no ``=``.
    """
    name, *settings = spec.split("@")
    arguments: dict[str, Any] = {}
    for setting in settings:
        argument, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{brief(setting)} in {brief(spec)} sets nothing; use name@argument=value")
        try:
            arguments[argument] = value if argument == FILE else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[argument] = value
    return name, arguments


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns ``name@argument=value@...``, which ``parse`` splits again."""
    return "@".join([name, *(f"{argument}={value}" for argument, value in arguments.items())])


def arguments_of(component: type[Any]) -> list[str]:
    """Returns the arguments of a component that ``name@argument=value`` may set, sorted.

    These are those with a default, but for what its family's base names in ``passed``: an engine gives these itself.
    """
    arguments: set[str] = set()
    for kind in component.__mro__[:-1]:
        if "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]  # of this class alone
        arguments.update(p.name for p in parameters if p.default is not p.empty)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):  # the next one receives none of them
            break
    return sorted(arguments - getattr(component, "passed", frozenset()))


def _check_known(name: str, known: Sequence[str], names: Iterable[str]) -> None:
    if unknown := [argument for argument in names if argument not in known]:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"{name} has no argument {brief(unknown[0])}; {has}")


def find(family: str, spec: str) -> type[Any]:
    """Returns the class that ``name`` or ``name@argument=value`` names in ``family``.

    Raises:
        ConfigError: there is none, or it is not a subclass of the family's base.
    """
    name = spec.partition("@")[0]
    if ":" in name:
        return _outside(family, name)
    if name not in (known := modules(family)):
        raise ConfigError(f"spac: {family} has no {name!r}; use one of {', '.join(known)}")
    module = importlib.import_module(known[name])
    found = [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and issubclass(value, base(family))
    ]
    if len(found) != 1:
        raise ConfigError(f"{module.__name__} must hold one component, found {len(found)}")
    return found[0]


def base(family: str) -> type[Any]:
    """Returns the abstract class that each component of ``family`` derives from."""
    module = importlib.import_module(f"vllm_spac.{FAMILIES[family].base}")
    abstract = inspect.getmembers(module, inspect.isabstract)
    [found] = [value for _, value in abstract if value.__module__ == module.__name__]
    return found


def build(family: str, spec: str, make: Callable[..., Any] | None = None, **passed: Any) -> Any:
    """Returns an instance of a component of ``family``.

    Args:
        make: called in place of the class's constructor, e.g. a class method of the family.
        passed: arguments that are not for ``spec`` to set.

    Raises:
        ConfigError: there is no such component, or it refuses the arguments of ``spec``.
    """
    return build_with(family, *parse(spec), make, **passed)


def build_with(
    family: str, name: str, arguments: Mapping[str, Any], make: Callable[..., Any] | None = None, **passed: Any
) -> Any:
    """As ``build``, with the arguments of the spec."""
    found = find(family, name)
    if fixed := arguments.keys() & passed.keys():
        raise ConfigError(f"{name}: {', '.join(sorted(fixed))} cannot be set here")
    if not arguments:
        return (make or found)(**passed)
    _check_known(name, arguments_of(found), arguments)
    try:
        return (make or found)(**passed, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{brief(written(name, arguments))} cannot be built: {error}") from error


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
