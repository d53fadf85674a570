"""What is run of a config: a large job is run small and says so, and one device is a stack like any other."""

from typing import Any

import pytest

from pipeproof.commands.work import case_of, notes_of, work_of
from pipeproof.own.case import Case, CaseError
from pipeproof.own.config import LAYOUT, Config
from pipeproof.wings.primitives import stack_of
from pipeproof.wings.primitives.stacks import Stack, StackError
from tests.support.golden import golden

LARGE = {
    **{"schedule": "interleaved", "pp": 16, "virtual": 2, "microbatches": 32, "split": [2] * 32, "dtype": "bf16"},
    **{"model": "llama-3-405b", "dp": 64, "tp": 8, "zero": 2},
}
DECODER = {"model": "decoder", "schedule": "1f1b", "virtual": 1, "microbatches": 4, "pp": 1, "split": [4]}


CASE = Case.parse("1f1b r2 s2 m4 split=1,1 model=mlp seed=0")


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
        ({"ep": 64, "cp": 2}, "pp=2,zero-2=2,ep=2,tp=2", ["cp 2, for with experts another model is trained"]),
        ({"ep": 64, "dp": 32, "cp": 2, "zero": 0}, "pp=2,ep=2,tp=2", ["cp 2, for with experts another model"]),
        ({"loss": "tokens", "ragged": True}, "pp=2,zero-2=2,tp=2", ['loss "tokens", for a stack has "mean"; ragged']),
        ({"pp": 1, "cp": 4}, "zero-2=2,cp=2,tp=2", ["virtual 2, for there is no pipeline"]),
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


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"dtype": "bf16"}, 'dtype is "bf16": expected "fp32"'),
        ({"loss": "tokens"}, 'loss is "tokens": expected "mean"'),
        ({"ragged": True}, "ragged is true: expected false"),
        ({"unequal": True}, "unequal is true: expected false"),
        ({"plan": ["train", "train"]}, 'plan is ["train", "train"]: expected ["train"]'),
        ({"runtime": "torch"}, 'runtime is "torch": expected "pipeproof"'),
        ({"options": ["whole"]}, 'options is ["whole"]: expected []'),
        ({"specimen": "layernorm-zero"}, 'specimen is "layernorm-zero": expected ""'),
        ({"split": [7, 9]}, "split is [7, 9]: expected [4]"),
        ({"split": [1, 3], "pp": 2}, "split is [1, 3]: expected [2, 2]"),
        ({"virtual": 2, "schedule": "interleaved"}, "virtual is 2: expected 1"),
        ({"virtual": 2, "pp": 2, "split": [1] * 4}, "virtual is 2, but 1f1b has one stage per rank"),
        ({"micro": 4}, "micro is 4: expected 3"),
        ({"sequence": 4096}, "sequence is 4096: expected 16"),
        ({"zero": 2}, "zero is 2: expected 0"),
        ({"zero": 2, "dp": 4, "ep": 4}, "zero is 2: expected 0"),
        ({"zero": 1, "dp": 2, "tp": 2}, "torch's ZeroRedundancyOptimizer takes no DTensors"),
        ({"cp": 2, "ep": 2, "dp": 2}, "with cp and ep together another model is trained"),
        ({"tp": 2, "sp": 2}, "tp and sp do the same work: leave one out"),
        ({"tp": 3}, "tp 3 does not divide heads 4: use a divisor"),
        ({"ep": 3, "dp": 3}, "ep 3 does not divide 4 experts: use a divisor"),
        ({"dp": 512}, "is 512: expected at most 256"),
        ({"seed": -1}, "seed of stack one-device is -1: expected at least 0"),
        ({"microbatches": 1 << 20}, "microbatches of stack one-device is 1048576: expected at most 65536"),
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'"),
    ],
)
def test_what_a_decoder_has_not_is_refused(more: dict[str, object], words: str) -> None:
    with pytest.raises(StackError) as refused:
        work_of(decoder(**more))
    assert str(refused.value).startswith("x.json: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "fp32", "loss": "mean", "plan": ["train"], "runtime": "pipeproof", "options": [], "specimen": ""},
        {"ragged": False, "unequal": False, "device": "cpu", "seed": 3, "micro": 3, "sequence": 16, "zero": 0},
        dict(LAYOUT, micro=3),
    ],
)
def test_what_a_decoder_has_may_be_said(more: dict[str, object]) -> None:
    assert str(work_of(decoder(**more))) == "one-device"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (large(runtime="torch"), r"^x\.json: runtime"),
        (large(options=["whole"]), r"^x\.json: options"),
        (large(specimen="layernorm-zero"), r"^x\.json: specimen"),
        (Config({**CASE.config, "micro": 4}), "micro 4: a case has sequences of its own; leave it out"),
        (Config({**CASE.config, "sequence": 8}), "sequence 8: a case has sequences of its own; leave it out"),
        (
            decoder(model="decodr"),
            r"^x\.json: unknown model 'decodr': did you mean 'decoder'\? known are gpt, .*, decoder",
        ),
        (decoder(model="nosuch"), r"^x\.json: unknown model 'nosuch': known are gpt, .*, decoder"),
    ],
)
def test_what_no_case_and_no_stack_has_is_refused(config: Config, words: str) -> None:
    with pytest.raises((CaseError, StackError), match=words):
        work_of(config)


def test_a_large_pipeline_alone() -> None:
    config = large(dp=1, tp=1, zero=0)
    case = work_of(config)
    assert case == Case("interleaved", 4, 2, 8, (1,) * 8)
    golden("\n".join(notes_of(config, case)))
    golden("\n".join(notes_of(large(), case_of(large()))[1:]))  # as ``record`` has it
    one = large(pp=1, dp=1, tp=1, zero=0, virtual=1, schedule="1f1b", recompute="full")
    golden("\n".join(notes_of(one, work_of(one))))


def test_a_decoder_is_a_stack_as_it_stands() -> None:
    stack = work_of(decoder())
    assert stack == Stack({}, ()) == Stack.parse("one-device")
    assert (stack.ranks, str(stack), notes_of(decoder(), stack)) == (1, "one-device", [])
    golden(stack.replay)
    stack = work_of(decoder(dp=4, tp=4, zero=2))
    assert isinstance(stack, Stack)
    assert (str(stack), stack.microbatches, notes_of(decoder(), stack)) == ("zero-2=4,tp=4", 16, [])
    with pytest.raises(CaseError, match=r'^x\.json: "model": "decoder" is run as a stack'):
        case_of(decoder())
    assert stack_of(Config(CASE.config)) is None


def test_another_torch_is_told() -> None:
    (note,) = notes_of(decoder(torch="1.0"), work_of(decoder()))
    golden(note)


def test_a_config_of_advise_may_name_the_model_of_a_file() -> None:
    assert work_of(decoder(model="nosuch", sequence=4096))
