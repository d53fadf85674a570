from torch import nn

from pipeproof.wings.specimens import Fault, Needs, Specimen, register
from pipeproof.wings.specimens.planting import gradients_of, last, on_gradients


def halve(module: nn.Module) -> None:
    for gradient in gradients_of(module):
        gradient.mul_(0.5)


register(
    Specimen(
        name="last-stage-halved",
        summary="the last stage's gradients are halved",
        origin="our own trainer, before 2.1",
        fault=Fault("scale", law="gradient", stage=last, factor=lambda case: 0.5),
        needs=Needs(microbatches=2),
        plant=on_gradients(halve, last),
    )
)
