"""Schedules and programs in files: torch's CSV, read whole or refused in a sentence that names the file."""

from pathlib import Path

from pipeline.lower import Program, read_csv
from pipeline.schedule import Schedule, ScheduleError

_MOST_BYTES = 1 << 29  # some forty million actions


def is_csv(name: str | Path) -> bool:
    """Whether ``name`` means a file, not a family."""
    return Path(name).suffix.lower() == ".csv"


def read_file(path: str | Path) -> Schedule | Program:
    """What the file says: a program where it holds any message, else a schedule. Laws are not checked here.

    UTF-8, with or without a byte order mark; any line ends. Raises ``ScheduleError`` that names the file.
    """
    text = _text(Path(path))
    try:
        return read_csv(text, name=Path(path).name)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # reading a pipe may never end
            raise OSError("it is no regular file")
        if path.stat().st_size > _MOST_BYTES:
            raise OSError(f"it has more than {_MOST_BYTES >> 20} MiB, which no schedule needs")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at {error.start} is not UTF-8; save it as comma-separated text"
        raise ScheduleError(f"cannot read {path}: {found} in UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise ScheduleError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
