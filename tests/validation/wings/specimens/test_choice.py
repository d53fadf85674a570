"""Which specimens are asked for, and where each can show."""

import pytest

from pipeproof.own.case import SCHEDULES
from pipeproof.own.faults import SpecimenError
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.specimens import IN_SIMULATION, ON_DEVICES, SPECIMENS
from pipeproof.wings.specimens.choice import choose, tries_on
from pipeproof.wings.specimens.mixed import MIXED
from pipeproof.wings.specimens.tables import listing
from tests.support.golden import golden


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_most_specimens_apply_to_every_schedule(schedule: str) -> None:
    tries, left_out = tries_on(SPECIMENS, [schedule])
    assert {case.specimen for case, _ in tries} | {name for name, _ in left_out} == set(SPECIMENS)
    assert len(tries) >= 100
    assert all(why.startswith("needs ") for why in left_out.values())


def test_names_are_chosen_or_refused() -> None:
    assert choose("", device="cpu") == [*SPECIMENS, *MIXED]
    assert choose("", device="cpu", shrinks=True) == list(SPECIMENS)
    assert choose("", device="cuda") == [*SPECIMENS, *ON_DEVICES]
    assert choose("clip-twice, clip-never", device="cpu") == ["clip-twice", "clip-never"]
    with pytest.raises(SpecimenError, match="unknown specimen 'gremlin': pipeproof mutate --list prints all"):
        choose("clip-twice,gremlin", device="cuda")
    assert choose("other-device", device="cuda") == ["other-device"]
    with pytest.raises(SpecimenError, match="'other-device' needs a device other than the CPU: name its type with"):
        choose("other-device", device="cpu")


def test_races_are_chosen_where_ranks_are_simulated() -> None:
    assert choose("", device="cpu", simulated=True) == list(IN_SIMULATION)
    assert choose("clip-twice,send-let-go", device="cpu", simulated=True) == ["clip-twice", "send-let-go"]
    with pytest.raises(SpecimenError, match="'send-let-go' needs simulated ranks: say --world simulated"):
        choose("send-let-go", device="cpu")
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
