from torch import nn

from validation.cases.specimens import Fault, Needs, Specimen, register
from validation.cases.specimens.planting import gradients_of, on_gradients


def halve(module: nn.Module) -> None:
    for gradient in gradients_of(module):
        gradient.mul_(0.5)


register(
    Specimen(
        name="last-stage-halved",
        summary="the last stage's gradients are halved",
        origin="our own trainer, before 2.1",
        smallest="gpipe r1 s1 m2 split=1 model=mlp plan=train",
        needs=Needs(microbatches=2),
        classes=(),
        law="gradient",
        fault=Fault("scale", stage=lambda stages: stages - 1, factor=lambda case: 0.5),
        plant=on_gradients(halve, lambda stages: stages - 1),
    )
)
