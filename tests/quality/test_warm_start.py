"""What is started from a warm process is as alone as any program, and its end is told."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm_start import Ended, WarmStart


def run(warm_start: WarmStart, folder: Path, *arguments: str, ranks: int = 1, bound_s: float = 60) -> Ended:
    return warm_start.run(folder, arguments, [{"RANK": str(rank)} for rank in range(ranks)], bound_s=bound_s)


@pytest.mark.sweep
def test_a_program_has_its_folder_environment_arguments_and_output(warm_start: WarmStart, tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), sorted(os.environ), sys.argv, input, __name__); sys.stderr.write('err')"
    (tmp_path / "script.py").write_text(code)
    observed = f"{tmp_path} ['RANK'] ['{{}}', 'a b'] {input} __main__\n"
    for arguments in (["script.py"], ["-c", code], ["-m", "script"]):
        done = run(warm_start, tmp_path, *arguments, "a b")
        assert done.statuses == (0,)
        name = {"-m": str(tmp_path / "script.py")}.get(arguments[0], arguments[0])
        assert sorted([observed.format(name), "err"]) == sorted(["".join(done.stdout.split("err")), "err"]), done.stdout


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('why')", 1),
        ("raise ValueError", 1),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_a_status_is_that_of_a_new_python(warm_start: WarmStart, tmp_path: Path, code: str, status: int) -> None:
    done = run(warm_start, tmp_path, "-c", code)
    assert done.returncode == status, done.stdout
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == status


@pytest.mark.sweep
def test_where_one_fails_the_others_are_ended(warm_start: WarmStart, tmp_path: Path) -> None:
    code = "import os, sys, time; sys.exit(5) if os.environ['RANK'] == '1' else time.sleep(60)"
    assert sorted(run(warm_start, tmp_path, "-c", code, ranks=3).statuses) == [-signal.SIGTERM, -signal.SIGTERM, 5]


def test_what_does_not_end_is_ended_by_the_bound(warm_start: WarmStart, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(warm_start, tmp_path, "-c", "import time; time.sleep(60)", bound_s=0.2)


SERVED = """
import multiprocessing, os, sys

def told(pipe):
    pipe.send((os.environ["NEW"], os.environ.get("OLD"), os.getcwd(), "torch" in sys.modules, os.getppid()))

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    os.environ["NEW"], (ours, theirs) = "new", context.Pipe()
    del os.environ["OLD"]
    os.chdir("/")
    child = context.Process(target=told, args=(theirs,))
    child.start()
    theirs.close()
    *found, parent = ours.recv()
    print(found == ["new", None, "/", True], parent != os.getpid())
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.sweep
def test_a_fork_server_is_warm_too_and_has_what_a_new_one_has(warm_start: WarmStart, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SERVED)
    done = warm_start.run(tmp_path, ["script.py"], [{"OLD": "old"}], bound_s=60)
    assert (done.returncode, done.stdout) == (0, "True True\n")
