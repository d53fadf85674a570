"""Faults in sums of gradients: scale, sign, missing or misplaced shares, and tied copies."""

from collections.abc import Callable, Mapping
from functools import partial

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
    NORM,
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
    second,
    squares_of,
    stages_at,
)
from pipeproof.wings.specimens.specimen import Fault, Needs, Specimen, row, split_microbatches

_MANY = Needs(microbatches=2)


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
    parts.gradients.reduce_tied()


def _reduce_twice(parts: Parts) -> None:
    parts.gradients.reduce_tied()
    parts.gradients.reduce_tied()


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

    def reduce(parts: Parts) -> None:
        own.update(copies([*stages_at(parts, first), *stages_at(parts, last)]))
        parts.gradients.reduce_tied()

    def scale(factor: float, parts: Parts) -> None:
        parts.gradients.scale(factor)
        for parameter, gradient in own.items():
            parameter.grad = gradient * factor

    return on_work(reduce=reduce, scale=scale)(parts)


_tied = partial(row, needs=Needs(models=("gpt-tied",), stages=2))

SPECIMENS: Mapping[str, Specimen] = {
    "loss-undivided": row(
        Fault("scale", "gradient", factor=lambda case: float(case.microbatches)),
        loss_divided(lambda goal, count: 1.0),
        Needs(microbatches=2, loss="mean"),
    ),
    "loss-divided-twice": row(
        Fault("scale", "gradient", factor=lambda case: 1 / case.microbatches),
        loss_divided(lambda goal, count: goal.divisor * count),
        _MANY,
    ),
    "divided-on-every-stage": row(
        Fault("scale", "gradient"),
        on_stages(Changes(hands=lambda gradients, call: multiply(gradients, 1 / call.schedule.microbatches))),
        Needs(microbatches=2, stages=2),
    ),
    "sum-rescaled": row(
        Fault("scale", "gradient", alike=("extra-term",)),
        drive=on_steps(given=_divide_what_is_there, operation=""),
        needs=Needs(microbatches=2, plan=("accumulate", "train")),
    ),
    "weight-half-undivided": row(
        Fault("scale", "gradient", factor=lambda case: float(case.microbatches)),
        count_shares(
            lambda schedule, stage: dict.fromkeys(split_microbatches(schedule, stage), float(schedule.microbatches))
        ),
        Needs(microbatches=2, split=True),
    ),
    "mean-of-means": row(
        Fault("unequal-weights", "gradient"),
        loss_divided(_own_count),
        Needs(microbatches=2, loss="tokens", unequal=True),
    ),
    "padding-counted": row(
        Fault("scale", "gradient"),
        loss_divided(lambda goal, count: float(_targets(goal).numel() * count)),
        Needs(models=("gpt", "gpt-tied"), loss="tokens", unequal=True),
    ),
    "count-off-by-one": row(
        Fault("scale", "gradient"), loss_divided(lambda goal, count: goal.divisor + 1.0), Needs(loss="tokens")
    ),
    "replicas-summed": row(
        Fault("scale", "gradient", stage=middle, factor=lambda case: 2.0), on_gradients(scale(2.0), middle)
    ),
    "layernorm-doubled": row(
        Fault("scale", "gradient", stage=middle, parameter=NORM, factor=lambda case: 2.0),
        on_gradients(on_each(lambda gradient: gradient.mul_(2.0), of=norm_weight), middle),
    ),
    "auxiliary-loss": row(
        Fault("extra-term", "gradient", stage=first), on_stages(Changes(given=_auxiliary), first), Needs(stages=2)
    ),
    "stage-negated": row(
        Fault("sign", "gradient", stage=middle, factor=lambda case: -1.0), on_gradients(scale(-1.0), middle)
    ),
    "gradient-none": row(Fault("missing", "presence", stage=last, parameter="."), on_gradients(_lose_first, last)),
    "layernorm-zero": row(
        Fault("zero", "gradient", stage=middle, parameter=NORM),
        on_gradients(on_each(Tensor.zero_, of=norm_weight), middle),
    ),
    "gradients-all-zero": row(Fault("zero", "gradient"), on_gradients(scale(0.0))),
    "gradient-rolled": row(
        Fault("altered", "gradient", stage=middle, parameter=NORM, alike=("computation",)),
        on_gradients(on_each(lambda gradient: gradient.copy_(gradient.roll(1)), of=norm_weight), middle),
    ),
    "gradients-rounded": row(
        Fault("rounded", "gradient", stage=middle),
        on_gradients(on_each(lambda gradient: gradient.copy_(round_through(gradient, torch.bfloat16))), middle),
    ),
    "frozen-gets-gradient": row(
        Fault("unexpected", "presence"), on_gradients(_give_to_frozen), Needs(models=("frozen",))
    ),
    "averaged-over-wrong-group": row(
        Fault("extra-term", "gradient", stage=second, parameter=NORM, alike=("scale",)),
        on_work(reduce=_average_with_wrong_rank),
        Needs(ranks=2, stages=2),
    ),
    "tied-not-reduced": _tied(Fault("tied-not-summed", "gradient"), on_work(reduce=lambda parts: None)),
    "norm-counts-tied-twice": _tied(
        Fault("norm", "grad-norm"),
        on_work(squares=lambda _, parts: [one for stage in parts.stages for one in squares_of(stage.module)]),
    ),
    "tied-reduced-twice": _tied(Fault("tied-doubled", "gradient", alike=("scale",)), on_work(reduce=_reduce_twice)),
    "tied-last-left-out": _tied(Fault("tied-not-summed", "gradient", stage=last), on_work(reduce=_last_keeps_its_own)),
    "tied-share-lost": _tied(
        Fault("tied-not-summed", "gradient", alike=("dropped",)), on_gradients(on_each(Tensor.zero_, of=_table), first)
    ),
    "tied-shares-misaligned": _tied(
        Fault("altered", "gradient", stage=last, alike=("extra-term", "computation")),
        on_gradients(on_each(lambda one: one.copy_(one.roll(one.shape[0] // 2, 0)), of=_table), last),
    ),
    "tied-reduced-early": _tied(
        Fault("tied-not-summed", "gradient", microbatches=lambda case: (case.microbatches - 1,)),
        put_off(lambda call: call.microbatch == call.schedule.microbatches - 1, reduced=True),
    ),
    "updated-before-reduced": _tied(
        Fault("update", "updated-parameters", alike=("tied-not-summed",)), _update_with_own
    ),
    "tied-copy-other-rate": _tied(
        Fault("update", "tied-copies", stage=last, parameter=r"head\.logits\.weight$"), drive=move_twice(last, _table)
    ),
}
