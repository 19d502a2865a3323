"""How the code names things: the share of bound names that say nothing of what they hold, and of one-word functions.

    python scripts/count_names.py [--names] [PATH ...]        # src/pipeline by default

A binding is each place where a name is bound: parameters, assignments, loop and comprehension variables, functions and
classes. --names lists the commonest vague names and all vague functions, with their places.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

VAGUE = set(
    """
    alike all another any apart around aside asked away before behind beside besides both chosen counted done each else
    every everything found freed given gone held here inside it kept known left like made many meant mine missed more
    most mine named needed needs none nothing once one ones other others ours own read rest said says seen several shown
    so some something such taken taught that theirs them there these thing things this those told twice used wanted
    ways what where which while who whole within without
    """.split()
)
CONVENTIONAL = ("self", "cls", "_")


def bindings(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """(name, line, kind) of each binding; kind: function, class or value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, "function"
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.lineno, "class"
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, "value"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno, "value"


def is_vague(name: str) -> bool:
    """Whether no word of a name is a noun or a verb of its content: one, found_here, told."""
    words = name.strip("_").lower().split("_")
    return all(word in VAGUE for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("src/pipeline")])
    parser.add_argument("--names", action="store_true")
    asked = parser.parse_args()
    total, functions, single = 0, 0, Counter[str]()
    vague: dict[str, list[str]] = defaultdict(list)
    vague_functions: list[str] = []
    for path in sorted(
        file for folder in asked.paths for file in ([folder] if folder.is_file() else folder.rglob("*.py"))
    ):
        for name, line, kind in bindings(ast.parse(path.read_text(encoding="utf-8"))):
            if name in CONVENTIONAL or name.startswith("__"):
                continue
            total += 1
            if is_vague(name):
                vague[name].append(f"{path}:{line}")
                vague_functions += [f"{name} {path}:{line}"] if kind == "function" else []
            if kind == "function":
                functions += 1
                single[name] += "_" not in name.strip("_")
    count = sum(map(len, vague.values()))
    print(f"{total} bindings, {count} vague ({count / total:.1%})")
    words = f"{single.total()} of one word ({single.total() / functions:.0%}), {len(vague_functions)} vague"
    print(f"{functions} functions, {words}")
    if asked.names:
        for name, places in sorted(vague.items(), key=lambda item: -len(item[1]))[:60]:
            print(f"{len(places):5d} {name:20s} {places[0]}")
        print(*vague_functions, sep="\n")


if __name__ == "__main__":
    main()
