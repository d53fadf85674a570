"""Runtimes for cases, with their limits: plain facts, without imports."""

from collections.abc import Mapping
from types import MappingProxyType

OWN, TORCH, TORCH_CSV = "pipeproof", "torch", "torch-csv"
RUNTIMES = (OWN, TORCH, TORCH_CSV)

# torch's class per family; other families run on torch-csv, its runtime for custom schedules.
TORCH_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "looped-bfs": "ScheduleLoopedBFS",
        "zb-h1": "ScheduleInterleavedZeroBubble",
        "zb-v": "ScheduleZBVZeroBubble",
        "dualpipev": "ScheduleDualPipeV",
    }
)
SINGLE = ("gpipe", "1f1b")  # torch classes with their own loop, for one stage per rank
# Models with parameters beyond any gradient's reach: DDP wants find_unused_parameters for them.
UNUSED = ("pair", "sometimes")
# unscaled: scale_grads=False, so the loss function divides. defer-recv: defer_pp_recv=True. whole: one batch, which
# torch splits. descending: microbatches from last to first, as custom schedules may have them.
OPTIONS = ("unscaled", "defer-recv", "whole", "descending")


def why_not(
    runtime: str,
    options: tuple[str, ...],
    *,
    schedule: str,
    model: str,
    shape: tuple[int, int, int, int],
    sizes_differ: bool,
    specimen: str,
) -> str:
    """Return why ``runtime`` cannot run a case, or "". ``shape``: ranks, stages, microbatches and replicas."""
    ranks, stages, microbatches, replicas = shape
    if runtime == OWN:
        foreign = [f"options={'+'.join(options)}"] * bool(options) + [f"replicas={replicas}"] * (replicas > 1)
        return f"{' and '.join(foreign)} are for torch: expected runtime=torch or torch-csv" if foreign else ""
    rounds = max(1, microbatches // ranks)
    one_rank = ranks == 1 or schedule in ("zb-v", "v-half", "v-min", "dualpipev")  # first and last stage share a rank
    reasons = (
        (runtime == TORCH and schedule not in TORCH_CLASSES, f"torch has no class for {schedule}: use {TORCH_CSV}"),
        (
            runtime == TORCH and schedule == "1f1b" and microbatches < stages,
            f"torch's 1F1B wants as many microbatches as stages, {stages}",
        ),
        (
            runtime == TORCH and schedule in ("interleaved", "zb-h1") and bool(microbatches % rounds),
            f"torch's class wants its {rounds} rounds to be of one length: {microbatches} microbatches are not",
        ),
        (sizes_differ, "torch receives into buffers of the first microbatch's shape: use microbatches of one size"),
        (
            model == "gpt-tied" and stages > 1 and not one_rank,
            "torch does not sum the gradients of tied parameters: their copies must be on one rank",
        ),
        (
            replicas > 1 and model == "batchnorm",
            "DDP gives all replicas the running statistics of the first: no single device has the same",
        ),
        (
            replicas > 1 and model == "gpt-tied" and stages > 1,
            "DDP wants a parameter in one module alone, and stages that tie one share it",
        ),
        (bool(specimen), f"specimen={specimen} is planted in pipeproof's own runtime"),
        ("defer-recv" in options and runtime == TORCH and schedule in SINGLE, "defer-recv is for its other classes"),
        ("descending" in options and runtime == TORCH, f"descending is an order of one's own: use {TORCH_CSV}"),
        ("whole" in options and model in ("dropout", "sometimes"), f"whole: {model} has inputs that cannot be split"),
    )
    return next((reason for holds, reason in reasons if holds), "")
