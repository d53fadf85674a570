"""Parameters of which several stages have a copy each."""

from collections.abc import Collection, Mapping

from torch import nn


def copies_apart(
    model: nn.Module, owner: Mapping[str, int], more: Collection[tuple[int, str]] = ()
) -> list[Mapping[int, str]]:
    """For each parameter with several names that lie in several stages: the name of its copy by stage.

    ``owner`` has the stage of every name, and ``more`` are further copies, by stage and name.
    """
    by_tensor: dict[int, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for stage in (owner[name], *sorted(stage for stage, other in more if other == name)):
            by_tensor.setdefault(id(parameter), {}).setdefault(stage, name)
    return [copies for copies in by_tensor.values() if len(copies) > 1]
