"""Faults of scale: the right sum, multiplied wrongly."""

from collections.abc import Callable, Mapping

from torch import Tensor

from pipeproof.cases.specimens.planting import (
    NORM,
    Call,
    Changes,
    counted,
    first,
    middle,
    multiplied,
    norm_weight,
    on_each,
    on_gradients,
    on_stages,
    on_steps,
    scaled,
)
from pipeproof.cases.specimens.specimen import Fault, Needs, Plant, Specimen, halved
from pipeproof.observers.wrappers import Pairs, Steps
from pipeproof.pipeline.boundary import Gradients
from pipeproof.pipeline.stage import Goal
from pipeproof.reference.data import IGNORED

_MANY = Needs(microbatches=2)


def loss_divided(divisor: Callable[[Goal, int], float]) -> Plant:
    """The last stage's loss is divided by ``divisor(its goal, M)`` before its backward."""

    def goal(goal: Goal, call: Call) -> Goal:
        return goal._replace(divisor=divisor(goal, call.schedule.microbatches))

    return on_stages(Changes(goal=goal))


def _targets(goal: Goal) -> Tensor:
    assert isinstance(goal.target, Tensor), "the reference's targets are tensors"
    return goal.target


def _own_count(goal: Goal, n_microbatches: int) -> float:
    """A mean over the microbatch's own counting targets (tokens, or rows), then over microbatches."""
    target = _targets(goal)
    count = len(target) if target.is_floating_point() else int((target != IGNORED).sum())
    return float(count * n_microbatches)


def _divided(gradients: Gradients, call: Call) -> Gradients:
    return multiplied(gradients, 1 / call.schedule.microbatches)


def _divide_what_is_there(microbatches: Pairs, steps: Steps) -> Pairs:
    for stage in steps.parts.stages:
        scaled(1 / len(microbatches))(stage.module)
    return microbatches


def _auxiliary(gradients: Gradients, call: Call) -> Gradients:
    """With the gradient of a mean square of the stage's output."""
    output, (gradient, *rest) = call.outputs[0], gradients
    assert gradient is not None, "a stage's first output has a gradient"
    return (gradient + 0.02 * output / output.numel(), *rest)


SPECIMENS: Mapping[str, Specimen] = {
    "loss-undivided": Specimen(
        summary="the reported loss is divided by the number of microbatches, the one differentiated is not",
        origin="huggingface/picotron at 59714b1; pytorch/pytorch#144352; pytorch/torchtitan#2972",
        classes=("tA", "mA"),
        fault=Fault("scale", "gradient", factor=lambda case: float(case.microbatches)),
        needs=Needs(microbatches=2, loss="mean"),
        plant=loss_divided(lambda goal, count: 1.0),
    ),
    "loss-divided-twice": Specimen(
        summary="the loss is divided by the number of microbatches twice",
        origin="areal-project/AReaL#1273; verl-project/verl#5867",
        classes=("tA", "mA"),
        fault=Fault("scale", "gradient", factor=lambda case: 1 / case.microbatches),
        needs=_MANY,
        plant=loss_divided(lambda goal, count: goal.divisor * count),
    ),
    "divided-on-every-stage": Specimen(
        summary="every stage divides by the number of microbatches what it hands back, so early stages learn nothing",
        origin="deepspeedai/DeepSpeed#8152",
        classes=("mA",),
        fault=Fault("scale", "gradient"),
        needs=Needs(microbatches=2, stages=2),
        plant=on_stages(Changes(hands=_divided)),
    ),
    "sum-rescaled": Specimen(
        summary="each call divides whatever gradients there are, so those of an earlier call are divided again",
        origin="pytorch/torchtitan#1733",
        classes=("tA", "mA"),
        fault=Fault("scale", "gradient", alike=("extra-term",)),
        needs=Needs(microbatches=2, plan=("accumulate", "train")),
        drive=on_steps(given=_divide_what_is_there, operation=""),
    ),
    "weight-half-undivided": Specimen(
        summary="the scale factor reaches the input half of a backward and not the weight half",
        origin="pytorch/pytorch#164777",
        classes=("tA", "tC"),
        fault=Fault("scale", "gradient", factor=lambda case: float(case.microbatches)),
        needs=Needs(microbatches=2, split=True),
        plant=counted(lambda schedule, stage: dict.fromkeys(halved(schedule, stage), float(schedule.microbatches))),
    ),
    "mean-of-means": Specimen(
        summary="losses are averaged over each microbatch's tokens, then over microbatches, whatever their counts",
        origin="pytorch/torchtitan#1842; NVIDIA/Megatron-LM adfa873d",
        classes=("tA", "mA"),
        fault=Fault("unequal-weights", "gradient"),
        needs=Needs(microbatches=2, loss="tokens", unequal=True),
        plant=loss_divided(_own_count),
    ),
    "padding-counted": Specimen(
        summary="the token count that divides the loss includes targets that are ignored",
        origin="NVIDIA/Megatron-LM#2417",
        classes=("mA",),
        fault=Fault("scale", "gradient"),
        needs=Needs(models=("gpt", "gpt-tied"), loss="tokens", unequal=True),
        plant=loss_divided(lambda goal, count: float(_targets(goal).numel() * count)),
    ),
    "count-off-by-one": Specimen(
        summary="the token count that divides the loss is one too many",
        origin="NVIDIA/Megatron-LM#3159 (a count off by a token per sequence: the smallest effect in any report)",
        classes=("mA",),
        fault=Fault("scale", "gradient"),
        needs=Needs(loss="tokens"),
        plant=loss_divided(lambda goal, count: goal.divisor + 1.0),
    ),
    "replicas-summed": Specimen(
        summary="one stage's gradients are summed over two replicas where the others' are averaged",
        origin="pytorch/torchtitan#2318",
        classes=("tD", "mB"),
        fault=Fault("scale", "gradient", stage=middle, factor=lambda case: 2.0),
        plant=on_gradients(scaled(2.0), middle),
    ),
    "layernorm-doubled": Specimen(
        summary="the gradient of one LayerNorm weight is reduced over ranks that hold the same values: twice too large",
        origin="NVIDIA/Megatron-LM#1528",
        classes=("mB",),
        fault=Fault("scale", "gradient", stage=middle, parameter=NORM, factor=lambda case: 2.0),
        plant=on_gradients(on_each(lambda gradient: gradient.mul_(2.0), of=norm_weight), middle),
    ),
    "auxiliary-loss": Specimen(
        summary="an auxiliary loss inside the first stage adds its gradient for each microbatch, undivided",
        origin="NVIDIA/Megatron-LM#4070; NVIDIA-NeMo/Automodel#3359",
        classes=("tA", "mA"),
        fault=Fault("extra-term", "gradient", stage=first),
        needs=Needs(stages=2),
        plant=on_stages(Changes(given=_auxiliary), first),
    ),
}
