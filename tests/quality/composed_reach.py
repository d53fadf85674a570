"""What a chain of links can show of the specimens, and what it says of some in other words."""

_CODE = "the stage's own code is at fault, and runs again as it ran"
_START = "its weights, or its random numbers, are others from the start"
_EVALUATION = "evaluation is not compared"
_BUFFERS = "buffers are not compared"
OUT_OF_REACH = {
    "evaluation-in-training-mode": _EVALUATION,
    "evaluation-mode-stays": "its module gives the same in either mode",
    "evaluation-moves-statistics": _BUFFERS,
    "evaluation-divided-again": _EVALUATION,
    "statistics-counted-twice": _BUFFERS,
    "shared-weight-doubled": _CODE,
    "outputs-summed": _CODE,
    "recomputed-with-fresh-mask": _CODE,
    "mask-missing": _CODE,
    "other-epsilon": _CODE,
    "stage-in-bf16": _CODE,
    "layers-in-other-order": _CODE,
    "layer-skipped": _CODE,
    "layer-repeated": _CODE,
    "layers-counted-from-zero": _START,
    "dropout-other-seed": _START,
    "weights-of-other-seed": _START,
}
# Kinds that say less of what was planted, or say it as the tensors show it that crossed: by name, what is said.
SEEN_AS = {
    "auxiliary-loss": "altered",  # more flows to an output than was sent
    "evaluation-differentiates": "altered",  # an input that is no microbatch's
    "backward-of-another": "mispaired",
    "activation-repeated": "mispaired",
    "gradient-repeated": "mispaired",
    "gradients-crossed": "mispaired",
    "activation-partly-old": "altered",
    "activation-of-step-before": "altered",
    "side-input-missing": "uninitialised",
    "weight-halves-after-whole": "scale",
    "cut-along-tokens": "altered",
    # By how far parameters moved: another factor before the step would have moved them so.
    "updated-before-reduced": "clip",
    "tied-copy-other-rate": "clip",
    "update-skipped-on-stage": "clip",
    "updated-twice": "clip",
}
# What is right in a step that divides otherwise than it was told, by what a step may also do: it divides at last.
AS_TOLD = {"loss-undivided": frozenset({"boundary"})}
HANGS = {"message-lost"}
