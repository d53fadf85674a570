"""Programs that start in milliseconds: a process that has imported torch once forks them.

``python warm_start.py`` reads requests from standard input, a line of JSON each: programs that run side by side. When
all have ended it answers with the request's number and their statuses. Each program has a folder, an environment,
arguments and an output of its own, and no thread of anybody else; only what was imported is there already. The same is
true of the fork server of multiprocessing, where a program wants one.
"""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import F_DUPFD, fcntl
from itertools import count
from multiprocessing import process, util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """What programs side by side ended with, in that order, a signal negative; and all that they wrote."""

    statuses: tuple[int, ...]
    stdout: str

    @property
    def returncode(self) -> int:
        """The first status that is not 0, or 0."""
        return next((status for status in self.statuses if status), 0)


def run_new(
    python: str | Path, folder: Path, arguments: Sequence[str], environment: Environment, *, bound_s: float
) -> Ended:
    """``PYTHON ARGUMENTS`` in ``folder``, as a process in which nothing was imported before."""
    done = subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=bound_s,
        check=False,
    )
    return Ended((done.returncode,), done.stdout)


_GRACE_S = 5.0  # between asking a program to end and ending it


class WarmStart:
    """Runs programs, in threads at once if need be."""

    def __init__(self, environment: Environment, *, python: str | Path = sys.executable) -> None:
        self._server = subprocess.Popen(
            [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment)
        )
        self._folder = TemporaryDirectory()
        self._numbers = count()
        self._ended: dict[int, list[int]] = {}
        self._news = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def run(
        self, folder: Path, arguments: Sequence[str], environments: Sequence[Environment], *, bound_s: float
    ) -> Ended:
        """``python ARGUMENTS``, a script or what follows ``-m`` or ``-c``, in ``folder``, in each environment at once.

        Where one fails, the others are ended. Raises ``TimeoutExpired``.
        """
        with self._news:
            number = next(self._numbers)
            output = Path(self._folder.name, str(number))
            request = {"number": number, "arguments": arguments, "folder": str(folder), "output": str(output)}
            request |= {"environments": [dict(one) for one in environments], "bound_s": bound_s}
            assert self._server.stdin is not None, "a pipe was asked for"
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            told = self._news.wait_for(lambda: number in self._ended, bound_s + 2 * _GRACE_S)
        statuses = self._ended.pop(number) if told else None
        text = output.read_text(errors="replace") if output.exists() else ""
        if not statuses:
            raise subprocess.TimeoutExpired([sys.executable, *arguments], bound_s, text)
        return Ended(tuple(statuses), text)

    def close(self) -> None:
        """End the process that forks."""
        assert self._server.stdin is not None, "a pipe was asked for"
        self._server.stdin.close()
        self._server.wait()
        self._folder.cleanup()

    def _listen(self) -> None:
        assert self._server.stdout is not None, "a pipe was asked for"
        with self._server.stdout:
            for line in self._server.stdout:
                number, statuses = json.loads(line)
                with self._news:
                    self._ended[number] = statuses
                    self._news.notify_all()


def serve() -> None:
    """Answer requests until there are no more; each has a process of its own, which waits for the programs."""
    import pytest  # noqa: F401  # what takes long, once
    import torch._dynamo
    import torch.distributed.launcher.api  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            request = json.loads(line)
            answer = json.dumps([request["number"], _supervise(request)])
            os.write(1, f"{answer}\n".encode())
            os._exit(0)


def _supervise(request: Mapping[str, Any]) -> list[int]:
    """The programs' statuses, a signal's negative, in the order in which they ended; none where they did not."""
    running, statuses = {_forked(request, one) for one in request["environments"]}, []
    until, asked = time.monotonic() + request["bound_s"], False
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            running.remove(pid)
            statuses.append(os.waitstatus_to_exitcode(status))
        elif pid == 0:
            time.sleep(0.01)
        if (any(statuses) and not asked) or time.monotonic() > until:
            for one in running:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL if asked else signal.SIGTERM)
            late = not any(statuses)
            asked, until = True, time.monotonic() + _GRACE_S
            if late:
                statuses.append(-signal.SIGALRM)
    return [] if -signal.SIGALRM in statuses else statuses


def _forked(request: Mapping[str, Any], environment: Environment) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _become(request, environment)
        _keep_a_fork_server()
        status = _status_of(request["arguments"])
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does when its program has ended
        atexit._run_exitfuncs()
    except BaseException:  # no one type: whatever is left of a program ends here
        traceback.print_exc()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _become(request: Mapping[str, Any], environment: Environment) -> None:
    """Take the program's folder, environment and output."""
    os.chdir(request["folder"])
    process.ORIGINAL_DIR = request["folder"]  # type: ignore[attr-defined]  # what it was when that was imported
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


_MANY = 64  # from this descriptor on nobody has any
_MOST_BYTES = 1 << 20


def _keep_a_fork_server() -> None:
    """Fork now what becomes multiprocessing's fork server when this program starts one, before it has any thread.

    A new one would import torch again. It gets what a new one would: its command, environment, folder and descriptors.
    """
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        _serve_forks(theirs)
    theirs.close()
    start = util.spawnv_passfds

    def started(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in str(arguments[-1]) or ours.fileno() < 0:
            return start(path, arguments, descriptors)
        masked = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))]
        request = [arguments[-1], dict(os.environ), os.getcwd(), masked, descriptors]
        socket.send_fds(ours, [json.dumps(request).encode()], descriptors)
        ours.close()
        return pid

    util.spawnv_passfds = started


def _serve_forks(asked: socket.socket) -> None:
    """Wait for the command of a fork server, and be that; where none comes, end."""
    request, received, *_ = socket.recv_fds(asked, _MOST_BYTES, 8)
    status = 0
    if request:
        command, environment, folder, masked, descriptors = json.loads(request)
        moved = [fcntl(one, F_DUPFD, _MANY) for one in received]
        os.closerange(3, _MANY)
        for one, wanted in zip(moved, descriptors, strict=True):
            os.dup2(one, wanted, inheritable=True)
            os.close(one)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[0], sys.argv = "", ["-c"]
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        try:
            exec(command, {"__name__": "__main__"})
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:  # no one type: this process ends here
            traceback.print_exc()
            status = 1
    os._exit(status)


def _status_of(arguments: Sequence[str]) -> int:
    """What ``python ARGUMENTS`` ends with."""
    sys.path[0] = ""
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], sys.modules["__main__"].__dict__)
        else:
            sys.argv, sys.path[0] = list(arguments), str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except KeyboardInterrupt:
        return -signal.SIGINT
    return 0


if __name__ == "__main__":
    serve()
