"""What a user names in text: ``module:name``, or ``file.py:name``. Nothing is imported before it is asked for."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeproof.pipeline.files import cannot_read
from pipeproof.pipeline.schedules import nearest

EXPECTED = '"module:function" or "path/to/file.py:function"'
_PLACE = re.compile(r"(?P<home>[^:\s]+):(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class PlaceError(ValueError):
    """A place where nothing is."""


def is_place(value: object) -> bool:
    """Whether it is a text that names a place."""
    match = _PLACE.fullmatch(value) if isinstance(value, str) else None
    return match is not None and (match["home"].endswith(".py") or bool(_MODULE.fullmatch(match["home"])))


def find_place(place: str, folder: Path, said: str) -> Any:
    """What is at ``place``, looked for from ``folder`` on. Raises ``PlaceError`` that begins with what was ``said``."""
    match = _PLACE.fullmatch(place)
    assert match is not None, "whoever asks has seen that it is a place"
    found: Any = _import(match["home"], folder, said)
    for name in match["name"].split("."):
        if not hasattr(found, name):
            hint = nearest(name, [one for one in vars(found) if one[0] != "_"]) or "give a name that it has"
            raise PlaceError(f"{said}: {match['home']} has no {name}: {hint.rstrip()}")
        found = getattr(found, name)
    return found


def call(given: Any, said: str) -> Any:
    """What ``given`` makes without arguments, with random numbers from seed 0; itself where it is no function."""
    if not callable(given):
        return given
    from pipeproof.worlds.settings import drawing_apart  # torch comes with it

    try:
        with drawing_apart(0):
            return given()
    except Exception as error:  # the user's own code
        raise _raised(f"{said}: calling it without arguments", error) from error


def _import(home: str, folder: Path, said: str) -> ModuleType:
    """The module, by its name or by its file; as pytest does, its folder is then one to import from."""
    name, roots, path = home, [folder], (folder / home).resolve()
    if home.endswith(".py"):
        if not path.is_file():
            raise PlaceError(f"{said}: {cannot_read(home, FileNotFoundError())}; paths are from {folder}")
        root = next(one for one in path.parents if not (one / "__init__.py").exists())
        name, roots = ".".join(path.relative_to(root).with_suffix("").parts), [folder, root]
    sys.path[:0] = [str(one) for one in roots if str(one) not in sys.path]
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise PlaceError(f"{said}: {home} cannot be imported: {error}; install what it needs") from None
        raise PlaceError(f"{said}: there is no module {name}: install it, or give its file, {name}.py") from None
    except (Exception, SystemExit) as error:  # the user's own code
        raise _raised(f"{said}: importing {home}", error) from error
    there = getattr(found, "__file__", None)
    if home.endswith(".py") and (there is None or Path(there).resolve() != path):
        raise PlaceError(f"{said}: another module is called {name}: rename the file, or give its module's full name")
    return found


def _raised(what: str, error: BaseException) -> PlaceError:
    from pipeproof.core.verdict import describe_error

    return PlaceError(f"{what} raised {describe_error(error)}; mend that first")
