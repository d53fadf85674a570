"""What of a config is run here: a case, or a stack of primitives; and what a reader of its verdict must know.

What is said of a model of ours is run, or refused. A job that no machine here can run is run small, and what that
leaves out is said. A stack is asked of its wing when a config may be one.
"""

from typing import TYPE_CHECKING, TypeAlias

from pipeproof.core.measured import versions
from pipeproof.own.case import DTYPES, MODELS, Case, CaseError
from pipeproof.own.config import BESIDE, STACKED, Config
from pipeproof.pipeline.schedules import list_known
from pipeproof.pipeline.sizes import MOST_LAYERS, check_count, some

if TYPE_CHECKING:
    from pipeproof.wings.primitives import Stack

Work: TypeAlias = "Case | Stack"

_RANKS = 4  # of a pipeline that stands for a longer one


def work_of(config: Config) -> Work:
    """A stack where it has more than a pipeline, or is of a stack's model; else a case.

    Raises ``CaseError``, ``StackError`` or ``ScheduleError`` where that cannot be.
    """
    from pipeproof.wings.primitives import stack_of

    _check_model(config)
    return stack_of(config) or case_of(config)


def case_of(config: Config) -> Case:
    """All, where it is of a model of ours, and a small step of the same kind otherwise.

    Raises ``CaseError``, or ``ScheduleError``, where that cannot be.
    """
    if config["model"] == STACKED:
        raise CaseError(
            f'{config.name}: "model": "{STACKED}" is run as a stack, and this is for cases: expected another model, '
            f"such as {MODELS[0]}"
        )
    _check_model(config)
    if not config.is_scaled:
        if not_run := _not_run(config):
            raise CaseError(
                f"{config.name}: {', '.join(not_run)}: a case has pp and dp alone; leave it out, or say "
                f'"model": "{STACKED}", which is run with more'
            )
        if data := config.list_extras("micro", "sequence"):
            raise CaseError(f"{config.name}: {', '.join(data)}: a case has sequences of its own; leave it out")
        return Case.of_config(config.data)
    ranks, virtual = min(config["pp"], _RANKS), config["virtual"]
    stages = check_count("layers", ranks * virtual, most=MOST_LAYERS)
    sizes = {"pp": ranks, "dp": 1, "microbatches": ranks * config.rounds, "split": [1] * stages}
    return Case.of_config({**config.data, **sizes, "model": MODELS[0], "dtype": DTYPES[0]})


def notes_of(config: Config, work: Work) -> list[str]:
    """What stands for what, what is not run, other versions."""
    found = []
    if config.is_scaled and config["model"] != STACKED:
        if isinstance(work, Case):
            small = f"{work.ranks} of {config['pp']} pipeline ranks, {work.microbatches}"
            model, left = f"{work.model} in {work.dtype}", ", ".join(_not_run(config))
        else:
            from pipeproof.wings.primitives import not_stacked

            axes = ", ".join(config.list_extras("pp", "dp", *BESIDE)) or "one device"
            small, left = f"stack {work} for {axes}, {work.each}", "; ".join(not_stacked(config))
            model = f"a decoder of {some(work.layers, 'layer')} in fp32"
        small = f"{small} of {config['microbatches']} microbatches, {model} for {config['model']}"
        found = [f"{config.name} is run small: {small}", *([f"not run: {left}"] if left else [])]
    if (torch := versions()["torch"]) != (written := config["torch"] or torch):
        found.append(f"{config.name} was written with torch {written}; this is {torch}")
    return found


def _not_run(config: Config) -> list[str]:
    """What it asks for and no case has: ``tp 8``."""
    return config.list_extras(*["dp"] * config.is_scaled, *BESIDE)


def _check_model(config: Config) -> None:
    """Raise ``CaseError`` for an unknown name. What advise writes has a sequence: its model may be a file's."""
    from pipeproof.wings.advise import MODELS as PUBLIC

    if "sequence" not in config.data and (model := config["model"]) not in (*MODELS, STACKED, *PUBLIC):
        ours = list_known(model, [*MODELS, STACKED])
        raise CaseError(f"{config.name}: unknown model {model!r}: {ours}, and those of pipeproof advise --list")
