"""Read files whole, or refuse them in a sentence with the file's name: torch's CSV, and JSON."""

import io
import json
import sys
from pathlib import Path
from typing import Any, BinaryIO

from pipeproof.pipeline.program import Program, read_csv
from pipeproof.pipeline.schedule import Schedule, ScheduleError

_MOST_BYTES = 1 << 29  # some forty million actions


def is_csv(name: str | Path) -> bool:
    """True if ``name`` means a file, not a family."""
    return Path(name).suffix.lower() == ".csv"


def cannot_read(path: object, error: Exception) -> str:
    """A sentence for an unreadable file, with a cure if the system's own words lack one."""
    if isinstance(error, FileNotFoundError):
        return f"no such file: {path}"
    why = getattr(error, "strerror", None)
    return f"cannot read {path}: {f'{why}; give a file that is there and may be read' if why else error}"


def open_regular(path: Path) -> BinaryIO:
    """Open a file, to read its bytes. Raises ``OSError`` for a pipe or a device: reading may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is no regular file")
    return path.open("rb")


def read_file(path: str | Path) -> Schedule | Program:
    """Read a program if the file holds any message, else a schedule. Laws are not checked here.

    ``-`` is standard input. UTF-8, with or without a byte order mark; any line ends. Raises ``ScheduleError`` with the
    file's name.
    """
    source = "standard input" if path == "-" else path
    if path == "":
        raise ScheduleError("cannot read a file whose name is empty; give it one, or - for standard input")
    text = _text(source, Path(path))
    try:
        return read_csv(text, name=Path(source).name)
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None


def read_json(path: str | Path, *, expected: str, once: bool = True) -> dict[str, Any]:
    """Read the object in a JSON file, each key ``once``. Raises ``ScheduleError`` with the ``expected`` content."""
    if path == "":
        raise ScheduleError(f"cannot read a file whose name is empty: expected {expected}")
    try:
        found = json.loads(_bytes(Path(path)), object_pairs_hook=_once if once else None)
    except OSError as error:
        raise ScheduleError(f"{cannot_read(path, error)}; expected {expected}") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{path} is no JSON, and no text in UTF-8: expected {expected}") from None
    except (ValueError, RecursionError) as error:  # also of a name with a null character
        raise ScheduleError(f"{path} is no JSON ({error}): expected {expected}") from None
    if not isinstance(found, dict):
        raise ScheduleError(f"{path} holds no object: expected {expected}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is said twice")
    return found


def _text(source: str | Path, path: Path) -> str:
    try:
        return io.StringIO(_bytes(path).decode("utf-8-sig"), newline=None).read()
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at {error.start} is not UTF-8; save it as comma-separated text"
        raise ScheduleError(f"cannot read {source}: {found} in UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise ScheduleError(cannot_read(source, error)) from None


def _bytes(path: Path) -> bytes:
    """Read a regular file or, for ``-``, standard input, up to the most that a schedule can need."""
    if path == Path("-"):
        if sys.stdin is None:
            raise OSError("it is closed")
        data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        size = len(data)
    else:
        if path.is_dir():
            raise OSError("it is a directory (- reads standard input)")
        if path.exists() and not path.is_file():  # reading a pipe may never end
            raise OSError("it is no regular file (- reads standard input)")
        size = path.stat().st_size
        data = path.read_bytes() if size <= _MOST_BYTES else b""
    if size > _MOST_BYTES:
        raise OSError(f"it has more than {_MOST_BYTES >> 20} MiB, which no schedule needs")
    return data
