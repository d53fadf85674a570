"""How layers are cut into stages."""

from collections.abc import Sequence

from pipeline.schedule import ScheduleError


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as possible, the larger stages first: even(7, 3) is (3, 2, 2)."""
    if not 1 <= stages <= layers:
        raise ScheduleError(
            f"{layers} layers cannot fill {stages} stages: use 1 to {layers} stages (ranks x virtual), or more layers"
        )
    size, larger = divmod(layers, stages)
    return tuple(size + (stage < larger) for stage in range(stages))


def by_sizes(layers: int, stages: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """``sizes`` itself, once checked: one per stage, each at least 1, together all the layers."""
    text = ",".join(map(str, sizes))
    if len(sizes) != stages:
        raise ScheduleError(f"split {text} has {len(sizes)} sizes: expected {stages}, one per stage (ranks x virtual)")
    for stage, size in enumerate(sizes):
        if size < 1:
            raise ScheduleError(f"split {text} leaves stage {stage} with {size} layers: every stage needs at least 1")
    if sum(sizes) != layers:
        raise ScheduleError(f"split {text} sums to {sum(sizes)}: the model has {layers} layers")
    return tuple(sizes)


def parse_split(text: str, *, layers: int, stages: int) -> tuple[int, ...]:
    """``even``, or sizes such as ``3,1,2,2``, as layers per stage."""
    if text.strip().lower() == "even":
        return even(layers, stages)
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise ScheduleError(f"split {text!r} is neither 'even' nor sizes such as 3,1,2,2") from None
    return by_sizes(layers, stages, sizes)
