"""The line that has to be changed is in the text of the verdict, and every line that is shown is the user's own."""

import json
from pathlib import Path
from typing import Any

import pytest
from truth_lines import FAULTS, Fault, shown, verdict

from pipeproof.worlds.world import World
from tests.support.json_schema import OURS, complaints
from tests.support.sweeps import sampled


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", sampled([one for one in FAULTS if not one.hangs], 2), ids=lambda fault: fault.name)
def test_a_verdict_shows_the_line_of_a_fault(
    fault: Fault, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    told = verdict(fault, world, tmp_path)
    assert " ".join(cause.kind for cause in told.causes) == fault.named, told
    lines = shown(told.details, fault)
    assert (bool(lines & fault.lines), bool(lines & fault.expected)) == (fault.call is None, fault.call != ""), told
    source = fault.source.splitlines()
    for own in (own for cause in told.causes for own in cause.lines if own.line.file.startswith(str(tmp_path))):
        assert source[own.line.number - 1].strip() == own.line.text
    assert all(len(cause.lines) <= 5 for cause in told.causes)
    causes: Any = json.loads(json.dumps(told.as_dict()["causes"]))
    assert not [said for one in causes for said in complaints(one, OURS["$defs"]["cause"], root=OURS)]
