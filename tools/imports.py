"""What imports what in a package, read from its source.

`tests/test_repository.py` checks it, `draw.py` draws it.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def imports_by_module(package: Path, for_types: bool = False) -> dict[str, set[str]]:
    """Every module of the package, and the modules of the package that it imports anywhere.

    With `for_types`, what is imported for type checkers alone counts too.
    """
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return {name: set(_imports(name, path, files, for_types)) for name, path in files.items()}


def circle_of(imports: dict[str, set[str]]) -> list[str]:
    """Files that import each other, in a circle; empty if there are none.

    Importing a name from a package whose ``__init__`` has it does not count: what stands there is
    read with the package.
    """
    packages = {name.rpartition(".")[0] for name in imports}
    between_files = {name: targets - packages for name, targets in imports.items()}
    try:
        graphlib.TopologicalSorter(between_files).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _imports(name: str, path: Path, files: dict[str, Path], for_types: bool) -> Iterator[str]:
    root = name.partition(".")[0]
    parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = node.body if for_types else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), parent)
            targets = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            while target not in files and "." in target:
                target = target.rpartition(".")[0]
            if target.partition(".")[0] == root and target != name:
                yield target


def unit_of(module: str) -> str:
    """The room of `_src`, or the file or folder of `lm` or of the package, that has a module.

    Rooms are written with a leading ``_src.``; the package itself is "".
    """
    parts = module.split(".")[1:]
    if parts[:1] == ["_src"]:
        return ".".join(parts[:2])
    if parts[:1] == ["lm"] and len(parts) > 1:
        parts = parts[1:]
    return parts[0] if parts else ""
