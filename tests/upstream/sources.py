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
        lines: of the file.
    """

    definitions: dict[str, list[ast.AST]] = field(default_factory=dict)
    imports: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


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

    def locate(self, module: str, path: str) -> tuple[str, ast.AST] | None:
        """Returns (module, definition) of ``name``, or of the method ``Class.name``; None if there is none.

        Methods are searched in the bases of their class, too.
        """
        owner, _, name = path.rpartition(".")
        for where, node in self.find(module, owner or name):
            if (found := self._method(where, node, name) if owner else (where, node)) is not None:
                return found
        return None

    def function(self, module: str, path: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Returns what ``locate`` finds, if it is a function or a method."""
        _, node = self.locate(module, path) or ("", None)
        return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def code(self, module: str, path: str) -> Code | None:
        """Returns the code of what ``locate`` finds."""
        if (found := self.locate(module, path)) is None:
            return None
        where, node = found
        here = self.module(where)
        assert here is not None
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None
        hidden = range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1) if documented else range(0)
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        numbered = ((number, here.lines[number - 1]) for number in range(first, (node.end_lineno or first) + 1))
        plain = [line for number, line in numbered if number not in hidden and line.strip()]
        return Code([line for line in plain if not line.lstrip().startswith("#")], ast.dump(node))

    def _method(self, module: str, node: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        if not isinstance(node, ast.ClassDef):
            return None
        own = [found for known, found in _definitions(node.body) if known == name]
        if own:
            return module, own[-1]
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            for where, parent in self.find(module, base.id) if isinstance(base, ast.Name) else ():
                if (found := self._method(where, parent, name)) is not None:
                    return found
        return None


@dataclass(frozen=True)
class Code:
    """What a definition does.

    Attributes:
        lines: without its docstring, comments of a line of their own and empty lines.
        tree: equal if nothing but comments and formatting differs.
    """

    lines: list[str]
    tree: str


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Returns the names of a function's parameters, in the order of ``inspect.signature``."""
    given = function.args
    rest = [given.vararg, *given.kwonlyargs, given.kwarg]
    return tuple(one.arg for one in [*given.posonlyargs, *given.args, *rest] if one is not None)


def _parse(text: str, package: str) -> Module:
    tree, found = ast.parse(text), Module(lines=text.splitlines())
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
