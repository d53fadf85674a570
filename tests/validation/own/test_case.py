"""A case and its replay line."""

import pytest
from hypothesis import given, settings

from pipeproof.core.limits import PRECISIONS
from pipeproof.own.case import DTYPES, FULL_PLAN, MODELS, Case, CaseError
from pipeproof.own.fuzz import cases
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.reference.model import DTYPES as REFERENCE_DTYPES
from pipeproof.reference.model import MODELS as REFERENCE_MODELS


@given(cases())
@settings(deadline=None)
def test_a_case_is_its_replay_line(case: Case) -> None:
    assert Case.parse(str(case)) == case


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (
            Case("1F1B", 2, 1, 3, (2, 1), model="mlp", loss="tokens", ragged=True, plan=("eval", "train"), seed=7),
            "1f1b r2 s2 m3 split=2,1 model=mlp loss=tokens ragged plan=eval+train seed=7",
        ),
        (Case("gpipe", 1, 1, 1, (1,), dtype="bf16"), "gpipe r1 s1 m1 split=1 model=gpt dtype=bf16 seed=0"),
        (Case.parse("gpipe r1 s1 m1 split=1"), "gpipe r1 s1 m1 split=1 model=gpt seed=0"),
        (
            Case.parse("gpipe r2 s2 m3 split=1,1 replicas=2 runtime=torch"),
            "gpipe r2 s2 m3 split=1,1 model=gpt seed=0 runtime=torch replicas=2",
        ),
    ],
)
def test_the_line_says_what_differs_from_the_defaults(case: Case, line: str) -> None:
    assert str(case) == line


def test_what_a_line_leaves_out_has_defaults() -> None:
    replicated = Case.parse("gpipe r2 s2 m3 split=1,1 replicas=2 runtime=torch")
    assert replicated.plan == FULL_PLAN
    assert (replicated.processes, replicated.late, replicated.bindings.count("2 replicas")) == (4, 6.0, 1)
    assert [list(replicated.share(replica)) for replica in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_every_model_and_dtype_of_the_reference_can_be_a_case() -> None:
    assert set(MODELS) == set(REFERENCE_MODELS)
    assert DTYPES == tuple(REFERENCE_DTYPES)
    assert [PRECISIONS[dtype].name for dtype in REFERENCE_DTYPES.values()] == list(DTYPES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a schedule, ranks, stages"),
        ("1f1b r4 m8", "not a case"),
        ("1f1b r4 s4 mx", "not a case"),
        ("1f1b r3 s4 m8", "4 stages on 3 ranks: expected a rank, and as many stages on each"),
        ("1f1b r0 s4 m8", "4 stages on 0 ranks: expected a rank"),
        ("1f1b r2 s2 m1 colour=red", "'colour=red' is no option: known are split, model"),
        ("1f1b r2 s2 m1 ragged=yes", "'ragged=yes' is no option"),
        ("1f1b r2 s2 m1 seed", "'seed' is no option"),
        ("1f1b r2 s2 m1 seed=x", "'seed=x': expected a whole number behind the ="),
        ("1f1b r2 s2 m1 seed=1 ragged seed=1", "seed is said twice"),
        ("1f1b r2 s2 m1 split=1,b", "'split=1,b': expected whole numbers with commas between behind the ="),
        ("1f1b r2 s2 m1 model=lstm", "unknown model 'lstm': known are gpt"),
        ("1f1b r2 s2 m1 dtype=fp16", "unknown dtype 'fp16': did you mean 'fp64'. known are fp32, bf16, fp64"),
        ("1f1b r2 s2 m1 loss=max", "unknown loss 'max': known are mean, tokens"),
        ("1f1b r2 s2 m1 plan=jump+train", "unknown operation 'jump'"),
        ("1f1b r2 s2 m1 plan=train+eval", "must end with train"),
    ],
)
def test_text_that_is_no_case_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(CaseError, match=words):
        Case.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1f2b r2 s2 m1", "unknown schedule '1f2b': did you mean '1f1b'"),
        ("1f1b r2 s2 m0", "microbatches is 0: expected at least 1"),
        ("1f1b r2 s4 m1", "virtual is 2, but 1f1b has one stage per rank"),
        ("1f1b r2 s2 m1 split=1,1,1", "split 1,1,1 has 3 sizes: expected 2"),
        ("1f1b r2 s2 m1 split=3,0", "leaves stage 1 with 0 layers"),
    ],
)
def test_schedules_and_splits_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        Case.parse(text)
