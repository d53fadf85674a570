"""Communication hooks of DDP: what they are known to make of the gradients that they reduce."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pipeproof.observers.watching import Watcher
from pipeproof.records.rank_part import RankStages

_CASTS = {default_hooks.fp16_compress_hook: torch.float16, default_hooks.bf16_compress_hook: torch.bfloat16}
_BUILT_IN = MappingProxyType({str(BuiltinCommHookType.FP16_COMPRESS): torch.float16})
_PLAIN = ("", default_hooks.allreduce_hook.__qualname__, str(BuiltinCommHookType.ALLREDUCE))


@dataclass(frozen=True)
class CommHook:
    """One of a ``name``. ``narrow``: the type that gradients are cast to, if it does no more; None: nobody knows."""

    name: str
    narrow: torch.dtype | None = None

    def cast(self, gradient: Tensor, ranks: int) -> Tensor:
        """What a rank, one of so many, gives to the sum, in the type of its ``gradient``."""
        return gradient.to(self.narrow).div_(ranks).to(gradient.dtype)

    def whole(self, total: Tensor, ranks: int) -> Tensor:
        """What comes of the ``total`` that ranks gave, as the sum of all that they had."""
        return total.to(self.narrow).to(total.dtype) * ranks

    @property
    def told(self) -> str:
        """Why it is not known what gradients must be."""
        return f"DDP's communication hook {self.name} may have made others of them: check a run without it"


def hooks_of(own: RankStages, watchers: Mapping[int, Watcher]) -> dict[str, CommHook]:
    """The hooks through which DDP reduces a rank's gradients, by name, if any; ``watchers`` saw its calls."""
    found: dict[str, CommHook] = {}
    for stage, module in own.modules.items():
        replicas = watchers[stage].replicas(module)
        if replicas is not None and (hook := comm_hook_of(replicas)) is not None:
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            found |= {own.rename(stage, name): hook for name in names}
    return found


def comm_hook_of(replicas: DistributedDataParallel) -> CommHook | None:
    """The hook through which it reduces gradients; None where they are averaged as without one."""
    logged: dict[str, object] = replicas._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # in torch
    name = str(logged.get("comm_hook", ""))  # of one that is built in, that is all there is
    if not replicas._comm_hooks:
        return None if name in _PLAIN else CommHook(name, _BUILT_IN.get(name))
    hook, _ = replicas._comm_hooks[-1]
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return None if hook is default_hooks.allreduce_hook else CommHook(name, _CASTS.get(hook))
