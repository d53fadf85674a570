"""Actions: one spelling each, read in full or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.action import COMPUTE, RECEIVES, SENDS, WAITS, Action, ActionError, Kind

numbers = st.integers(min_value=0, max_value=999_999_999)
actions = st.builds(Action, numbers, st.sampled_from(Kind), numbers)


KINDS = ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B"]


def test_the_letters_are_torch_s() -> None:
    assert str(Action(2, Kind.FORWARD, 0)) == "2F0"
    assert str(Action(0, Kind.SEND_B, 13)) == "0SEND_B13"
    assert [kind.value for kind in Kind] == KINDS


def test_every_kind_is_computing_sending_receiving_or_waiting() -> None:
    assert COMPUTE | SENDS | RECEIVES | WAITS == set(Kind)
    assert len(COMPUTE) + len(SENDS) + len(RECEIVES) + len(WAITS) == len(Kind)


@given(actions)
def test_parse_inverts_str(action: Action) -> None:
    parsed = Action.parse(str(action))
    assert parsed == action
    assert parsed.kind is action.kind


@given(st.from_regex(r"[0-9]{1,2}(F|BB?|I|SEND_F|RECV_?B)[0-9]{0,2} ?", fullmatch=True))
def test_str_inverts_parse(text: str) -> None:
    try:
        action = Action.parse(text)
    except ActionError:
        return
    assert str(action) == text


TORCH_READS_AS_ANOTHER = ["0F1junk", "0FORWARD3", "0B-1"]  # 0F1, 0F and 0B
TORCH_S_BUT_NOT_OURS = ["0F", "0UNSHARD", "1REDUCE_GRAD", "(0F7;7B3)OVERLAP_F_B"]
MALFORMED = ["", "F0", "0X1", "-1F0", "0f1", "0 F1", " 0F1", "0F1\n", "0F1.0", "0SEND0", "0SEND_W1", "0F1111111111"]
TWO_SPELLINGS = ["00F1", "0F01", "1_0F0", "+1F0", "٠F١", "0F１"]  # int() reads all of these numbers


@pytest.mark.parametrize("text", [*TORCH_READS_AS_ANOTHER, *TORCH_S_BUT_NOT_OURS, *MALFORMED, *TWO_SPELLINGS])
def test_anything_else_is_refused(text: str) -> None:
    words = "is not an action: expected stage, kind and microbatch"
    with pytest.raises(ActionError, match=f"{words}.*a kind out of {', '.join(KINDS)}$") as caught:
        Action.parse(text)
    assert isinstance(caught.value, ValueError)
    assert repr(text) in str(caught.value)


def test_a_number_beyond_int_s_limit_is_refused_alike() -> None:
    with pytest.raises(ActionError):
        Action.parse("1" * 5000 + "F0")
