"""Faults of scale: the right sum, multiplied wrongly."""

from collections.abc import Callable

from torch import Tensor, nn

from pipeline.boundary import Gradients, Tensors
from pipeline.schedule import Schedule
from pipeline.stage import Goal, Stage
from reference.data import IGNORED
from validation.cases.specimens.planting import (
    NORM,
    ONE,
    ONE_OF_TWO,
    TWO_OF_TWO,
    TWO_STAGES,
    Times,
    first,
    middle,
    norm_weight,
    on_gradients,
    on_stages,
    scaled,
)
from validation.cases.specimens.specimen import Fault, Needs, Plant, Specimen
from validation.observers.wrappers import AroundStage, AroundSteps, Pairs

_MANY = Needs(microbatches=2)


class _Divided(AroundStage):
    """The last stage's loss is divided by ``divisor(its goal, M)`` before its backward."""

    def __init__(self, inner: Stage, schedule: Schedule, divisor: Callable[[Goal, int], float]) -> None:
        super().__init__(inner)
        self._microbatches = schedule.microbatches
        self._divisor = divisor

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        if goal is not None:
            goal = goal._replace(divisor=self._divisor(goal, self._microbatches))
        return self.inner.forward(microbatch, inputs, goal)


def _divided(divisor: Callable[[Goal, int], float]) -> Plant:
    return on_stages(lambda stage, schedule: _Divided(stage, schedule, divisor))


def _targets(goal: Goal) -> Tensor:
    assert isinstance(goal.target, Tensor), "the reference's targets are tensors"
    return goal.target


def _own_count(goal: Goal, n_microbatches: int) -> float:
    """A mean over the microbatch's own counting targets (tokens, or rows), then over microbatches."""
    target = _targets(goal)
    count = len(target) if target.is_floating_point() else int((target != IGNORED).sum())
    return float(count * n_microbatches)


class _HandsOnDivided(AroundStage):
    """What a stage hands back is divided by the number of microbatches once more."""

    def __init__(self, inner: Stage, schedule: Schedule) -> None:
        super().__init__(inner)
        self._divisor = schedule.microbatches

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self._divided(self.inner.backward(microbatch, gradients))

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self._divided(self.inner.backward_input(microbatch, gradients))

    def _divided(self, gradients: Gradients) -> Gradients:
        return tuple(None if gradient is None else gradient / self._divisor for gradient in gradients)


class _DividesWhatIsThere(AroundSteps):
    """A step first divides the gradients that earlier calls have left."""

    def given(self, operation: str, microbatches: Pairs) -> Pairs:
        for stage in self.parts.stages:
            scaled(1 / len(microbatches))(stage.module)
        return microbatches


class _Auxiliary(AroundStage):
    """Adds the gradient of an auxiliary loss, a mean square of the stage's output, for every microbatch."""

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self._outputs: dict[int, Tensor] = {}

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        outputs = self.inner.forward(microbatch, inputs, goal)
        self._outputs[microbatch] = outputs[0].detach()
        return outputs

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self.inner.backward(microbatch, self._more(microbatch, gradients))

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self.inner.backward_input(microbatch, self._more(microbatch, gradients))

    def _more(self, microbatch: int, gradients: Gradients) -> Gradients:
        output, (gradient, *rest) = self._outputs.pop(microbatch), gradients
        assert gradient is not None, "a stage's first output has a gradient"
        return (gradient + 0.02 * output / output.numel(), *rest)


def _double_norm(module: nn.Module) -> None:
    gradient = norm_weight(module).grad
    if gradient is not None:
        gradient.mul_(2.0)


SPECIMENS = (
    Specimen(
        name="loss-undivided",
        summary="the reported loss is divided by the number of microbatches, the one differentiated is not",
        origin="huggingface/picotron at 59714b1; pytorch/pytorch#144352; pytorch/torchtitan#2972",
        classes=("tA", "mA"),
        smallest=ONE_OF_TWO,
        law="gradient",
        fault=Fault("scale", factor=lambda case: float(case.microbatches)),
        needs=Needs(microbatches=2, loss="mean"),
        plant=_divided(lambda goal, count: 1.0),
    ),
    Specimen(
        name="loss-divided-twice",
        summary="the loss is divided by the number of microbatches twice",
        origin="areal-project/AReaL#1273; verl-project/verl#5867",
        classes=("tA", "mA"),
        smallest=ONE_OF_TWO,
        law="gradient",
        fault=Fault("scale", factor=lambda case: 1 / case.microbatches),
        needs=_MANY,
        plant=_divided(lambda goal, count: goal.divisor * count),
    ),
    Specimen(
        name="divided-on-every-stage",
        summary="every stage divides by the number of microbatches what it hands back, so early stages learn nothing",
        origin="deepspeedai/DeepSpeed#8152",
        classes=("mA",),
        smallest=TWO_OF_TWO,
        law="gradient",
        fault=Fault("scale"),
        needs=Needs(microbatches=2, stages=2),
        plant=on_stages(_HandsOnDivided),
    ),
    Specimen(
        name="sum-rescaled",
        summary="each call divides whatever gradients there are, so those of an earlier call are divided again",
        origin="pytorch/torchtitan#1733",
        classes=("tA", "mA"),
        smallest="naive r1 s1 m2 split=1 model=mlp plan=accumulate+train seed=0",
        law="gradient",
        fault=Fault("scale", alike=("extra-term",)),
        needs=Needs(microbatches=2, plan=("accumulate", "train")),
        drive=_DividesWhatIsThere,
    ),
    Specimen(
        name="weight-half-undivided",
        summary="the scale factor reaches the input half of a backward and not the weight half",
        origin="pytorch/pytorch#164777",
        classes=("tA", "tC"),
        smallest="zb-h1 r1 s1 m2 split=1 model=mlp plan=train seed=0",
        law="gradient",
        fault=Fault("scale", factor=lambda case: float(case.microbatches)),
        needs=Needs(microbatches=2, split=True),
        plant=on_stages(
            lambda stage, schedule: Times(
                stage, dict.fromkeys(range(schedule.microbatches), float(schedule.microbatches)), whole=False
            )
        ),
    ),
    Specimen(
        name="mean-of-means",
        summary="losses are averaged over each microbatch's tokens, then over microbatches, whatever their counts",
        origin="pytorch/torchtitan#1842; NVIDIA/Megatron-LM adfa873d",
        classes=("tA", "mA"),
        smallest="naive r1 s1 m2 split=1 model=mlp loss=tokens unequal plan=train seed=0",
        law="gradient",
        fault=Fault("unequal-weights"),
        needs=Needs(microbatches=2, loss="tokens", unequal=True),
        plant=_divided(_own_count),
    ),
    Specimen(
        name="padding-counted",
        summary="the token count that divides the loss includes targets that are ignored",
        origin="NVIDIA/Megatron-LM#2417",
        classes=("mA",),
        smallest="naive r1 s1 m1 split=1 model=gpt loss=tokens unequal plan=train seed=0",
        law="gradient",
        fault=Fault("scale"),
        needs=Needs(models=("gpt", "gpt-tied"), loss="tokens", unequal=True),
        plant=_divided(lambda goal, count: float(_targets(goal).numel() * count)),
    ),
    Specimen(
        name="count-off-by-one",
        summary="the token count that divides the loss is one too many",
        origin="NVIDIA/Megatron-LM#3159 (a count off by a token per sequence: the smallest effect in any report)",
        classes=("mA",),
        smallest="naive r1 s1 m1 split=1 model=mlp loss=tokens plan=train seed=0",
        law="gradient",
        fault=Fault("scale"),
        needs=Needs(loss="tokens"),
        plant=_divided(lambda goal, count: goal.divisor + 1.0),
    ),
    Specimen(
        name="replicas-summed",
        summary="one stage's gradients are summed over two replicas where the others' are averaged",
        origin="pytorch/torchtitan#2318",
        classes=("tD", "mB"),
        smallest=ONE,
        law="gradient",
        fault=Fault("scale", stage=middle, factor=lambda case: 2.0),
        plant=on_gradients(scaled(2.0), middle),
    ),
    Specimen(
        name="layernorm-doubled",
        summary="the gradient of one LayerNorm weight is reduced over ranks that hold the same values: twice too large",
        origin="NVIDIA/Megatron-LM#1528",
        classes=("mB",),
        smallest=ONE,
        law="gradient",
        fault=Fault("scale", stage=middle, parameter=NORM, factor=lambda case: 2.0),
        plant=on_gradients(_double_norm, middle),
    ),
    Specimen(
        name="auxiliary-loss",
        summary="an auxiliary loss inside the first stage adds its gradient for each microbatch, undivided",
        origin="NVIDIA/Megatron-LM#4070; NVIDIA-NeMo/Automodel#3359",
        classes=("tA", "mA"),
        smallest=TWO_STAGES,
        law="gradient",
        fault=Fault("extra-term", stage=first),
        needs=Needs(stages=2),
        plant=on_stages(lambda stage, schedule: _Auxiliary(stage), first),
    ),
)
