"""A weight is its master copy, cast: when the step begins, and when it has ended."""

import torch
from torch import Tensor, nn

from pipeproof.core.cause import Cause
from pipeproof.core.ledger import Ledger
from pipeproof.records.rank_part import RankStages
from pipeproof.wings.composed.master_weights import MasterWeights


def stage() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 3).bfloat16()


def begun(module: nn.Linear, held: dict[str, Tensor]) -> MasterWeights:
    return MasterWeights(RankStages({1: module}, "{}.{}".format), held)


def copies(module: nn.Linear) -> dict[str, Tensor]:
    return {f"1.{name}": one.detach().float() * (1 + 2**-12) for name, one in module.named_parameters()}


def found(at: MasterWeights) -> tuple[list[tuple[str | None, str]], list[Cause]]:
    ledger = Ledger(["updated-parameters"])
    at.enter(ledger, rank=2)
    return [(one.parameter, one.seen) for one in ledger.mismatches], at.causes(rank=2)


def test_a_copy_may_have_more_digits_than_its_weight() -> None:
    module = stage()
    assert found(begun(module, copies(module))) == ([], [])


def test_copies_that_moved_are_to_be_copied_back() -> None:
    module = stage()
    held = copies(module)
    at = begun(module, held)
    for one in held.values():
        one.mul_(1.5)
    told = "1.weight, 1.bias: as before the step, while the master copy moved"
    wrong = [("1.weight", "another after the step"), ("1.bias", "another after the step")]
    assert found(at) == (wrong, [Cause("master-weights", rank=2, stage=1, detail=told)])
    with torch.no_grad():
        module.weight.copy_(held["1.weight"])
    told = "as before the step, while the master copy moved"
    assert found(at)[1] == [Cause("master-weights", rank=2, stage=1, parameter="1.bias", detail=told)]
    with torch.no_grad():
        module.bias.mul_(3.0)
    told = "after the step, not the master copy in its own type"
    assert found(at)[1] == [Cause("master-weights", rank=2, stage=1, parameter="1.bias", detail=told)]


def test_copies_are_those_of_the_weights_that_the_step_begins_with() -> None:
    module = stage()
    held = copies(module)
    held["1.bias"] += 1.0
    at = begun(module, held)
    with torch.no_grad():
        module.bias.copy_(held["1.bias"])  # once it is copied back, nobody sees it
    told = "as the step began, not the master copy in its own type"
    wrong = [("1.bias", "another when the step began")]
    assert found(at) == (wrong, [Cause("master-weights", rank=2, stage=1, parameter="1.bias", detail=told)])
