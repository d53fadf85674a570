"""What passes, fails and stays unknown does not hang on its explanation: without one, each outcome is the same."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import pytest
import truth

from pipeproof.core.verdict import Verdict
from pipeproof.explain import explain as diagnose
from pipeproof.own.validator import validate
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.composed import validate_composed
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.trial import smallest_of
from pipeproof.worlds.world import World
from tests.support.sweeps import sampled
from tests.validation.core.test_nudged import loss_fn, mixed_step, narrow, pairs, step_in_halves
from tests.validation.explain.rules.test_rules_weights import AROUND, EVAL, TRAIN, judged

FOREIGN = (
    "right: halves in bf16",
    "bf16: stage four times",
    "plain: one lost",
    "iterators: norms reduced twice",
    "classes: steps of accumulation forgotten",
    "tied: one lost",
    "scaled loss: last loss counts four times",
    "plain: sent in bf16",
    "fp64: one parameter negated",
    "ddp: never reduced",
    "zero 3: shards never reduced",
    "ep: norm without experts",
)
OWN = (
    "microbatch-dropped",
    "clip-never",
    "gradients-not-cleared",
    "tied-not-reduced",
    "updated-twice",
    "norm-of-rank",
    "activations-rounded",
    "evaluation-in-training-mode",
)
Row = Callable[[WhiteBox, World], Verdict]


def foreign(title: str, whitebox: WhiteBox, world: World) -> Verdict:
    every = (one for runs in truth.foreign().values() for one in runs)
    return next(one for one in every if one.title == title).verdict(whitebox, watched=True)


def own(name: str, whitebox: WhiteBox, world: World) -> Verdict:
    return validate(smallest_of(SPECIMENS[name]), world)


def one_step(step: Callable[..., Any], whitebox: WhiteBox, world: World) -> Verdict:
    return whitebox.validate(step, reference=narrow, microbatches=pairs(), ranks=1, loss_fn=loss_fn)


ROWS: Mapping[str, Row] = {
    **{title: partial(foreign, title) for title in FOREIGN},
    **{name: partial(own, name) for name in OWN},
    "old weights": lambda whitebox, _: judged(whitebox, AROUND, TRAIN),
    "old weights in an evaluation": lambda whitebox, _: judged(whitebox, AROUND, EVAL),
    "a unit near zero": partial(one_step, step_in_halves),
    "a gradient mixed in bf16": partial(one_step, mixed_step),
}


HELD_AGAINST_ITSELF = (
    "microbatch-dropped",
    "gradients-crossed",
    "activations-crossed",
    "microbatches-swapped",
    "clip-never",
    "tied-not-reduced",
    "updated-twice",
    "activations-rounded",
)


def raises(*_: object) -> NoReturn:
    raise RuntimeError("there is no explanation")


def outcomes(verdict: Verdict) -> tuple[str, dict[str, str]]:
    return verdict.outcome, {law.name: law.outcome for law in verdict.laws}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sampled(ROWS, 2))
def test_each_outcome_is_the_same_without_an_explanation(
    name: str, whitebox: WhiteBox, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained = ROWS[name](whitebox, world)
    monkeypatch.setattr(diagnose, "follow_rules", raises)
    alone = ROWS[name](whitebox, world)
    assert outcomes(alone) == outcomes(explained), f"{explained}\n{alone}"
    assert not alone.causes
    assert alone.outcome == "pass" or alone.unsought.startswith("RuntimeError: ")


@pytest.mark.parametrize("name", sampled(HELD_AGAINST_ITSELF, 2))
def test_each_outcome_of_a_composed_check_is_the_same_without_an_explanation(
    name: str, simulated: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = smallest_of(SPECIMENS[name])
    explained = validate_composed(case, simulated)
    monkeypatch.setattr(diagnose, "follow_rules", raises)
    alone = validate_composed(case, simulated)
    assert explained.outcome == "fail"
    assert outcomes(alone) == outcomes(explained), f"{explained}\n{alone}"
