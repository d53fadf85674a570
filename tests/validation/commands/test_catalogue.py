"""The catalogue at work: what is run where, and what a reader sees of it."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pipeproof.commands import catalogue
from pipeproof.commands.campaign import Setting
from pipeproof.commands.catalogue import try_all
from pipeproof.commands.ending import AskedToEnd
from pipeproof.commands.outputs import Outputs
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.faults import SpecimenError
from pipeproof.wings.simulated import Simulation
from pipeproof.wings.specimens import CATALOGUE, CONTROLS
from pipeproof.wings.specimens.choice import choose, load
from pipeproof.wings.specimens.mixed import RIGHT
from pipeproof.wings.specimens.tables import listing
from pipeproof.wings.specimens.trial import Named, Trial
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.typed import Typed
from tests.validation.wings.specimens.test_trial import TRIAL

OWN_RACE = """
import torch
import torch.distributed as dist

from pipeproof.wings.specimens import Fault, Needs, Specimen, register
from pipeproof.wings.specimens.planting import on_work
from pipeproof.pipeline.transports import Transport


def used(parts):
    buffer, other = torch.ones(1), 1 - parts.transport.rank
    if parts.transport.rank == 0:
        dist.send(buffer, other, tag=10**6)
    else:
        work = dist.irecv(buffer, other, tag=10**6)
        assert buffer.sum() > 0
        work.wait()
    parts.gradients.reduce_tied()


register(
    Specimen(
        name="own-race",
        summary="a number is used before it has come",
        origin="ours",
        classes=("tI",),
        fault=Fault("read-before-wait", "read-before-wait", stage=lambda n_stages: 1),
        needs=Needs(ranks=2, models=("mlp",), transports=(Transport.UNLIMITED,)),
        plant=on_work(reduce=used),
    )
)
"""


def tried(names: list[str], file: Path, simulation: Simulation | None = None) -> int:
    with Outputs.open("mutate", {"json": str(file)}) as outputs:
        return try_all(names, [], Setting("cpu", outputs=outputs, simulation=simulation))


def test_steps_by_hand_are_on_the_cpu_and_of_one_size(typed: Typed) -> None:
    for refused in ({"device": "cuda"}, {"device": "cpu", "shrinks": True}):
        with pytest.raises(
            SpecimenError, match="'never-unscaled' is a step by hand, on the CPU and of one size: plant"
        ):
            choose("never-unscaled", **refused)  # type: ignore[arg-type]
    golden(listing(["never-unscaled"]))
    assert try_all(["never-unscaled"], ["1f1b"], Setting("cpu")) == 1, "nothing was tried"
    golden(typed.said())


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_steps_by_hand_are_tried_beside_cases(tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "x.json"
    assert tried(["never-unscaled", "stage-negated"], file) == 0
    golden(typed.said())
    written = documented(file.read_text())["specimens"]
    assert [one["specimen"] for one in written] == ["stage-negated", "never-unscaled"]


def test_races_are_tried_under_seeds_and_written_down(tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "x.json"
    assert tried(["polled-once", "both-send-first"], file, Simulation(count=20)) == 0
    golden(typed.said())
    written = documented(file.read_text())["specimens"]
    assert [(one["specimen"], one["transport"]) for one in written] == [
        (name, transport) for name in ("polled-once", "both-send-first") for transport in ("unlimited", "pair")
    ]
    assert [int(one["seed"]) > 0 for one in written] == [True, True, False, False], "who polls may be lucky"
    lucky = Setting("cpu", simulation=Simulation(count=1))
    assert try_all(["polled-once"], [], lucky) == 1, "under one seed it goes well"


def test_a_race_of_ones_own(tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "own_race.py"
    file.write_text(OWN_RACE)
    assert load(str(file)) == ["own-race"]
    try:
        assert try_all(["own-race"], [], Setting("cpu", simulation=Simulation(count=20))) == 0
        assert "read-before-wait" in typed.said()
        assert try_all(["own-race"], [], Setting("cpu")) == 1, "nothing was tried"
        said = "left out, needs --world simulated --transport gloo: own-race on naive"
        assert said in typed.said()
    finally:
        CATALOGUE.unload(file)


@pytest.mark.pipeproof_ranks
def test_specimens_are_tried_and_written_down(tmp_path: Path, typed: Typed) -> None:
    names, file = ["stage-negated", "backward-missing"], tmp_path / "x.json"
    assert tried(names, file) == 0
    golden(typed.said())
    written = documented(file.read_text())
    assert [one["specimen"] for one in written["specimens"]] == names
    assert [one["recorded"]["kind"] for one in written["specimens"]] == ["sign", "order"]


def test_what_is_not_caught_or_named_wrong_is_no_success_and_what_does_not_apply_is_said(
    monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    wrong = Named("sign", False, False, 0.1)
    for trial in (replace(TRIAL, laws=()), replace(TRIAL, recorded=wrong), replace(TRIAL, final=wrong)):

        def tried(case: Case, world: World, *, record: bool, trial: Trial = trial) -> Trial:
            return trial

        monkeypatch.setattr("pipeproof.wings.specimens.choice.try_out", tried)
        assert try_all(["weight-half-dropped"], ["zb-h1"], Setting("cpu")) == 1
    assert try_all(["weight-half-dropped"], ["gpipe", "1f1b"], Setting("cpu")) == 1, "nothing was tried"
    golden(typed.said())


def test_an_interruption_says_how_many_were_not_tried(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    answers = iter([TRIAL])

    def tried(case: Case, world: World, *, record: bool) -> Trial:
        if (trial := next(answers, None)) is None:
            raise AskedToEnd(signal.SIGINT)
        return trial

    monkeypatch.setattr("pipeproof.wings.specimens.choice.try_out", tried)
    with pytest.raises(AskedToEnd):
        try_all(["stage-negated", "layernorm-zero", "clip-twice"], [], Setting("cpu"), final_only=True)
    golden(typed.said())


def test_a_false_alarm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Verdict("", "fail", "none", ())
    monkeypatch.setattr(catalogue, "validate_case", lambda case, world, measure: (failed, None))
    monkeypatch.setattr("pipeproof.wings.specimens.mixed.validate_mixed", lambda case, world: failed)
    said, _count = catalogue._controls(World(), Setting("cpu")), len(CONTROLS) + len(RIGHT)
    golden(said)
