"""``ci/accelerator``: does what holds on a CPU hold on this machine's accelerator? At most 8 minutes.

Each part runs in a process of its own, which is ended at its bound; what it had found by then counts. Time that a part
leaves is the next ones'. Results are written as they come. It needs python, torch, numpy and the checkout: what else a
part needs it says, and is not run without.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from accelerator_result import PartResult, Result, Row, failing, merged, section

_WHOLE_S = 480  # the parts' bounds together, with some for what is between them
_LOOK_S = 0.2  # how often to look for new rows
_LOG = 60  # lines that are kept of what a part that broke has printed
_TRACEBACK = "Traceback (most recent call last):\n"
_LAST_S = 5.0  # for a process that was ended to be gone
_STATUS = (
    "Exit status: 0 nothing is wrong, in what ran; 1 a right schedule failed, a planted fault passed, or a part broke; "
    "2 bad usage; 130 interrupted."
)


def main() -> int:
    """Run the parts that were asked for; returns the exit status."""
    if missing := [name for name in ("torch", "numpy") if find_spec(name) is None]:
        told = f"{sys.executable} has no {missing[0]}: point PYTHON at a python with torch and numpy"
        print(f"ci/accelerator: {told}", file=sys.stderr)
        return 2
    from accelerator_parts import PARTS, Wanted  # torch comes with it

    options = _options(PARTS)
    wanted = Wanted(options.device, options.cases, options.rounds, options.schedules)
    out = Folder(options.out)
    result, began, planned = Result(_machine(options.device)), time.monotonic(), 0.0
    print(f"# {', '.join(f'{name} {value}' for name, value in result.machine.items())}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends the part's ranks with it
    try:
        for name in options.parts:
            part = PARTS[name]
            planned += part.bound_s * options.bound / _WHOLE_S
            done, blank = result, PartResult(name, part.title)
            show = lambda now, done=done: out.write(replace(done, parts=[*done.parts, now]))  # noqa: E731
            found = carried_out(blank, wanted, began + planned, show)
            result = replace(result, parts=[*result.parts, found])
            print(f"\n{section(found)}\n\n{found.told} ({found.seconds:.0f} s)", *found.log, sep="\n", flush=True)
            out.write(result)
    except KeyboardInterrupt:
        return 130
    return _ended(result)


def _ended(result: Result) -> int:
    """Say all that is wrong once more; the exit status."""
    wrong = [line for part in result.parts for line in failing(part)]
    short = [f"{part.name} {part.ended}" for part in result.parts if part.ended != "done"]
    print("\n" + "\n".join([*wrong, f"{len(wrong)} wrong" + (f"; {', '.join(short)}" if short else "")]))
    return result.status


class Folder:
    """Where results go, whole at any time; nowhere if no folder was named."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None:
            self._path.mkdir(parents=True, exist_ok=True)

    def write(self, result: Result) -> None:
        """Put ``result`` there as Markdown and JSON."""
        if self._path is not None:
            for name, text in (("md", result.markdown()), ("json", json.dumps(result.as_json(), indent=1) + "\n")):
                new = self._path / f"accelerator.{name}.new"
                new.write_text(text)
                new.replace(self._path / f"accelerator.{name}")


def carried_out(part: PartResult, wanted: object, deadline_s: float, show: Callable[[PartResult], None]) -> PartResult:
    """The part as its process carried it out, by the deadline (of ``time.monotonic``); ``show`` has it meanwhile."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:  # also for what the process would leave behind when it is ended
        rows, errors = Path(folder, "rows"), Path(folder, "errors")
        rows.touch()
        arguments = [part.name, str(rows), json.dumps(asdict(wanted))]  # type: ignore[call-overload]
        with errors.open("w") as stderr:
            child = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("accelerator_child.py")), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, "TMPDIR": folder},
                start_new_session=True,
            )
            try:
                while child.poll() is None and time.monotonic() < deadline_s:
                    part = replace(part, rows=rows_in(rows)[0], seconds=time.monotonic() - began)
                    show(part)
                    time.sleep(_LOOK_S)
                cut_off = child.poll() is None
            finally:
                _end(child)
        found, last = rows_in(rows)
        part = replace(part, rows=found, seconds=time.monotonic() - began)
        if last is not None:
            return replace(part, ended=last["ended"], reason=last["reason"])
        if cut_off:
            return replace(part, ended="cut off", reason=f"after {part.seconds:.0f} s")
        said = errors.read_text(errors="replace")
        reason = raised(said) or f"status {child.returncode}"
        return replace(part, ended="broken", reason=reason, log=said.splitlines()[-_LOG:])


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the process and the ranks that it started: they are one group."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait(_LAST_S)


def rows_in(path: Path) -> tuple[list[Row], dict[str, str] | None]:
    """The rows so far, and the last line if the part ended by itself; a line that is not whole yet is none."""
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    last = lines.pop() if lines and "ended" in lines[-1] else None
    return merged([Row(**line) for line in lines]), last


def raised(text: str) -> str:
    """What the last traceback in ``text`` ends with, or nothing; the first line, for what is raised may be a page."""
    lines = iter(text.rpartition(_TRACEBACK)[2].splitlines())
    return next((line for line in lines if line and not line.startswith((" ", "\t"))), "") if _TRACEBACK in text else ""


def _machine(device: str) -> dict[str, str]:
    import torch

    from pipeproof.worlds import accelerator

    return {
        "device": accelerator.title(device),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }


def _options(parts: Sequence[str]) -> argparse.Namespace:
    from pipeproof.own.case import SCHEDULES
    from pipeproof.pipeline.schedules import list_known
    from pipeproof.worlds import accelerator

    about = "\n".join(__doc__.splitlines())
    parser = argparse.ArgumentParser(
        prog="ci/accelerator",
        description=about,
        epilog=f"parts: {', '.join(parts)}\n\n{_STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = "a type that torch names: cuda, cpu, ... (default auto: the accelerator if there is one)"
    parser.add_argument("--device", type=accelerator.parse_device, default=accelerator.AUTO, metavar="TYPE", help=where)
    parser.add_argument("--out", metavar="DIR", help="a folder for accelerator.md and accelerator.json")
    parser.add_argument("--parts", default=",".join(parts), metavar="NAME,...", help="these parts alone")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), metavar="NAME,...", help="these schedules alone")
    parser.add_argument(
        "--bound", type=_number, default=_WHOLE_S, metavar="SECONDS", help=f"for all parts (default: {_WHOLE_S})"
    )
    parser.add_argument("--cases", type=_number, default=100, metavar="N", help="how many are drawn (default: 100)")
    parser.add_argument("--rounds", type=_number, default=10, metavar="N", help="how often what is timed takes turns")
    options = parser.parse_args()
    for option, known in (("parts", parts), ("schedules", SCHEDULES)):
        names = [name.strip() for name in getattr(options, option).split(",")]
        for name in names:
            if name not in known:
                parser.error(f"--{option}: unknown {option[:-1]} {name!r}: {list_known(name, list(known))}")
        setattr(options, option, names)
    if options.device == accelerator.AUTO:
        options.device = accelerator.detect()
    if why := accelerator.absence(options.device):
        parser.error(f"--device {options.device}: {why}; `ci/accelerator --device cpu` runs on the processor")
    try:
        Folder(options.out)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}; name a folder that can be written")
    return options


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
