"""Steps that are not ours, on real ranks: right ones pass, and every wrong one is told what is wrong."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.core.contract import Contract
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import ValidationFailed, Verdict
from pipeproof.foreign import HandedBack, WhiteBox, watch
from pipeproof.foreign.rank import RankMade, digests
from pipeproof.foreign.validator import other_data
from tests.support.golden import golden
from tests.support.steps import Pairs, loss_fn, pairs

WIDTH = 8
RANKS = 2
Step = Callable[[nn.Module, list[Any]], Any]


def build_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)))


def data(seed: int = 0) -> Pairs:
    return pairs(seed=seed)


def half(model: nn.Module) -> nn.Sequential:
    """This rank's half of the model."""
    assert isinstance(model, nn.Sequential)
    return model[2 * dist.get_rank() : 2 * dist.get_rank() + 2]


def train(stage: nn.Module, microbatches: list[Any]) -> list[float]:
    """A microbatch at a time through two ranks; the losses on the last."""
    losses = []
    for x, target in microbatches:
        if dist.get_rank() == 0:
            y = stage(x)
            dist.send(y.detach(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
        else:
            x = torch.empty_like(x)
            dist.recv(x, 0)
            loss = loss_fn(stage(x.requires_grad_()), target)
            (loss / len(microbatches)).backward()
            dist.send(x.grad, 0)
            losses.append(loss.item())
    return losses


def plain(model: nn.Module, microbatches: list[Any]) -> Any:
    stage = half(model)
    return stage, train(stage, microbatches)


def judged(whitebox: WhiteBox, step: Step, **more: Any) -> Verdict:
    wanted = {"reference": build_model, "microbatches": data(), "ranks": RANKS, "loss_fn": loss_fn} | more
    return whitebox.validate(step, **wanted)


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {law.name: law.outcome for law in verdict.laws}


def test_a_right_step_passes_bit_for_bit(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, plain)
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise")
    assert outcomes(verdict) == {
        "parameters-once": "pass",
        "initial-weights": "pass",
        "microbatches": "not seen",
        "boundaries": "not seen",
        "loss": "pass",
        "presence": "pass",
        "gradient": "pass",
        "shards": "not applicable",
        "replicas": "not applicable",
        "tied-copies": "not applicable",
        "grad-norm": "not seen",
    }
    assert verdict.law("gradient").exact == 16
    assert "test_a_right_step_passes_bit_for_bit" in verdict.replay


def test_a_norm_is_judged_where_it_is_reported(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any], factor: float = 1.0) -> Any:
        stage = half(model)
        losses = train(stage, microbatches)
        squares = sum(p.grad.double().square().sum() for p in stage.parameters() if p.grad is not None)
        dist.all_reduce(squares)
        return HandedBack(stage, losses, factor * squares.sqrt())

    assert judged(whitebox, step).law("grad-norm").checked == RANKS
    wrong = judged(whitebox, lambda model, microbatches: step(model, microbatches, 1.01))
    assert outcomes(wrong)["grad-norm"] == "fail"


def test_gradients_by_name_and_one_loss_are_enough(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        losses = train(half(model), microbatches)
        first = 2 * dist.get_rank()
        gradients = {n: p.grad for n, p in model.named_parameters() if int(n[0]) in (first, first + 1)}
        return gradients, (sum(losses) / len(losses) if losses else None)

    verdict = judged(whitebox, step)
    assert verdict.verdict == "pass"
    golden(verdict.law("initial-weights").note)


def test_without_losses_nothing_is_known_of_them(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda model, microbatches: (plain(model, microbatches)[0], None))
    assert (verdict.verdict, verdict.law("loss").reasons) == ("unknown", (Reason.UNREPORTED,))


def test_a_step_that_hands_back_no_module_anywhere_is_no_pass(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda model, microbatches: ([], plain(model, microbatches)[1]))
    assert verdict.verdict == "fail"
    assert verdict.law("parameters-once").wrong == 16
    assert verdict.law("gradient").outcome == "unknown"


def renumbered(model: nn.Module, microbatches: list[Any]) -> Any:
    """Copies whose names say something else: rank 1's are called as rank 0's in the reference."""
    first = 2 * dist.get_rank()
    own = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
    own.load_state_dict({f"{int(n[0]) - first}{n[1:]}": p for n, p in model.named_parameters() if int(n[0]) >= first},
                        strict=False)  # fmt: skip
    return own, train(own, microbatches)


def test_copies_under_other_names_are_known_by_their_weights(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, renumbered)
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise")


def test_a_step_can_tell_the_names_and_names_comes_before_it(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        stage = nn.Sequential(*half(model))
        losses = train(stage, microbatches)
        gradients = {f"mine.{n}": p.grad for n, p in stage.named_parameters()}
        return HandedBack([], losses, gradients=gradients, names=lambda n: f"{int(n[5]) + 2 * dist.get_rank()}{n[6:]}")

    assert judged(whitebox, step).verdict == "pass"
    assert judged(whitebox, step, contract=Contract(names={"mine.": "yours."})).law("parameters-once").outcome == "fail"


def test_names_can_be_mapped_by_prefix_or_by_a_function(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        stage = nn.Sequential(*half(model))
        losses = train(stage, microbatches)
        return {f"rank{dist.get_rank()}.{n}": p.grad for n, p in stage.named_parameters()}, losses

    prefixes = {"rank0.": "", "rank1.0": "2", "rank1.1": "3"}
    assert judged(whitebox, step, contract=Contract(names=prefixes)).verdict == "pass"
    assert (
        judged(whitebox, step, contract=Contract(names=lambda n: f"{int(n[6]) + 2 * int(n[4])}{n[7:]}")).verdict
        == "pass"
    )
    verdict = judged(whitebox, step, contract=Contract(names={"rank0.": "", "rank1.": "layers."}))
    assert verdict.verdict == "fail"
    first = verdict.mismatches[0]
    assert (first.rank, first.parameter) == (1, "rank1.0.0.bias")
    golden(first.seen)
    listed = verdict.law("parameters-once")
    assert (listed.wrong, listed.checked) == (16, 24)
    assert listed.note.startswith("unknown: rank1.0.0.bias, rank1.0.0.weight, ")


def test_parameters_unknown_to_the_reference_are_listed(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        stage, losses = plain(model, microbatches)
        return [stage, nn.Linear(3, 3)] if dist.get_rank() else [stage], losses

    verdict = judged(whitebox, step)
    assert outcomes(verdict)["gradient"] == "pass"
    assert [(m.law, m.rank, m.parameter) for m in verdict.mismatches] == [
        ("parameters-once", 1, name) for name in ("bias", "weight")
    ]
    golden("\n".join(m.seen for m in verdict.mismatches))


def test_a_parameter_held_twice_or_never_fails(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        _, losses = plain(model, microbatches)
        return model[0:2] if dist.get_rank() else model[0:1], losses  # type: ignore[index]

    verdict = judged(whitebox, step)
    found = {(m.parameter, m.seen) for m in verdict.mismatches if m.law == "parameters-once"}
    assert ("2.0.bias", "held 0 times") in found
    assert ("0.0.bias", "held 1 times") in found


def wrong_weights(model: nn.Module, microbatches: list[Any]) -> Any:
    stage = half(model)
    if dist.get_rank():
        with torch.no_grad():
            stage[1][1].weight.mul_(1.5)
    return stage, train(stage, microbatches)


def test_weights_that_differ_before_the_step_are_said_and_nothing_else_is_blamed(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, wrong_weights)
    assert outcomes(verdict)["initial-weights"] == "fail"
    assert [(m.law, m.rank, m.parameter) for m in verdict.mismatches] == [("initial-weights", 1, "3.1.weight")]
    assert "1.5 times expected" in verdict.mismatches[0].seen
    assert verdict.law("gradient").reasons == (Reason.EARLIER,)


def test_an_optimizer_at_the_end_of_the_step_is_no_other_weights(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        handed = plain(model, microbatches)
        torch.optim.SGD(handed[0].parameters(), lr=0.1).step()
        return handed

    assert judged(whitebox, step).verdict == "pass"


def other_microbatches(model: nn.Module, microbatches: list[Any]) -> Any:
    stage = watch(half(model))
    return stage, train(stage, data(seed=1)[:1] + microbatches[1:])


def test_other_microbatches_than_the_references_are_found_at_the_first_stage(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, other_microbatches)
    first = verdict.mismatches[0]
    assert (first.law, first.rank, first.stage, first.microbatch, first.action) == ("boundaries", 0, 0, 0, "0F0")
    assert first.expected == "microbatch 0's"
    assert first.seen.startswith("input: no microbatch's")


def repeated_data(model: nn.Module, microbatches: list[Any]) -> Any:
    stage = watch(half(model))
    return stage, train(stage, [microbatches[0], microbatches[0], *microbatches[2:]])


def test_a_microbatch_that_comes_twice_is_named(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, repeated_data)
    assert {(m.stage, m.found) for m in verdict.mismatches if m.law == "microbatches"} >= {
        (0, (0, 0, 2, 3)),
        (1, (0, 0, 2, 3)),
    }


def test_unwatched_other_microbatches_fail_too(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        stage = half(model)
        return stage, train(stage, data(seed=1))

    failing = {name for name, outcome in outcomes(judged(whitebox, step)).items() if outcome == "fail"}
    assert failing == {"loss", "gradient"}


def test_a_watched_step_is_judged_to_the_bit_in_the_order_it_ran(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        stage = watch(half(model))
        return stage, train(stage, microbatches[::-1])[::-1]

    verdict = judged(whitebox, step)
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise")
    assert verdict.law("boundaries").checked == verdict.law("boundaries").exact > 4 * 4 * RANKS - 8
    assert verdict.law("microbatches").outcome == "pass"


def test_a_trace_tells_the_order_too(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        stage, rank = half(model), dist.get_rank()
        losses = train(stage, microbatches[::-1])[::-1]
        return stage, losses, None, [f"{rank}{kind}{m}" for m in (3, 2, 1, 0) for kind in "FB"]

    verdict = judged(whitebox, step)
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise")
    assert outcomes(verdict)["microbatches"] == "pass"
    short = judged(whitebox, lambda model, microbatches: (*step(model, microbatches)[:3], ["0F0", "1F0"]))
    assert outcomes(short)["microbatches"] == "fail"


def test_watching_changes_no_bit_and_may_stay_in_the_code() -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    assert watch(stage) is stage
    assert not stage._forward_hooks


# What cannot be judged.


def raises(model: nn.Module, microbatches: list[Any]) -> Any:
    if dist.get_rank() == 1:
        raise RuntimeError("boom")
    return plain(model, microbatches)


def test_a_step_that_raises_on_one_rank(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, raises)
    assert (verdict.verdict, verdict.exit_status) == ("unknown", 3)
    golden(verdict.details.splitlines()[0])
    assert "in raises" in verdict.failure
    assert "in run_step" not in verdict.failure, "the traceback is the user's, not ours"


def test_a_step_that_hands_back_nothing(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        return None

    verdict = judged(whitebox, step)
    golden(verdict.details.splitlines()[0].partition(": ")[2])
    assert "Traceback" not in verdict.details


def unseeded() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH))


def test_weights_that_nobody_seeded(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, plain, reference=unseeded)
    assert verdict.verdict == "unknown"
    golden(verdict.details.splitlines()[0])


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Identity())


def test_dropout_that_nobody_seeded(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, plain, reference=dropping)
    assert verdict.verdict == "unknown"
    golden(verdict.details.splitlines()[0], numbers=False)


def by_rank() -> nn.Module:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def test_a_reference_that_differs_between_ranks(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, plain, reference=by_rank)
    assert verdict.verdict == "unknown"
    golden(verdict.details.splitlines()[0])


def test_microbatches_that_differ_between_ranks_of_torchrun() -> None:
    made = [RankMade((), (), None, None, None, {}, digests(data(seed))) for seed in (0, 1)]
    assert other_data(made[:1], digests(data())) == ""
    golden(other_data(made, digests(data())))
    golden(other_data(made[:1], digests(data()[:3])))


def hangs(model: nn.Module, microbatches: list[Any]) -> Any:
    peer = 1 - dist.get_rank()
    dist.irecv(torch.empty(1), peer).wait()  # both wait: nobody has sent
    return None


def test_a_hang_says_who_waits_for_whom_within_the_bound(whitebox: WhiteBox) -> None:
    judged(whitebox, plain)  # ranks are there
    began = time.monotonic()
    verdict = judged(whitebox, hangs, timeout_s=2.0)
    assert time.monotonic() - began < 10
    assert verdict.verdict == "unknown"
    golden(verdict.details.splitlines()[0])
    assert verdict.failure.count("in hangs") == 2
    assert judged(whitebox, plain).verdict == "pass", "the next run is sound"


def test_a_verdict_is_raised_with_all_that_it_says(whitebox: WhiteBox) -> None:
    with pytest.raises(ValidationFailed, match=r"(?s)FAIL .*initial-weights \(1 of 16"):
        judged(whitebox, wrong_weights).raise_if_failed()
