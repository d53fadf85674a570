"""What optimizers are told, by parameter: learning rate, weight decay and others. Two are held against each other."""

from collections.abc import Mapping

from pipeproof.core.limits import FP32

Options = Mapping[str, Mapping[str, object]]


def other_options(due: Options, seen: Options) -> str:
    """What was told otherwise, of the first parameter of which that is so; empty where it is not."""
    both = {name: (due[name], seen[name]) for name in due if name in seen}
    told = {
        name: ", ".join(
            f"{option} {there.get(option)}, not {one.get(option)}"
            for option in {**one, **there}
            if not _same(one.get(option), there.get(option))
        )
        for name, (one, there) in both.items()
    }
    odd = [name for name, said in told.items() if said]
    return f"{told[odd[0]]} for {odd[0]}{f' and {len(odd) - 1} more' * (len(odd) > 1)}" if odd else ""


def _same(due: object, seen: object) -> bool:
    """Whether two options are equal, up to what a rate loses as a tensor of fp32."""
    if isinstance(due, float) and isinstance(seen, float):
        return due == seen or abs(due - seen) <= FP32.least * abs(due)
    if isinstance(due, list) and isinstance(seen, list):
        return len(due) == len(seen) and all(map(_same, due, seen))
    return due == seen
