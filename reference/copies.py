"""Parameters with a copy in each of several stages."""

from collections.abc import Collection, Mapping

from torch import nn


def copies_apart(
    model: nn.Module, owner: Mapping[str, int], more: Collection[tuple[int, str]] = ()
) -> list[Mapping[int, str]]:
    """Find parameters with several names in several stages: the name of each copy by stage.

    ``owner``: the stage of every name; ``more``: further copies, by stage and name.
    """
    by_tensor: dict[int, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for stage in (owner[name], *sorted(stage for stage, other in more if other == name)):
            by_tensor.setdefault(id(parameter), {}).setdefault(stage, name)
    return [copies for copies in by_tensor.values() if len(copies) > 1]
