"""The catalogue at work: what is run where, and what a reader sees of it."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pipeproof.cases.case import SCHEDULES, Case
from pipeproof.cases.mixed import specimens as mixed
from pipeproof.cases.mixed.specimens import MIXED
from pipeproof.cases.specimens import CONTROLS, IN_SIMULATION, ON_DEVICES, PLUGINS, SPECIMENS, SpecimenError
from pipeproof.cases.trial import Named, Trial
from pipeproof.commands import catalogue
from pipeproof.commands.campaign import Setting
from pipeproof.commands.catalogue import (
    IN_SIMULATION_COLUMNS,
    chosen,
    line,
    listing,
    loaded,
    tries_on,
    try_all,
)
from pipeproof.commands.ending import AskedToEnd
from pipeproof.commands.outputs import Outputs
from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.transports import Transport
from pipeproof.worlds.simulation import Simulation
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.validation.cases.test_trial import RIGHT, TRIAL

OWN_RACE = """
import torch
import torch.distributed as dist

from pipeproof.cases.specimens import Fault, Needs, Specimen, register
from pipeproof.cases.specimens.planting import on_work
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


def test_a_line_says_what_was_caught_named_and_placed() -> None:
    unknown = replace(TRIAL, recorded=Named(None, False, False, 0.1), final=RIGHT)
    missed = replace(TRIAL, laws=("grad-norm",), recorded=Named("sign", False, False, 0.1))
    golden("\n".join(map(line, (TRIAL, unknown, missed, replace(TRIAL, laws=())))), exact=True)


def test_in_a_narrow_terminal_columns_are_left_out_before_names_are_cut() -> None:
    kind = "swapped-activations"
    long = replace(TRIAL, specimen=max(SPECIMENS, key=len), planted=kind, recorded=Named(kind, True, True, 0.1))
    for width in range(51, 150):
        text = line(long, width)
        assert len(text) <= width
        assert text.startswith(f"{long.specimen} ")
        assert text.split()[-1] in (kind, "right", "s", "-"), "nothing is cut"
    assert line(long, 51).split() == [long.specimen, kind], "what was planted, and what it was taken for"
    assert len(line(long, 20)) == 20


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_most_specimens_apply_to_every_schedule(schedule: str) -> None:
    tries, left_out = tries_on(SPECIMENS, [schedule])
    assert {case.specimen for case, _ in tries} | {name for name, _ in left_out} == set(SPECIMENS)
    assert len(tries) >= 100
    assert all(why.startswith("needs ") for why in left_out.values())


def test_the_list_has_a_line_for_each_specimen() -> None:
    lines = listing(SPECIMENS).splitlines()
    assert [text.split()[0] for text in lines] == list(SPECIMENS)
    (alone,) = listing(["tied-not-reduced"]).splitlines()
    one = SPECIMENS["tied-not-reduced"]
    for word in ("tied tE,mC", one.fault.kind, one.smallest, one.summary, one.origin):
        assert word in alone


def test_names_are_chosen_or_refused() -> None:
    assert chosen("", device="cpu") == [*SPECIMENS, *MIXED]
    assert chosen("", device="cpu", shrinks=True) == list(SPECIMENS)
    assert chosen("", device="cuda") == [*SPECIMENS, *ON_DEVICES]
    assert chosen("clip-twice, clip-never", device="cpu") == ["clip-twice", "clip-never"]
    with pytest.raises(SpecimenError, match="unknown specimen 'gremlin': pipeproof specimens --list prints all"):
        chosen("clip-twice,gremlin", device="cuda")
    assert chosen("other-device", device="cuda") == ["other-device"]
    with pytest.raises(SpecimenError, match="'other-device' needs a device other than the CPU: name its type with"):
        chosen("other-device", device="cpu")


def test_steps_by_hand_are_on_the_cpu_and_of_one_size(capsys: pytest.CaptureFixture[str]) -> None:
    for refused in ({"device": "cuda"}, {"device": "cpu", "shrinks": True}):
        with pytest.raises(
            SpecimenError, match="'never-unscaled' is a step by hand, on the CPU and of one size: plant"
        ):
            chosen("never-unscaled", **refused)  # type: ignore[arg-type]
    golden(listing(["never-unscaled"]))
    assert try_all(["never-unscaled"], ["1f1b"], Setting("cpu")) == 1, "nothing was tried"
    golden(capsys.readouterr().out)


@pytest.mark.pipeproof_ranks
def test_steps_by_hand_are_tried_beside_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    assert try_all(["never-unscaled", "stage-negated"], [], Setting("cpu", outputs=Outputs(str(file)))) == 0
    golden(capsys.readouterr().out)
    written = documented(file.read_text())["specimens"]
    assert [one["specimen"] for one in written] == ["stage-negated", "never-unscaled"]


def test_races_are_chosen_where_ranks_are_simulated() -> None:
    assert chosen("", device="cpu", simulated=True) == list(IN_SIMULATION)
    assert chosen("clip-twice,send-let-go", device="cpu", simulated=True) == ["clip-twice", "send-let-go"]
    with pytest.raises(SpecimenError, match="'send-let-go' needs simulated ranks: say --world simulated"):
        chosen("send-let-go", device="cpu")
    lines = listing([*IN_SIMULATION]).splitlines()
    assert [text.split()[0] for text in lines] == [*IN_SIMULATION]
    assert lines[0].split()[1] == "sends"


def test_what_is_tried_over_which_transport() -> None:
    names = ["send-let-go", "send-buffer-reused", "clip-twice"]
    tries, left_out = tries_on(names, [], simulated=True)
    over = [(case.specimen, transport.value) for case, transport in tries if transport is not None]
    first, second, third = names
    assert over == [(first, "unlimited"), (second, "unlimited"), (second, "pair"), (third, "unlimited")]
    assert left_out == {}
    tries, left_out = tries_on(names, ["gpipe"], simulated=True, transport=Transport.PAIR)
    assert [case.specimen for case, _ in tries] == [second, third]
    assert left_out == {(first, "gpipe"): "needs --transport gloo"}
    _, left_out = tries_on([second], [])
    assert [*left_out] == [(second, "gpipe")]
    golden(left_out[second, "gpipe"])


def test_a_line_of_simulated_ranks_has_the_transport_and_the_seed() -> None:
    golden(line(replace(TRIAL, transport="pair", seed="7"), columns=IN_SIMULATION_COLUMNS), exact=True)


def test_races_are_tried_under_seeds_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    setting = Setting("cpu", outputs=Outputs(str(file)), simulation=Simulation(count=20))
    assert try_all(["polled-once", "both-send-first"], [], setting) == 0
    out = capsys.readouterr().out
    golden(out)
    written = documented(file.read_text())["specimens"]
    assert [(one["specimen"], one["transport"]) for one in written] == [
        (name, transport) for name in ("polled-once", "both-send-first") for transport in ("unlimited", "pair")
    ]
    assert [int(one["seed"]) > 0 for one in written] == [True, True, False, False], "who polls may be lucky"
    lucky = Setting("cpu", simulation=Simulation(count=1))
    assert try_all(["polled-once"], [], lucky) == 1, "under one seed it goes well"
    assert "NOT: nothing" not in capsys.readouterr().err


def test_a_race_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own_race.py"
    file.write_text(OWN_RACE)
    assert loaded(str(file)) == ["own-race"]
    try:
        assert try_all(["own-race"], [], Setting("cpu", simulation=Simulation(count=20))) == 0
        assert "read-before-wait" in capsys.readouterr().out
        assert try_all(["own-race"], [], Setting("cpu")) == 1, "nothing was tried"
        said = "left out, needs --world simulated --transport gloo: own-race on naive"
        assert said in capsys.readouterr().out
    finally:
        PLUGINS.unload(file)


@pytest.mark.pipeproof_ranks
def test_specimens_are_tried_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, file = ["stage-negated", "backward-missing"], tmp_path / "x.json"
    assert try_all(names, [], Setting("cpu", outputs=Outputs(str(file)))) == 0
    out = capsys.readouterr().out
    golden(out)
    written = documented(file.read_text())
    assert [one["specimen"] for one in written["specimens"]] == names
    assert [one["recorded"]["kind"] for one in written["specimens"]] == ["sign", "order"]


def test_what_is_not_caught_or_named_wrong_is_no_success_and_what_does_not_apply_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Named("sign", False, False, 0.1)
    for trial in (replace(TRIAL, laws=()), replace(TRIAL, recorded=wrong), replace(TRIAL, final=wrong)):

        def tried(case: Case, world: World, *, record: bool, trial: Trial = trial) -> Trial:
            return trial

        monkeypatch.setattr(catalogue, "try_out", tried)
        assert try_all(["weight-half-dropped"], ["zb-h1"], Setting("cpu")) == 1
    assert try_all(["weight-half-dropped"], ["gpipe", "1f1b"], Setting("cpu")) == 1, "nothing was tried"
    out = capsys.readouterr().out
    golden(out)


def test_an_interruption_says_how_many_were_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([TRIAL])

    def tried(case: Case, world: World, *, record: bool) -> Trial:
        if (trial := next(answers, None)) is None:
            raise AskedToEnd(signal.SIGINT)
        return trial

    monkeypatch.setattr(catalogue, "try_out", tried)
    with pytest.raises(AskedToEnd):
        try_all(["stage-negated", "layernorm-zero", "clip-twice"], [], Setting("cpu"), final_only=True)
    golden(capsys.readouterr().out)


def test_a_false_alarm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Verdict("", "fail", "none", ())
    monkeypatch.setattr(catalogue, "validated", lambda case, world, measure: (failed, None))
    monkeypatch.setattr("pipeproof.wings.composed.validate_mixed", lambda case, world: failed)
    said, _count = catalogue._controls(World(), Setting("cpu")), len(CONTROLS) + len(mixed.RIGHT)
    golden(said)
