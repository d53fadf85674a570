"""Checks of one job, step after step: what the last one tells of the next, in one process of one rank."""

import gc
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.last_check import LastCheck, last_check
from pipeproof.records.record import Record
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from tests.support.steps import WIDTH, backward, loss_fn, pairs


class Layer(nn.Linear):
    inside, cut = True, False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.inside else nullcontext():
            if not self.cut:
                return super().forward(x).float()
            return (x[:, :4] @ self.weight[:, :4].T + x[:, 4:] @ self.weight[:, 4:].T + self.bias).float()


def build() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Layer(WIDTH, WIDTH), nn.Tanh(), Layer(WIDTH, WIDTH))


@dataclass(frozen=True)
class Job:
    """Two steps, each held against a new reference, or a new record. around: one autocast is around both of them.

    cut: the second computes its products in two parts; rows: of its microbatches. main: gradients are handed over from
    tensors of the job's own. clears: between the steps.
    """

    around: bool = False
    cut: bool = False
    rows: int = 4
    main: bool = False
    clears: bool = True
    recorded: bool = False
    rate: float = 0.01

    def run(self) -> list[Verdict]:
        model, found = build(), []
        sums = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16) if self.around else nullcontext():
            for number in range(2):
                for layer in (model[0], model[2]):
                    layer.inside, layer.cut = not self.around, self.cut and number == 1
                found.append(self._step(model, sums, number))
                for one in sums.values() if self.clears else ():
                    one.zero_()
        return found

    def _step(self, model: nn.Sequential, sums: dict[str, Tensor], number: int) -> Verdict:
        data = pairs(3, rows=self.rows if number else 4, seed=number)
        with check_step(model, data, against=self._against(model, data)) as check:
            losses = backward(model, data, by=lambda y, target: loss_fn(y.float(), target))
            for name, one in model.named_parameters():
                sums[name] += one.grad
            check.gradients(sums if self.main else None)
            check.report(losses=losses)
        with torch.no_grad():
            for one in model.parameters():
                one -= self.rate * one.grad
                one.grad = None
        return check.verdict

    def _against(self, model: nn.Sequential, data: list[tuple[Tensor, Tensor]]) -> SingleDevice | Record:
        if not self.recorded:
            return SingleDevice(build, loss_fn)
        beside = build()
        beside.load_state_dict(model.state_dict())
        return record_step(beside, data, loss_fn=loss_fn)


SECOND = {
    "right": (Job(), "pass", "bitwise", []),
    "a cast that outlives a small update": (Job(around=True), "fail", "none", ["stale-tensor"]),
    "a large one": (Job(around=True, rate=0.5), "fail", "none", ["stale-tensor"]),
    "beside a record": (Job(around=True, recorded=True), "unknown", "none", []),
    "other kernels": (Job(cut=True), "unknown", "none", []),
    "other kernels for other shapes": (Job(cut=True, rows=5), "pass", "bf16", []),
    "sums of its own": (Job(main=True), "pass", "bitwise", []),
    "sums that are not cleared": (Job(main=True, clears=False), "fail", "none", ["stale-gradient"]),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_step_after_one_that_was_bit_for_bit_is_held_to_that(name: str) -> None:
    job, outcome, tier, causes = SECOND[name]
    first, second = job.run()
    assert (first.outcome, first.tier) == ("pass", "bitwise"), str(first)
    assert (second.outcome, second.tier) == (outcome, tier), str(second)
    assert [one.kind for one in second.causes] == causes, str(second)


def test_what_is_remembered_goes_with_the_job() -> None:
    model = build()
    with check_step(model, data := pairs(3), against=SingleDevice(build, loss_fn)) as check:
        losses = backward(model, data)
        check.gradients()
        check.report(losses=losses)
    kept = last_check({0: model})
    assert kept.bitwise_laws(data) == kept.exact == {"loss", "gradient"}, str(check.verdict)
    assert kept.bitwise_laws(pairs(3, rows=5)) == kept.bitwise_laws(pairs(2)) == kept.bitwise_laws(None) == frozenset()
    assert {*kept.weights} == {name for name, _ in model.named_parameters()}
    assert last_check({0: build()}) == last_check({}) == LastCheck()
    del check, model
    gc.collect()
    assert kept.added_to == {}
