"""Train a small GPT on real text with any schedule, and check it against one device on the way.

    torchrun --nproc-per-node 4 tests/examples/train_gpt.py --schedule 1f1b --layers 8 --microbatches 8 --steps 50

With --check every rank also trains the whole model by itself and compares, step by step, every microbatch's loss, the
gradient norm and its own stages' weights.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from pipeline import PipelineSchedule, StepResult
from pipeline.gather import gather
from pipeline.partition import parse_split
from pipeline.profile import Profile, profile_table
from pipeline.schedules import LOOPED, build, canonical_name
from reference.data import Batch, Shapes, microbatches
from reference.model import GPT
from reference.step import Expected, Recipe, Reference
from validation.stages import Slice, layers_of, owners, tied_across
from validation.tolerance import LEAST, error


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


RECIPE = Recipe(max_norm=1.0, optimizer=adamw)


def arguments() -> argparse.Namespace:
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
    return parser.parse_args()


def batches_of(options: argparse.Namespace) -> Iterator[list[Batch]]:
    shapes = Shapes(rows=4, tokens=options.tokens)
    for step in range(options.steps):
        yield microbatches("gpt", count=options.microbatches, shapes=shapes, seed=options.seed * 10_000 + step)


def compare(slices: dict[int, nn.Module], result: StepResult, expected: Expected) -> float:
    """The largest relative error of this rank's losses, norm and weights; 0.0 means equal bit for bit."""
    losses = error(torch.tensor(result.losses), torch.tensor(expected.losses))
    norm = error(torch.tensor(result.grad_norm), torch.tensor(expected.norm))
    weights = (
        error(parameter.detach(), expected.parameters[stage, name])
        for stage, module in slices.items()
        for name, parameter in module.named_parameters()
    )
    return max(losses, norm, *weights)


def train(options: argparse.Namespace, rank: int, ranks: int) -> None:
    torch.manual_seed(options.seed)  # the same weights on every rank
    model = GPT(options.layers, tied=options.tied)
    family = canonical_name(options.schedule)
    virtual = (options.virtual or 2) if family in LOOPED else (options.virtual or 1)
    plan = build(family, ranks=ranks, virtual=virtual, microbatches=options.microbatches)
    split = parse_split(options.split, layers=options.layers, stages=plan.n_stages)
    slices: dict[int, nn.Module] = {s: Slice(model, layers_of(split)[s]) for s in plan.stages_of(rank)}

    schedule = PipelineSchedule(
        kind=plan,
        n_microbatches=options.microbatches,
        stages=list(slices.values()),
        loss_fn=model.mean_loss,
        optimizer=adamw([parameter for module in slices.values() for parameter in module.parameters()]),
        tied=tied_across(model, split),
    )
    reference = Reference(model, owner=owners(model, split), recipe=RECIPE) if options.check else None
    worst, profiles = 0.0, []
    for step, batches in enumerate(batches_of(options)):
        result = schedule.train_step([(batch.inputs, batch.target) for batch in batches], max_norm=RECIPE.max_norm)
        profiles.append(result.profile)
        if reference is not None:
            backwards = {
                s: [a.microbatch for a in plan.ranks[plan.placement[s]] if a.stage == s and a.kind == "B"]
                for s in range(plan.n_stages)
            }
            worst = max(worst, compare(slices, result, reference.perform("train", batches, orders=backwards)))
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:>4}  loss {result.loss:.4f}  grad norm {result.grad_norm:.4f}")
    report(schedule, profiles, worst if options.check else None, rank)


def report(schedule: PipelineSchedule, profiles: list[Profile], worst: float | None, rank: int) -> None:
    """The mean profile of all steps but the first, and, with --check, the verdict over all ranks."""
    steady = profiles[1:] or profiles
    fields = ("step_s", "compute_s", "communication_s", "idle_s")
    mean = Profile(rank, *(sum(getattr(p, field) for p in steady) / len(steady) for field in fields))
    table = profile_table(schedule.profiles(mean))
    if rank == 0:
        print(table)
    if worst is None:
        return
    over_all_ranks = max(row[0] for row in gather(schedule.parts.transport, [worst]))
    if rank == 0:
        tier = "bit for bit" if over_all_ranks == 0 else f"to {over_all_ranks:.1e} relative (allowed {LEAST:.1e})"
        print(f"check: losses, norms and weights of every step equal the single-device run's {tier}")
    if over_all_ranks > LEAST:
        raise SystemExit("check: the pipeline and the single device differ")


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
