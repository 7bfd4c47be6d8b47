"""Only public names cross a package border. In: the repository root. Out: a list of faults, file:line each.

import-linter sees modules; this sees names: `from hp_config import _x`, `import hp_config._y`, `hp_config._z`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in name.split("."))


def foreign(module: str | None, own: str) -> bool:
    top = (module or "").split(".")[0]
    return top.startswith("hp_") and top != own


def private_uses(tree: ast.AST, own: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each private name of another hp_* package that the code of package `own` uses."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if foreign(alias.name, own):
                    aliases[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
                    if is_private(alias.name):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and foreign(node.module, own):
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = dotted
                if is_private(dotted):
                    yield node.lineno, dotted
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = node.value
            parts = [node.attr]
            while isinstance(base, ast.Attribute):
                parts.append(base.attr)
                base = base.value
            if isinstance(base, ast.Name) and base.id in aliases:
                yield node.lineno, ".".join([aliases[base.id], *reversed(parts)])


def find_faults(root: Path) -> list[str]:
    faults = []
    for package in sorted((root / "packages").iterdir()):
        own = package.name.replace("-", "_")
        for path in sorted((package / "src").rglob("*.py")):
            uses = private_uses(ast.parse(path.read_text(), filename=str(path)), own)
            faults += [
                f"{path.relative_to(root)}:{line}: {name} is private to its package; "
                "export a public name there, or do without"
                for line, name in uses
            ]
    return faults
