"""Steps that are not ours, on real ranks: right ones pass, and every wrong one is told what is wrong."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof import StepResult, watch
from pipeproof.core.contract import Contract
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import ValidationFailed, Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.rank import RankMade, digests
from pipeproof.whitebox.validator import other_data
from tests.support.golden import golden
from tests.support.steps import Pairs, loss_fn, pairs
from tests.support.two_ranks import half, one_by_one

WIDTH = 8
RANKS = 2
Step = Callable[[Any, list[Any]], Any]


def build_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)))


def data(seed: int = 0) -> Pairs:
    return pairs(seed=seed)


def plain(model: Any, microbatches: list[Any]) -> Any:
    stage = half(model)
    return stage, one_by_one(stage, microbatches)


def judged(whitebox: WhiteBox, step: Step, **more: Any) -> Verdict:
    wanted = {"reference": build_model, "microbatches": data(), "ranks": RANKS, "loss_fn": loss_fn} | more
    return whitebox.validate(step, **wanted)


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {law.name: law.outcome for law in verdict.laws}


@pytest.mark.sweep
def test_a_right_step_passes_bit_for_bit(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, plain)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise")
    assert outcomes(verdict) == {
        "parameters-once": "pass",
        "initial-weights": "pass",
        "microbatches": "not observed",
        "boundaries": "not observed",
        "loss": "pass",
        "presence": "pass",
        "gradient": "pass",
        "shards": "not applicable",
        "replicas": "not applicable",
        "tied-copies": "not applicable",
        "grad-norm": "not observed",
    }
    assert verdict.law("gradient").exact == 16
    assert "test_a_right_step_passes_bit_for_bit" in verdict.replay


def normed(model: Any, microbatches: list[Any], *, factor: float = 1.0) -> Any:
    stage, losses = plain(model, microbatches)
    squares = sum(p.grad.double().square().sum() for p in stage.parameters())
    dist.all_reduce(squares)
    return StepResult(stage, losses, factor * squares.sqrt())


def by_name(model: Any, microbatches: list[Any]) -> Any:
    """Gradients by name, and one loss."""
    losses, first = plain(model, microbatches)[1], 2 * dist.get_rank()
    gradients = {n: p.grad for n, p in model.named_parameters() if int(n[0]) in (first, first + 1)}
    return gradients, (sum(losses) / len(losses) if losses else None)


def renumbered(model: Any, microbatches: list[Any]) -> Any:
    """Copies whose names say something else: rank 1's are called as rank 0's in the reference."""
    first = 2 * dist.get_rank()
    own = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
    known = {f"{int(n[0]) - first}{n[1:]}": p for n, p in model.named_parameters() if int(n[0]) >= first}
    own.load_state_dict(known, strict=False)
    return own, one_by_one(own, microbatches)


def prefixed(model: Any, microbatches: list[Any], *, prefix: str, named: bool = False) -> Any:
    """Gradients of a slice that counts from 0 again, under a prefix; ``named``: it says its names in the reference."""
    rank, stage = dist.get_rank(), nn.Sequential(*half(model))
    losses = one_by_one(stage, microbatches)
    gradients = {f"{prefix.format(rank)}{n}": p.grad for n, p in stage.named_parameters()}
    names = (lambda n: f"{int(n[5]) + 2 * rank}{n[6:]}") if named else None
    return StepResult([], losses, gradients=gradients, names=names)


def updated(model: Any, microbatches: list[Any]) -> Any:
    handed = plain(model, microbatches)
    torch.optim.SGD(handed[0].parameters(), lr=0.1).step()
    return handed


def last_first(model: Any, microbatches: list[Any]) -> Any:
    stage = watch(half(model))
    return stage, one_by_one(stage, microbatches[::-1])[::-1]


def traced(model: Any, microbatches: list[Any], *, short: bool = False) -> Any:
    stage, rank = half(model), dist.get_rank()
    losses = one_by_one(stage, microbatches[::-1])[::-1]
    every = [f"{rank}{kind}{m}" for m in (3, 2, 1, 0) for kind in "FB"]
    return stage, losses, None, ["0F0", "1F0"] if short else every


RANKED = partial(prefixed, prefix="rank{}.")
MINE = partial(prefixed, prefix="mine.", named=True)
PREFIXES = Contract(names={"rank0.": "", "rank1.0": "2", "rank1.1": "3"})
FUNCTION = Contract(names=lambda n: f"{int(n[6]) + 2 * int(n[4])}{n[7:]}")

# A right step, beside what, and outcomes of some laws.
RIGHT: dict[str, tuple[Step, dict[str, Any], dict[str, str]]] = {
    "a norm": (normed, {}, {"grad-norm": "pass"}),
    "gradients by name, one loss": (by_name, {}, {"initial-weights": "not observed"}),
    "copies under other names": (renumbered, {}, {"parameters-once": "pass"}),
    "its own names": (MINE, {}, {}),
    "names by prefix": (RANKED, {"contract": PREFIXES}, {}),
    "names by function": (RANKED, {"contract": FUNCTION}, {}),
    "an update at its end": (updated, {}, {"initial-weights": "pass"}),
    "last first, watched": (last_first, {}, {"microbatches": "pass", "boundaries": "pass"}),
    "last first, traced": (traced, {}, {"microbatches": "pass"}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_every_right_form_passes(whitebox: WhiteBox, name: str) -> None:
    step, more, laws = RIGHT[name]
    verdict = judged(whitebox, step, **more)
    assert (verdict.outcome, verdict.tier) == ("pass", "fp32" if name == "a norm" else "bitwise"), verdict
    assert outcomes(verdict).items() >= laws.items()
    if name == "a norm":
        assert verdict.law("grad-norm").checked == RANKS
    if name == "gradients by name, one loss":
        golden(verdict.law("initial-weights").note)
    if name == "last first, watched":
        assert verdict.law("boundaries").checked == verdict.law("boundaries").exact > 4 * 4 * RANKS - 8


def without_losses(model: Any, microbatches: list[Any]) -> Any:
    return plain(model, microbatches)[0], None


def without_modules(model: Any, microbatches: list[Any]) -> Any:
    return [], plain(model, microbatches)[1]


def one_more(model: Any, microbatches: list[Any]) -> Any:
    """A module that the reference does not have."""
    stage, losses = plain(model, microbatches)
    return [stage, nn.Linear(3, 3)] if dist.get_rank() else [stage], losses


def other_parts(model: Any, microbatches: list[Any]) -> Any:
    """Some of it is held twice, some never."""
    return model[0:2] if dist.get_rank() else model[0:1], plain(model, microbatches)[1]


def wrong_weights(model: Any, microbatches: list[Any]) -> Any:
    stage = half(model)
    if dist.get_rank():
        with torch.no_grad():
            stage[1][1].weight.mul_(1.5)
    return stage, one_by_one(stage, microbatches)


def of_other_data(model: Any, microbatches: list[Any], *, watched: bool) -> Any:
    stage = watch(half(model)) if watched else half(model)
    return stage, one_by_one(stage, data(seed=1)[:1] + microbatches[1:])


def repeated_data(model: Any, microbatches: list[Any]) -> Any:
    stage = watch(half(model))
    return stage, one_by_one(stage, [microbatches[0], microbatches[0], *microbatches[2:]])


LAYERS = Contract(names={"rank0.": "", "rank1.": "layers."})
First = tuple[str, int | None, int | None, int | None, str | None]  # law, rank, stage, microbatch, parameter

NEVER: First = ("parameters-once", None, None, None, "2.0.bias")
# A wrong step, beside what; the laws that fail, and what is wrong first.
WRONG: dict[str, tuple[Step, dict[str, Any], set[str], First]] = {
    "no modules": (without_modules, {}, {"parameters-once"}, ("parameters-once", None, None, None, "0.0.bias")),
    "another norm": (partial(normed, factor=1.01), {}, {"grad-norm"}, ("grad-norm", 0, None, None, None)),
    "other names": (
        MINE,
        {"contract": Contract(names={"mine.": "yours."})},
        {"parameters-once"},
        ("parameters-once", 0, 0, None, "mine.0.0.bias"),
    ),
    "half of the names": (
        RANKED,
        {"contract": LAYERS},
        {"parameters-once"},
        ("parameters-once", 1, 1, None, "rank1.0.0.bias"),
    ),
    "one module more": (one_more, {}, {"parameters-once"}, ("parameters-once", 1, 2, None, "bias")),
    "twice and never": (other_parts, {}, {"parameters-once", "presence"}, NEVER),
    "other weights": (wrong_weights, {}, {"initial-weights"}, ("initial-weights", 1, 1, None, "3.1.weight")),
    "other data, watched": (
        partial(of_other_data, watched=True),
        {},
        {"boundaries", "loss", "gradient"},
        ("boundaries", 0, 0, 0, None),
    ),
    "other data": (
        partial(of_other_data, watched=False),
        {},
        {"loss", "gradient"},
        ("loss", 1, None, 0, None),
    ),
    "a microbatch twice": (
        repeated_data,
        {},
        {"microbatches", "loss", "gradient"},
        ("microbatches", 0, 0, None, None),
    ),
    "a short trace": (partial(traced, short=True), {}, {"microbatches"}, ("microbatches", 0, 0, None, None)),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_step_breaks_its_laws(whitebox: WhiteBox, name: str) -> None:
    step, more, laws, place = WRONG[name]
    verdict, first = (found := judged(whitebox, step, **more)), found.mismatches[0]
    assert {law for law, outcome in outcomes(verdict).items() if outcome == "fail"} == laws, verdict
    assert (first.law, first.rank, first.stage, first.microbatch, first.parameter) == place
    golden(
        "\n".join(f"{one.law} {one.parameter}: {one.observed_text}" for one in verdict.mismatches[:3]), numbers=False
    )
    if note := verdict.law("parameters-once").note:
        golden(note)
    if name == "no modules":
        assert (verdict.law("parameters-once").wrong, verdict.law("gradient").outcome) == (16, "unknown")
    if name == "half of the names":
        listed = verdict.law("parameters-once")
        assert (listed.wrong, listed.checked) == (16, 24)
    if name == "one module more":
        assert [one.parameter for one in verdict.mismatches] == ["bias", "weight"]
    if name == "twice and never":
        found_ = {(m.parameter, m.observed_text) for m in verdict.mismatches if m.law == "parameters-once"}
        assert {("2.0.bias", "held 0 times"), ("0.0.bias", "held 1 times")} <= found_
    if name == "other weights":
        assert verdict.law("gradient").reasons == (Reason.EARLIER,)
        assert "1.5 times expected" in first.observed_text
        assert [(one.kind, one.rank, one.stage) for one in verdict.causes] == [("altered", 1, 1)]
        with pytest.raises(ValidationFailed, match=r"(?s)FAIL .*initial-weights \(1 of 16"):
            verdict.raise_if_failed()
    if name == "other data, watched":
        assert (first.action, first.expected_text) == ("0F0", "microbatch 0's")
    if name == "a microbatch twice":
        twice = {(m.stage, m.observed) for m in verdict.mismatches if m.law == "microbatches"}
        assert twice >= {(0, (0, 0, 2, 3)), (1, (0, 0, 2, 3))}


def test_watching_changes_nothing_in_a_module() -> None:
    stage = nn.Linear(4, 4)
    assert watch(stage) is stage
    assert not stage._forward_hooks


# What cannot be judged.


def raises(model: Any, microbatches: list[Any]) -> Any:
    if dist.get_rank() == 1:
        raise RuntimeError("boom")
    return plain(model, microbatches)


def nothing(model: Any, microbatches: list[Any]) -> Any:
    return None


def unseeded() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH))


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Identity())


def by_rank() -> nn.Module:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


@pytest.mark.parametrize(
    ("step", "reference"),
    [
        (raises, build_model),
        (nothing, build_model),
        (plain, unseeded),
        (plain, dropping),
        (plain, by_rank),
        (without_losses, build_model),
    ],
    ids=["raises", "nothing", "unseeded", "dropout", "by rank", "no losses"],
)
def test_what_cannot_be_judged_is_said(whitebox: WhiteBox, step: Step, reference: Callable[[], nn.Module]) -> None:
    verdict = judged(whitebox, step, reference=reference)
    assert (verdict.outcome, verdict.exit_status) == ("unknown", 3)
    told = verdict.details.splitlines()[0]
    golden(told.partition(": ")[2] if step is nothing else told, numbers=False)  # either rank may be the first
    assert ("Traceback" in verdict.details) == ("in raises" in verdict.failure) == (step is raises)
    assert "in run_step" not in verdict.failure, "the traceback is the user's, not ours"
    assert (verdict.law("loss").reasons == (Reason.UNREPORTED,)) if step is without_losses else not verdict.mismatches


def test_microbatches_that_differ_between_ranks_of_torchrun() -> None:
    made = [RankMade((), (), None, None, None, {}, digests(data(seed))) for seed in (0, 1)]
    assert other_data(made[:1], digests(data())) == ""
    golden(other_data(made, digests(data())))
    golden(other_data(made[:1], digests(data()[:3])))


def hangs(model: Any, microbatches: list[Any]) -> Any:
    dist.irecv(torch.empty(1), 1 - dist.get_rank()).wait()  # both wait: nobody has sent
    return None


def test_a_hang_says_who_waits_for_whom(whitebox: WhiteBox) -> None:
    judged(whitebox, plain)  # ranks are there
    began = time.monotonic()
    verdict = judged(whitebox, hangs, timeout_s=2.0)
    assert time.monotonic() - began < 10
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])
    assert verdict.failure.count("in hangs") == 2
    assert judged(whitebox, plain).outcome == "pass", "the next run is sound"
