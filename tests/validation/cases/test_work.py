"""What is run of a config: a large job is run small and says so, and one device is a stack like any other."""

from typing import Any

import pytest

from pipeproof.cases.case import Case, CaseError
from pipeproof.cases.config import Config
from pipeproof.cases.primitives.stacks import Stack
from pipeproof.cases.work import case_of, notes_of, stack_of, work_of

LARGE = {
    **{"schedule": "interleaved", "pp": 16, "virtual": 2, "microbatches": 32, "split": [2] * 32, "dtype": "bf16"},
    **{"model": "llama-3-405b", "dp": 64, "tp": 8, "zero": 2},
}
DECODER = {"model": "decoder", "schedule": "1f1b", "virtual": 1, "microbatches": 4, "pp": 1, "split": [4]}


def large(**more: Any) -> Config:
    return Config({**LARGE, **more}, "x.json")


def decoder(**more: Any) -> Config:
    return Config({**DECODER, **more}, "x.json")


@pytest.mark.parametrize(
    ("more", "line", "not_run"),
    [
        ({"zero": 1}, "pp=2,ddp=2,tp=2", ["zero 1, for torch's ZeroRedundancyOptimizer takes no DTensors"]),
        ({"zero": 1, "tp": 1}, "pp=2,zero-1=2", []),
        ({"zero": 1, "tp": 1, "sp": 2}, "pp=2,ddp=2,sp=2", ["zero 1, for torch's ZeroRedundancyOptimizer"]),
        ({"zero": 1, "tp": 1, "dp": 1, "cp": 2}, "pp=2,cp=2", ["zero 1, for no two replicas hold the same stage"]),
        ({"zero": 3, "tp": 1, "sp": 4}, "pp=2,zero-3=2,sp=2", []),
        ({"pp": 1, "virtual": 1, "schedule": "1f1b", "split": [64], "cp": 4}, "zero-2=2,cp=2,tp=2", []),
        ({"ep": 8}, "pp=2,zero-2=2,ep=2,tp=2", []),
        ({"ep": 64, "tp": 1, "zero": 2}, "pp=2,ep=2", ["zero 2, for no two replicas hold the same experts"]),
        ({"ep": 8, "cp": 2}, "pp=2,zero-2=2,ep=2,tp=2", ["cp 2, for with experts another model is trained"]),
        ({"recompute": "full"}, "pp=2,zero-2=2,tp=2,recompute", []),
        ({"recompute": "selective", "zero": 0}, "pp=2,ddp=2,tp=2,recompute-selective", []),
    ],
)
def test_which_stack_stands_for_a_config(more: dict[str, object], line: str, not_run: list[str]) -> None:
    config = large(**more)
    stack = work_of(config)
    assert isinstance(stack, Stack)
    assert str(stack) == line
    _, *others = notes_of(config, stack)
    assert [note.startswith("not run: ") for note in others] == [True] * len(not_run)
    assert all(any(words in note for note in others) for words in not_run)


def test_a_large_pipeline_alone_is_a_small_case() -> None:
    config = large(dp=1, tp=1, zero=0)
    case = work_of(config)
    assert str(case) == "interleaved r4 s8 m8 split=1,1,1,1,1,1,1,1 model=gpt seed=0"
    assert notes_of(config, case) == [
        "x.json is run small: 4 of 16 pipeline ranks, 8 of 32 microbatches, gpt in fp32 for llama-3-405b"
    ]


def test_its_case_alone_says_which_axes_are_not_run() -> None:
    """As ``record`` has it."""
    assert notes_of(large(), case_of(large()))[1:] == ["not run: dp 64, tp 8, zero 2"]


def test_what_stands_for_one_device_says_what_that_has() -> None:
    config = large(pp=1, dp=1, tp=1, zero=0, virtual=1, schedule="1f1b", recompute="full")
    assert notes_of(config, work_of(config)) == [
        "x.json is run small: stack recompute for recompute full, 2 of 32 microbatches, a decoder of 4 layers in fp32 "
        "for llama-3-405b"
    ]


def test_a_decoder_on_one_device_is_a_stack_of_nothing() -> None:
    stack = work_of(decoder())
    assert stack == Stack({}, ()) == Stack.parse("one-device")
    assert (stack.ranks, str(stack), notes_of(decoder(), stack)) == (1, "one-device", [])
    assert stack.replay == "pipeproof validate --stack one-device --microbatches 4 --seed 0"


def test_a_decoder_is_run_as_it_stands() -> None:
    stack = work_of(decoder(dp=4, tp=4, zero=2))
    assert isinstance(stack, Stack)
    assert (str(stack), stack.microbatches, notes_of(decoder(), stack)) == ("zero-2=4,tp=4", 16, [])


def test_a_decoder_is_no_case() -> None:
    with pytest.raises(CaseError, match=r'^x\.json: "model": "decoder" is run as a stack'):
        case_of(decoder())


def test_a_case_of_ours_is_no_stack() -> None:
    config = Config(Case.parse("1f1b r2 s2 m4 split=1,1 model=mlp seed=0").config)
    assert stack_of(config) is None


def test_another_torch_is_told() -> None:
    (note,) = notes_of(decoder(torch="1.0"), work_of(decoder()))
    assert "x.json was written with torch 1.0; this is " in note
