"""What was built for a device, run on pytorch's openreg, whose memory the host cannot touch; `ci/openreg` runs it.

openreg copies at once and computes on the host whatever it is given, so it shows no race, and no tensor that is on
another device. It has no attention.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeproof.wings.specimens import DEVICE_CONTROLS
from tests.support.devices import CHECKED, on_device, trials

pytestmark = [
    pytest.mark.long,
    pytest.mark.pipeproof_ranks,
    pytest.mark.skipif(find_spec("torch_openreg") is None, reason="torch_openreg is not installed; see ci/openreg"),
]
SHOWN = ("left-on-the-host", "device-read-by-the-host")


def test_every_schedule_is_right_there_through_the_host(tmp_path: Path) -> None:
    shape = ("--ranks", "2", "--microbatches", "4", "--layers", "4", "--model", "mlp")
    ran = on_device(tmp_path, "-m", "pipeproof", "validate", "--schedule", "all", "--device", "openreg", *shape)
    assert ran.returncode == 0, ran.stdout
    passed, right = ran.stdout.splitlines()[-1].split(" pass; ")
    assert right == f"{passed} of {passed} bit for bit"
    assert int(passed) >= 11


def test_a_fault_is_named_there(tmp_path: Path) -> None:
    line = "1f1b r2 s2 m4 model=mlp plan=train specimen=microbatches-swapped device=openreg"
    ran = on_device(tmp_path, "-m", "pipeproof", "replay", line)
    assert ran.returncode == 1, ran.stdout
    assert "cause     swapped-data: " in ran.stdout


def test_the_host_cannot_touch_its_memory(tmp_path: Path) -> None:
    command = ("-m", "pipeproof", "mutate", "--device", "openreg", "--json", "found.json", "--only", ",".join(SHOWN))
    ran = on_device(tmp_path, *command)
    assert ran.returncode == 0, ran.stdout
    assert {name for name, one in trials(tmp_path / "found.json").items() if one["recorded"]["located"]} == {*SHOWN}


def test_asynchronous_copies_through_pinned_memory_are_right(tmp_path: Path) -> None:
    (name,) = DEVICE_CONTROLS
    ran = on_device(tmp_path, "-m", "pipeproof", "replay", f"gpipe r2 s2 m4 model=mlp device=openreg specimen={name}")
    assert ran.stdout.endswith("1 pass; 1 of 1 bit for bit\n"), ran.stdout


def test_a_running_job_is_checked_there(tmp_path: Path) -> None:
    (tmp_path / "checked.py").write_text(CHECKED)
    ran = on_device(tmp_path, "checked.py", "openreg")
    assert "PASS 36 comparisons, bitwise" in ran.stdout, ran.stdout
