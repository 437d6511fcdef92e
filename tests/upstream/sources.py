"""A package's Python sources, read without importing it: from a folder or from a wheel."""

from __future__ import annotations

import ast
import functools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import resolve_name
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """What one file defines and imports.

    Attributes:
        definitions: name -> the classes, functions and values that it may be; several in branches.
        imports: name -> (module, name) that it may be imported from; several if that depends on the platform.
    """

    definitions: dict[str, list[ast.AST]] = field(default_factory=dict)
    imports: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Mentions:
    """What the definitions of a name mention.

    Attributes:
        names: (module, name): of the same module, or where the name itself is imported from.
        attributes: of whatever.
        texts: string constants.
    """

    names: frozenset[tuple[str, str]] = frozenset()
    attributes: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()


class Sources:
    """Modules by dotted name.

    Args:
        root: folder or wheel that has the package at its top.
    """

    def __init__(self, root: Path) -> None:
        self._root = zipfile.Path(root) if root.is_file() else root

    @functools.cache  # noqa: B019 - as long as the object
    def module(self, name: str) -> Module | None:
        """Returns a module; None if there is no such file."""
        path = self._root
        for part in name.split("."):
            path = path / part
        is_package = path.is_dir()
        file = path / "__init__.py" if is_package else path.parent / f"{path.name}.py"
        if not file.is_file():
            return None
        package = name if is_package else name.rpartition(".")[0]
        return _parse(file.read_text(encoding="utf-8"), package)

    @functools.cache  # noqa: B019
    def mentions(self, module: str, name: str) -> Mentions:
        """Returns what the definitions of ``name`` in ``module`` mention."""
        here = self.module(module)
        if here is None:
            return Mentions()
        nodes = [node for definition in here.definitions.get(name, ()) for node in ast.walk(definition)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        known = {(module, other) for other in names if other in here.definitions or other in here.imports}
        return Mentions(
            frozenset(known.union(here.imports.get(name, ()))),
            frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
            frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)),
        )

    def find(self, module: str, name: str) -> Iterator[tuple[str, ast.AST]]:
        """Yields (module, definition) of everything that ``name`` of ``module`` may be, through imports."""
        todo, seen = [(module, name)], set()
        while todo:
            here = todo.pop()
            found = self.module(here[0]) if here not in seen else None
            seen.add(here)
            if found is not None:
                yield from ((here[0], node) for node in found.definitions.get(here[1], ()))
                todo += found.imports.get(here[1], ())
                todo += [(source, here[1]) for source, _ in found.imports.get("*", ())]

    def function(self, module: str, path: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Returns the function ``name`` or method ``Class.name`` of a module; None if there is none.

        Methods are searched in the bases of their class, too.
        """
        owner, _, name = path.rpartition(".")
        for where, node in self.find(module, owner or name):
            found = self._method(where, node, name) if owner else node
            if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
                return found
        return None

    def _method(self, module: str, node: ast.AST, name: str) -> ast.AST | None:
        if not isinstance(node, ast.ClassDef):
            return None
        own = [found for known, found in _definitions(node.body) if known == name]
        if own:
            return own[-1]
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            for where, parent in self.find(module, base.id) if isinstance(base, ast.Name) else ():
                if (found := self._method(where, parent, name)) is not None:
                    return found
        return None


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Returns the names of a function's parameters, in the order of ``inspect.signature``."""
    given = function.args
    rest = [given.vararg, *given.kwonlyargs, given.kwarg]
    return tuple(one.arg for one in [*given.posonlyargs, *given.args, *rest] if one is not None)


def _parse(text: str, package: str) -> Module:
    tree, found = ast.parse(text), Module()
    for name, node in _definitions(tree.body):
        found.definitions.setdefault(name, []).append(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                found.imports.setdefault(alias.asname or alias.name, []).append((source, alias.name))
    return found


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yields (name, node) of the classes, functions and values that are defined here, also in branches."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value or node.annotation
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions([*node.body, *node.orelse])
