"""From a failing verdict to the line that has to be changed: is it in the text?

``python tests/quality/truth_lines.py`` plants one fault after the other into the 1F1B by hand of the first guide, each
a line of its source replaced, and shows whose verdict has that line in it. ``--texts`` shows the verdicts too; other
words are parts of the names of the faults to run.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.reports.terminal import Terminal
from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.world import World
from tests.support.guides import blocks

BLOCKS = 4
SOURCE = next(block.text for block in blocks("python") if block.page.endswith("quickstart.md"))
BACKWARD = "y.backward(self.receive(self.rank + 1, y) if self.rank < self.last else None)"
DIVIDED = "y = self.losses[-1] / len(self.microbatches)"
SENT, SENT_BACK = "self.send(y.detach(), self.rank + 1)", "self.send(x.grad, self.rank - 1)"
CALLED, POPPED, LAYER = "y = self.stage(x)", "x, y = self.live.pop(0)", "nn.Tanh()"
OLDEST = "(self.live[0][1] if self.live else y)"
SENT_OLDEST = "self.first = vars(self).get('first', x.grad)\n            self.send(self.first, self.rank - 1)"
ONE_BUFFER = "buffer = vars(self).setdefault(f'from {peer}', torch.empty_like(like)).detach()"
OTHER_TARGET = "loss_fn(y, self.microbatches[m - 1][1])"
TWICE = f"g = {BACKWARD[11:-1]}\n        y.backward(g, retain_graph=True)\n        y.backward(g)"
OTHER_OUTPUT = f"{OLDEST}{BACKWARD[1:-1]}, retain_graph=True)"


@dataclass(frozen=True)
class Fault:
    """A part of the source and what stands in its place. ``named`` are the kinds of cause that it has: "" for none.

    ``call``: where its line is not in the verdict, a part of the line that is, of the call that was first wrong: "" for
    none. ``each``: layers of a rank. ``layer`` stands for that of the model. ``hangs``: and is bounded.
    """

    name: str
    old: str
    new: str
    named: str
    call: str | None = None
    each: int = 2
    layer: str = LAYER
    hangs: bool = False

    @property
    def sound(self) -> str:
        """The source before the fault."""
        return SOURCE.replace(LAYER, self.layer)

    @property
    def source(self) -> str:
        """The source with the fault."""
        assert self.sound.count(self.old) == 1, f"{self.old!r} is not one part of the guide's source"
        return self.sound.replace(self.old, self.new)

    @property
    def lines(self) -> set[int]:
        """The numbers of the lines with the fault, from 1 on."""
        before = self.sound.splitlines()
        return {number for number, line in enumerate(self.source.splitlines(), 1) if line not in before}

    @property
    def expected(self) -> set[int]:
        """The numbers of the lines of which the verdict is to show one."""
        if self.call is None:
            return self.lines
        return {number for number, line in enumerate(self.source.splitlines(), 1) if self.call and self.call in line}

    @property
    def module(self) -> str:
        """The name of a module that has it."""
        return "planted_" + re.sub(r"\W+", "_", self.name)


FAULTS = (
    Fault("last in, first out", POPPED, "x, y = self.live.pop()", "mispaired", BACKWARD),
    Fault("undivided loss", DIVIDED, "y = self.losses[-1]", "scale", BACKWARD),
    Fault("loss by two", DIVIDED, "y = self.losses[-1] / 2", "scale", BACKWARD),
    Fault("another target", "loss_fn(y, target)", OTHER_TARGET, "swapped-data", CALLED),
    Fault("older activation", SENT, f"self.send({OLDEST}.detach(), self.rank + 1)", "mispaired"),
    Fault("input sent on", SENT, "self.send(x, self.rank + 1)", "wrong-message"),
    Fault("cast on the wire", SENT, "self.send(y.detach().bfloat16().float(), self.rank + 1)", "rounded"),
    Fault("scaled gradient", SENT_BACK, "self.send(x.grad * 2, self.rank - 1)", "scale"),
    Fault("older gradient", SENT_BACK, SENT_OLDEST, "mispaired"),
    Fault("one buffer", "buffer = torch.empty_like(like)", ONE_BUFFER, "overwritten", BACKWARD, each=1),
    Fault("cleared before backwards", POPPED, f"{POPPED}\n        self.stage.zero_grad()", "dropped"),
    Fault("cleared before forwards", CALLED, f"self.stage.zero_grad(False)\n        {CALLED}", "dropped dropped"),
    Fault("another output", BACKWARD, OTHER_OUTPUT, "swapped-activations"),
    Fault("backward twice", BACKWARD, TWICE, "doubled"),
    Fault("forwards in disorder", "self.forward(m)", "self.forward(m ^ (not self.rank))", "swapped-data"),
    Fault("evaluation", CALLED, "y = self.stage.eval()(x)", "mode", layer=f"nn.BatchNorm1d(16), {LAYER}"),
    Fault("input detached", CALLED, "y = self.stage(x.detach())", ""),
    Fault("output detached", CALLED, "y = self.stage(x).detach().requires_grad_()", "", call=""),
    Fault("no gradients", CALLED, f"with torch.no_grad():\n            {CALLED}", ""),
    Fault("no leaf", ".requires_grad_()", "", ""),
    Fault("wrong peer", SENT_BACK, "self.send(x.grad, self.rank + 1)", "", hangs=True),
    Fault("last backward skipped", "range(ahead):", "range(ahead - 1):", "", call="", hangs=True),
)


def step(model: torch.nn.Sequential, microbatches: list[Any], *, module: str, each: int) -> tuple[Any, Any]:
    """As the guide's, with the runtime of ``module``."""
    stage = watch(model[each * dist.get_rank() :][:each])
    return stage, importlib.import_module(module).OneFOneB(stage, microbatches).step()


def verdict(fault: Fault, world: World, folder: Path) -> Verdict:
    """What is said of it; its source is written into ``folder``, which is one of ``sys.path``."""
    (folder / f"{fault.module}.py").write_text(fault.source)
    importlib.invalidate_caches()
    runtime = importlib.import_module(fault.module)
    torch.manual_seed(1)
    return WhiteBox(world, timeout_s=4.0 if fault.hangs else None).validate(
        partial(step, module=fault.module, each=fault.each),
        reference=runtime.build_model,
        microbatches=[(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)],
        ranks=BLOCKS // fault.each,
        loss_fn=runtime.loss_fn,
    )


def shown(text: str, fault: Fault) -> set[int]:
    """The numbers of the source's lines that ``text`` shows."""
    return {int(number) for number in re.findall(rf'{fault.module}\.py(?:", line |:)(\d+)', text)}


def main(words: Sequence[str]) -> int:
    """Run the faults and print the table."""
    parts = [word for word in words if word != "--texts"]
    faults = [fault for fault in FAULTS if not parts or any(part in fault.name for part in parts)]
    terminal, found = Terminal(), 0
    with World() as world, TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for fault in faults:
            told = verdict(fault, world, Path(folder))
            lines = shown(told.details, fault)
            found += bool(lines & fault.lines)
            kinds = ", ".join(cause.kind for cause in told.causes) or told.word
            hit = "yes" if lines & fault.lines else "no"
            terminal.say(f"{hit:<4} {fault.name:<25} {kinds:<18} line {sorted(fault.lines)}, shown {sorted(lines)}")
            if "--texts" in words:
                terminal.say(told.details)
    terminal.say(f"{found} of {len(faults)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
