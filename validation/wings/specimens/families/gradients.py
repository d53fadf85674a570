"""Faults in sums of gradients: scale, sign, missing or misplaced shares, and tied copies."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from pipeproof.core.observe.wrappers import Pairs, Steps
from pipeproof.own.faults import Plant
from pipeproof.pipeline.boundary import Gradients
from pipeproof.pipeline.stage import Goal
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transport import Message
from pipeproof.reference.data import IGNORED
from pipeproof.wings.specimens.planting import (
    Call,
    Changes,
    Shares,
    copies,
    count_shares,
    first,
    last,
    middle,
    move_twice,
    multiply,
    norm_weight,
    on_each,
    on_gradients,
    on_modules,
    on_stages,
    on_steps,
    on_work,
    put_off,
    round_through,
    scale,
    squares_of,
    stages_at,
)
from pipeproof.wings.specimens.specimen import Entry, split_microbatches


def loss_divided(divisor: Callable[[Goal, int], float]) -> Plant:
    """Divide the last stage's loss by ``divisor(its goal, M)`` before its backward."""

    def goal(goal: Goal, call: Call) -> Goal:
        return goal._replace(divisor=divisor(goal, call.schedule.microbatches))

    return on_stages(Changes(goal=goal))


def _targets(goal: Goal) -> Tensor:
    assert isinstance(goal.target, Tensor), "the reference's targets are tensors"
    return goal.target


def _own_count(goal: Goal, n_microbatches: int) -> float:
    """Return the divisor for a mean over the microbatch's counting targets (tokens or rows), then over microbatches."""
    target = _targets(goal)
    count = len(target) if target.is_floating_point() else int((target != IGNORED).sum())
    return float(count * n_microbatches)


def _divide_what_is_there(microbatches: Pairs, steps: Steps) -> Pairs:
    on_modules(scale(1 / len(microbatches)))(steps.parts)
    return microbatches


def _auxiliary(gradients: Gradients, call: Call) -> Gradients:
    """Add the gradient of the mean square of the stage's output."""
    output, (gradient, *rest) = call.outputs[0], gradients
    assert gradient is not None, "a stage's first output has a gradient"
    return (gradient + 0.02 * output / output.numel(), *rest)


_TAG = 2**30 - 1  # unused by other messages


def _lose_first(module: nn.Module) -> None:
    next(parameter for parameter in module.parameters() if parameter.grad is not None).grad = None


def _give_to_frozen(module: nn.Module) -> None:
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def _average_with_wrong_rank(parts: Parts) -> None:
    """The group that averages a stage's gradients over replicas holds another stage in the replica's place."""
    transport, ranks = parts.transport, parts.program.schedule.placement[:2]
    if transport.rank in ranks:
        here = ranks.index(transport.rank)
        own = norm_weight(next(stage.module for stage in parts.stages if stage.index == here))[0]
        assert own.grad is not None, "a norm is trained"
        message = Message("gradient of a replica", ranks[1 - here], _TAG)
        sent = own.grad.detach().clone()
        transport.send(message, sent.view(torch.uint8))
        transport.post(message, sent.nbytes)
        own.grad = (own.grad + transport.receive(message).view(own.grad.dtype)) / 2
        transport.flush()


def _table(module: nn.Module) -> list[nn.Parameter]:
    """Return a stage's copy of the tied table."""
    return [p for name, p in module.named_parameters() if name in ("embed.token.weight", "head.logits.weight")][:1]


def _last_keeps_its_own(parts: Parts) -> None:
    own = copies(stages_at(parts, last))
    parts.gradients.reduce_tied()
    for parameter, gradient in own.items():
        parameter.grad = gradient


def _update_with_own(parts: Parts) -> Parts:
    """Give the optimizer a copy of gradients from before the reduction."""
    own = Shares()

    def keep(parts: Parts) -> None:
        own.update(copies([*stages_at(parts, first), *stages_at(parts, last)]))

    def scale(factor: float, parts: Parts) -> None:
        parts.gradients.scale(factor)
        for parameter, gradient in own.items():
            parameter.grad = gradient * factor

    return on_work(before=keep, scale=scale)(parts)


PLANTS: Mapping[str, Plant | Entry] = {
    "loss-undivided": loss_divided(lambda goal, count: 1.0),
    "loss-divided-twice": loss_divided(lambda goal, count: goal.divisor * count),
    "divided-on-every-stage": on_stages(
        Changes(hands=lambda gradients, call: multiply(gradients, 1 / call.schedule.microbatches))
    ),
    "sum-rescaled": Entry(drive=on_steps(given=_divide_what_is_there, operation="")),
    "weight-half-undivided": count_shares(
        lambda schedule, stage: dict.fromkeys(split_microbatches(schedule, stage), float(schedule.microbatches))
    ),
    "mean-of-means": loss_divided(_own_count),
    "padding-counted": loss_divided(lambda goal, count: float(_targets(goal).numel() * count)),
    "count-off-by-one": loss_divided(lambda goal, count: goal.divisor + 1.0),
    "replicas-summed": on_gradients(scale(2.0), middle),
    "layernorm-doubled": on_gradients(on_each(lambda gradient: gradient.mul_(2.0), of=norm_weight), middle),
    "auxiliary-loss": on_stages(Changes(given=_auxiliary), first),
    "stage-negated": on_gradients(scale(-1.0), middle),
    "gradient-none": on_gradients(_lose_first, last),
    "layernorm-zero": on_gradients(on_each(Tensor.zero_, of=norm_weight), middle),
    "gradients-all-zero": on_gradients(scale(0.0)),
    "gradient-rolled": on_gradients(on_each(lambda gradient: gradient.copy_(gradient.roll(1)), of=norm_weight), middle),
    "gradients-rounded": on_gradients(
        on_each(lambda gradient: gradient.copy_(round_through(gradient, torch.bfloat16))), middle
    ),
    "frozen-gets-gradient": on_gradients(_give_to_frozen),
    "averaged-over-wrong-group": on_work(before=_average_with_wrong_rank),
    "tied-not-reduced": on_work(reduce=lambda parts: None),
    "norm-counts-tied-twice": on_work(
        squares=lambda _, parts: [one for stage in parts.stages for one in squares_of(stage.module)]
    ),
    "tied-reduced-twice": on_work(reduced=lambda parts: parts.gradients.reduce_tied()),
    "tied-last-left-out": on_work(reduce=_last_keeps_its_own),
    "tied-share-lost": on_gradients(on_each(Tensor.zero_, of=_table), first),
    "tied-shares-misaligned": on_gradients(
        on_each(lambda one: one.copy_(one.roll(one.shape[0] // 2, 0)), of=_table), last
    ),
    "tied-reduced-early": put_off(lambda call: call.microbatch == call.schedule.microbatches - 1, reduced=True),
    "updated-before-reduced": _update_with_own,
    "tied-copy-other-rate": Entry(drive=move_twice(last, _table)),
}
