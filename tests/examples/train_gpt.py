"""Train a small GPT on real text with any schedule, and check it against one device on the way.

    torchrun --nproc-per-node 4 tests/examples/train_gpt.py --schedule 1f1b --layers 8 --microbatches 8 --steps 50

With --check every rank also trains the whole model by itself and compares, step by step, every microbatch's loss, the
gradient norm and its own stages' weights. Exit status 1 where they differ, after saying what differed first.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.core.limits import FP32
from pipeproof.core.tolerance import error, scalar_error
from pipeproof.own.stages import Slice, layers_of, owners, tied_across
from pipeproof.pipeline import PipelineSchedule, Schedule, ScheduleResult
from pipeproof.pipeline.gather import gather
from pipeproof.pipeline.partition import parse_split
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import build, canonical_name, virtuals
from pipeproof.pipeline.trace import Profile
from pipeproof.pipeline.transport import Transport
from pipeproof.reference.data import Batch, Shapes, microbatches
from pipeproof.reference.model import GPT
from pipeproof.reference.step import Expected, Recipe, Reference
from pipeproof.reports.table import profile_table


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


RECIPE = Recipe(max_norm=1.0, optimizer=adamw)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--virtual", type=int, help="stages per rank, for looped schedules (default 2)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--split", default="even", help="layers per stage: even, or sizes such as 3,1,2,2")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="length of a sequence")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tied", action="store_true", help="tie the head's weight to the token embedding's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with a single-device run, step by step")
    return parser.parse_args(words)


def batches_of(options: argparse.Namespace) -> Iterator[list[Batch]]:
    shapes = Shapes(rows=4, tokens=options.tokens)
    for step in range(options.steps):
        yield microbatches("gpt", count=options.microbatches, shapes=shapes, seed=options.seed * 10_000 + step)


def errors(slices: dict[int, nn.Module], result: ScheduleResult, expected: Expected) -> Iterator[tuple[str, float]]:
    """What this rank has of a step and its relative error, in the order of computing; 0.0 is equal bit for bit."""
    for m, (observed, wanted) in enumerate(zip(result.losses, expected.losses, strict=True)):
        yield f"the loss of microbatch {m}", scalar_error(observed, wanted)
    yield "the gradient norm", scalar_error(result.grad_norm or 0.0, expected.norm or 0.0)
    for stage, module in slices.items():
        for name, parameter in module.named_parameters():
            yield f"parameter {name} of stage {stage}", error(parameter.detach(), expected.parameters[stage, name])


@dataclass
class Check:
    """The whole model on one device beside the pipeline, and what on this rank first differed from it."""

    reference: Reference
    slices: dict[int, nn.Module]
    orders: dict[int, list[int]]  # by stage: the microbatches of its backwards
    worst: float = 0.0
    step: float = math.inf  # the first that differs
    story: str = ""

    def compare(self, step: int, batches: list[Batch], result: ScheduleResult) -> None:
        """Hold one training step against the single device's."""
        expected = self.reference.perform("train", batches, orders=self.orders)
        for what, size in errors(self.slices, result, expected):
            self.worst = max(self.worst, size)
            if size > FP32.least and not self.story:
                self.step, self.story = step, f"{what} differs by {size:.1e} relative (allowed {FP32.least:.1e})"

    def conclude(self, transport: Transport) -> None:
        """Say how all ranks fared. Every rank must call it; where something differs, all end with status 1."""
        worst, steps = zip(*gather(transport, [self.worst, self.step]), strict=True)
        if max(worst) <= FP32.least:
            if transport.rank == 0:
                tier = "bit for bit" if max(worst) == 0 else f"to {max(worst):.1e} relative (allowed {FP32.least:.1e})"
                print(f"check: losses, norms and weights of every step equal the single-device run's {tier}")
            return
        if transport.rank == steps.index(min(steps)):
            print(f"check: FAILED at step {self.step} on rank {transport.rank}: {self.story}", flush=True)
        gather(transport, [])  # nobody ends before that is said: a launcher ends all ranks with the first
        raise SystemExit(1)


def planned(options: argparse.Namespace, rank: int, ranks: int) -> tuple[Schedule, tuple[int, ...]]:
    """The schedule, and layers per stage. What cannot be ends all ranks with status 2, and rank 0 says why."""
    try:
        family = canonical_name(options.schedule)
        plan = build(
            family,
            ranks=ranks,
            virtual=options.virtual or virtuals(family, looped=2),
            microbatches=options.microbatches,
        )
        return plan, parse_split(options.split, layers=options.layers, stages=plan.n_stages)
    except ScheduleError as error:
        if rank == 0:
            print(f"train_gpt: {error}", file=sys.stderr, flush=True)
        dist.barrier()  # nobody ends before that is said: a launcher ends all ranks with the first
        raise SystemExit(2) from None


def train(options: argparse.Namespace, rank: int, ranks: int) -> None:
    plan, split = planned(options, rank, ranks)
    torch.manual_seed(options.seed)  # the same weights on every rank
    model = GPT(options.layers, tied=options.tied)
    slices: dict[int, nn.Module] = {s: Slice(model, layers_of(split)[s]) for s in plan.stages_of(rank)}

    schedule = PipelineSchedule(
        kind=plan,
        n_microbatches=options.microbatches,
        stages=list(slices.values()),
        loss_fn=model.mean_loss,
        optimizer=adamw([parameter for module in slices.values() for parameter in module.parameters()]),
        tied=tied_across(model, split),
    )
    check = Check(Reference(model, owner=owners(model, split), recipe=RECIPE), slices, backwards_of(plan))
    profiles = []
    for step, batches in enumerate(batches_of(options)):
        result = schedule.train_step([(batch.inputs, batch.target) for batch in batches], max_norm=RECIPE.max_norm)
        profiles.append(result.profile)
        if options.check:
            check.compare(step, batches, result)
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:>4}  loss {result.loss:.4f}  grad norm {result.grad_norm:.4f}")
    show(schedule, profiles)
    if options.check:
        check.conclude(schedule.parts.transport)


def backwards_of(plan: Schedule) -> dict[int, list[int]]:
    """The microbatches in the order in which each stage's backwards, or the parts for its weights, come."""
    return {
        stage: [a.microbatch for a in plan.ranks[rank] if a.stage == stage and a.kind in ("B", "W")]
        for stage, rank in enumerate(plan.placement)
    }


def show(schedule: PipelineSchedule, profiles: list[Profile]) -> None:
    """Print the mean profile of all steps but the first, which also learns shapes."""
    steady, transport = profiles[1:] or profiles, schedule.parts.transport
    fields = ("step_s", "compute_s", "communication_s", "idle_s")
    mean = Profile(transport.rank, *(sum(getattr(p, field) for p in steady) / len(steady) for field in fields))
    table = profile_table(schedule.profiles(mean))
    if transport.rank == 0:
        print(table)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(options, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
