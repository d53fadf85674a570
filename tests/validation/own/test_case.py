"""A case and its replay line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings

from pipeproof import World
from pipeproof.core.limits import PRECISIONS
from pipeproof.own.case import DTYPES, FULL_PLAN, MODELS, Case, CaseError, own_schedule
from pipeproof.own.fuzz import cases
from pipeproof.own.observe import observe
from pipeproof.own.validator import validate
from pipeproof.pipeline.files import read_file
from pipeproof.pipeline.laws import LawBroken
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import build
from pipeproof.reference.model import DTYPES as REFERENCE_DTYPES
from pipeproof.reference.model import MODELS as REFERENCE_MODELS
from pipeproof.worlds.shipping import pack, unpack
from tests.support.golden import golden
from tests.support.typed import Typed
from tests.support.warm_start import Ended


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
        ("1f2b r2 s2 m1", "unknown schedule '1f2b': did you mean '1f1b'"),
        ("1f1b r2 s2 m0", "microbatches is 0: expected at least 1"),
        ("1f1b r2 s4 m1", "virtual is 2, but 1f1b has one stage per rank"),
        ("1f1b r2 s2 m1 split=1,1,1", "split 1,1,1 has 3 sizes: expected 2"),
        ("1f1b r2 s2 m1 split=3,0", "leaves stage 1 with 0 layers"),
    ],
)
def test_text_that_is_no_case_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises((CaseError, ScheduleError), match=words):
        Case.parse(text)


# Three stages on two ranks, one of them with two; the second microbatch goes first on its way back.
UNEVEN = "0F0,0F1,2F0,2F1,2B1,2I0,2W0,0B1,0B0\n1F0,1F1,1B1,1B0\n"
PLAN = build("zb-v", ranks=2, microbatches=3)
FILES = {
    "a schedule": UNEVEN,
    "overlaps": build("dualpipev", ranks=2, microbatches=4).to_csv(),
    "a program of torch 2.13": lower(PLAN).to_csv(),
    "a program of torch 2.15": lower(PLAN, early=2).with_waits.to_csv(),
    "both ranks receive first": "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_runs_as_it_stands_and_is_right(name: str, world: World, tmp_path: Path) -> None:
    path = tmp_path / "a file.csv"
    path.write_text(FILES[name])
    own = own_schedule(path)
    schedule = own.schedule if isinstance(own, Program) else own
    stages = (schedule.n_ranks, schedule.n_stages, schedule.microbatches)
    line = "{} r{} s{} m{} model=gpt-tied plan=train+eval+train seed=3".format(path, *stages)
    case = Case.parse(line)
    path.unlink()  # nothing reads it again, on whatever rank
    observed = observe(case, world)
    for rank, row in enumerate(observed.ranks):
        assert row[0].executed == schedule.ranks[rank]
    verdict = validate(case, world)
    verdict.raise_if_failed()
    assert verdict.tier == "bitwise"


def test_a_case_of_a_file_is_its_replay_line_and_travels_whole(tmp_path: Path) -> None:
    path = tmp_path / "a file.csv"
    path.write_text(FILES["a program of torch 2.15"])
    line = f"{path} r2 s4 m3 split=1,2,1,3 model=mlp ragged seed=5"
    case = Case.parse(line)
    assert str(case) == line
    assert Case.parse(str(case)) == case == Case(
        str(path), 2, 2, 3, (1, 2, 1, 3), model="mlp", ragged=True, seed=5
    )  # fmt: skip
    own = read_file(path)
    path.unlink()
    arrived = unpack(pack(case))
    assert arrived == case
    assert arrived.run == own
    assert arrived.built.ranks == PLAN.ranks


@pytest.mark.parametrize(
    ("content", "shape", "kind"),
    [(UNEVEN, "r2 s3 m4", CaseError), (UNEVEN, "r2 s4 m2", CaseError), ("0F0,0B0,0B0", "r1 s1 m1", LawBroken)],
)
def test_a_line_that_its_file_contradicts(content: str, shape: str, kind: type[Exception], tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(content)
    with pytest.raises(kind) as refused:
        Case.parse(f"{tmp_path}/mine.csv {shape}")
    golden(str(refused.value))


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_the_command_runs_a_file_and_the_line_that_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("0F0,0F1,1F0,1B0,1F1,1B1,0I1,0I0,0W0,0W1\n")
    out = typed.only("validate --schedule mine.csv --model mlp --layers 3 --split 1,2")[0]
    assert out.splitlines()[1].split()[:7] == ["mine.csv", "mlp", "fp32", "1", "2", "2", "1,2"]
    typed("replay mine.csv r1 s2 m2 split=1,2 model=mlp ragged unequal seed=0", lines="1 pass")


ELSEWHERE = """
import os, sys
if os.environ["RANK"] != "0":
    os.chdir("..")
from pipeproof.commands.cli import main
sys.exit(main(["validate", "--schedule", "mine.csv", "--model", "mlp"]))
"""


@pytest.mark.sweep
def test_under_torchrun_the_file_is_needed_where_rank_0_is(torchrun: Callable[..., Ended], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ELSEWHERE)
    (tmp_path / "mine.csv").write_text(FILES["a program of torch 2.15"])
    done = torchrun(tmp_path, "script.py", ranks=2)
    assert done.returncode == 0, done.stdout
    golden(done.stdout, lines="1 pass")
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1F0,1X0")
    done = torchrun(tmp_path, "script.py", ranks=2)
    assert done.returncode != 0
    said = [line for line in done.stdout.splitlines() if line.startswith("pipeproof:")]
    assert len(said) == 1, done.stdout
    golden(said[0])
