"""A framework that has what its adapter uses, for what needs none."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch, package: str, version: str, contents: Mapping[str, Any]) -> None:
    """Let it be found for one test, with ``contents`` of its modules, and with the packages that these lie in."""
    monkeypatch.setitem(sys.modules, package.partition(".")[0], ModuleType(package))
    for name, values in {"": {"__version__": version}, **contents}.items():
        parts = f"{package}.{name}".rstrip(".").split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if end == len(parts) or path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[".".join(parts)]).update(values)
