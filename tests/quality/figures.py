"""Figures of the house, which only ever go down: ``python tests/quality/figures.py`` keeps those that did."""

import ast
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.support.sources import OURS, Source, imported, sources, without_type_checking

KEPT = Path(__file__).with_name("figures.json")
SMALL = 40  # lines
SENTENCE = 4  # words
DOORS = (
    "validation",
    "validation.whitebox",
    "validation.whitebox.validator",
    "validation.records.step_check",
    "validation.commands.cli",
)

Figures = dict[str, int]


def figures(ours: Sequence[Source], tests: Iterable[Source]) -> Figures:
    """All of them by name."""
    graph = Graph(ours)
    doors = {f"modules that {door} loads": len(graph.loads(door)) for door in DOORS if door in graph.modules}
    return {
        **lines(ours),
        "small files": sum(_lines(one) < SMALL and not one.path.endswith("__init__.py") for one in ours),
        "numeric constants": sum(map(constants, ours)),
        "longest import chain": graph.longest,
        **doors,
        "asserts with a sentence": sum(map(sentences, tests)),
    }


def lines(ours: Iterable[Source]) -> Figures:
    """Lines of validation, and of each room: a folder of it, a folder of its wings, or a package beside it."""
    found: Figures = {}
    for one in ours:
        top, *folders = one.path.split("/")[:-1]
        depth = 2 if folders[:1] == ["wings"] else 1
        room = "/".join([top, *folders[:depth]])
        for name in {top, room}:
            found[f"lines of {name}"] = found.get(f"lines of {name}", 0) + _lines(one)
    return found


def _lines(source: Source) -> int:
    return source.text.count("\n")


def constants(source: Source) -> int:
    """Names of a module that are bound to a bare number: thresholds and counts."""
    bound = (one.value for one in source.tree.body if isinstance(one, ast.Assign | ast.AnnAssign))
    return sum(isinstance(one, ast.Constant) and type(one.value) in (int, float) for one in bound)


def sentences(source: Source) -> int:
    """Asserts that hold a text of so many words, so that wording cannot be mended without them."""
    return sum(
        any(
            isinstance(part, ast.Constant) and isinstance(part.value, str) and len(part.value.split()) >= SENTENCE
            for part in ast.walk(one.test)
        )
        for one in source.nodes
        if isinstance(one, ast.Assert)
    )


class Graph:
    """Which module imports which as it is loaded: not inside a function, nor for types alone."""

    def __init__(self, ours: Iterable[Source]) -> None:
        self.modules = {one.module: one for one in ours}
        self._imports: dict[str, set[str]] = {}

    def imports(self, module: str) -> set[str]:
        """The modules of ours that ``module`` imports."""
        if module not in self._imports:
            source = without_type_checking(self.modules[module])
            inside = {id(node) for function in source.functions for node in ast.walk(function)}
            late = {node.lineno for node in source.nodes if isinstance(node, ast.stmt) and id(node) in inside}
            found = {name for line, name in imported(source, self.modules) if line not in late}
            self._imports[module] = found & self.modules.keys()
        return self._imports[module]

    def loads(self, door: str) -> set[str]:
        """All that is loaded where ``door`` is imported."""
        found, todo = set[str](), [door]
        while todo:
            module = todo.pop()
            if module in self.modules and module not in found:
                found.add(module)
                parts = module.split(".")
                todo += [*self.imports(module), *(".".join(parts[:count]) for count in range(1, len(parts)))]
        return found

    @property
    def longest(self) -> int:
        """How many modules the longest chain of imports has."""
        sys.setrecursionlimit(10_000)

        @cache
        def below(module: str) -> int:
            return 1 + max(map(below, self.imports(module)), default=0)

        return max(map(below, self.modules), default=0)


def kept() -> Figures:
    """Those that the house had at best."""
    return json.loads(KEPT.read_text())


def grown(now: Mapping[str, int], before: Mapping[str, int]) -> list[str]:
    """Which figures are larger than they were; a room that is new takes its lines from validation's."""
    return [f"{name}: {now[name]}, at most {most}" for name, most in before.items() if now.get(name, 0) > most]


def main() -> None:
    """Keep what is smaller than before."""
    now = figures(OURS, sources("tests"))
    before = kept() if KEPT.exists() else now
    least = {name: min(count, before.get(name, count)) for name, count in now.items()}
    KEPT.write_text(json.dumps(least, indent=1) + "\n")
    sys.stdout.write("\n".join([f"{name:<50} {count:>7}" for name, count in now.items()] + grown(now, before)) + "\n")


if __name__ == "__main__":
    main()
