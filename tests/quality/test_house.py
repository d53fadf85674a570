"""The house keeps its rules, and each rule is shown sources that break it."""

from collections.abc import Mapping

import house_rules as rules
import pytest
from house_rules import RULES, Rule

from tests.support.sources import Source


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    complaints = [f"{source.path}: {complaint}" for source in RULES[rule] for complaint in rule(source)]
    assert not complaints, "\n".join(complaints)


OBSERVES, WORLD = "validation/core/observe/bad.py", "validation/worlds/world.py"
STEP = "from pipeline.step import ScheduleResult"
FILE, PAST = (
    "from pipeproof.wings.runs.file import RankFile",
    "line {}: imports validation.wings.{}, and not the face of {}",
)
UP = "line {} imports validation.{}: {} comes before {}"
# By rule: a text, or a path and a text, and what is said of it.
BROKEN: Mapping[Rule, Mapping[str | tuple[str, str], list[str]]] = {
    rules.short_files: {"x = 1\n" * 401: ["has 401 lines, above 400"], "x = 1\n" * 400: []},
    rules.short_functions: {
        "def f():\n" + "    x = 1\n" * 70: ["f has 71 lines, above 70"],
        "class C:\n  async def f():\n" + "    x = 1\n" * 70: ["f has 71 lines, above 70"],
    },
    rules.few_parameters: {
        "def f(a, b, c, d, /, e, f, *, g, h): ...": ["f has 8 parameters, above 7"],
        "class C:\n  def f(self, a, b, c, d, e, f, g): ...": [],
    },
    rules.options_by_keyword: {
        "def f(a, b=0, c=1): ...": ["f: b, c have defaults: all but the first must be keyword-only"],
        "class C:\n  def f(self, a=0, b=1): ...": ["f: a, b have defaults: all but the first must be keyword-only"],
        "def f(a, b=0, *, c=1): ...": [],
    },
    rules.annotated: {
        "def f(a, *b, c, **d): ...": [
            *(f"f: {name} is not annotated" for name in "acbd"),
            "f: what it returns is not annotated",
        ],
        "class C:\n  def f(self) -> None: ...": [],
    },
    rules.documented: {
        "def f(): ...\nclass C: ...\ndef _g(): ...": [
            "has no docstring",
            "f has no docstring",
            "C has no docstring",
        ]
    },
    rules.silent: {"def f():\n  print(1)": ["line 2 prints"], "map(print, [])": ["line 1 prints"], "pprint = 1": []},
    rules.asserts_with_words: {"assert x": ["line 1 asserts without words"], "assert x, 'why'": []},
    rules.portable: {
        "x = '/ho" + "me/me/main'": ["line 1 names a machine's path or a registry: /ho" + "me/me"],
        "\n# https://py" + "pi.org/simple": ["line 2 names a machine's path or a registry: py" + "pi.org"],
        "pip install --in" + "dex-url x": ["line 1 names a machine's path or a registry: in" + "dex-url"],
        "a/home/b and https://example.com/work/x": [],
    },
    rules.any_device: {
        "torch.cuda.synchronize()\nx = 'nccl'": [
            "line 1 is about one maker's devices: torch.cuda",
            "line 2 is about one maker's devices: 'nccl'",
        ],
        "torch.accelerator.synchronize()  # cuda:0": [],
    },
    rules.fenced: {
        (OBSERVES, "tensor.register_hook(flowed)\nhook_first(tensor, flowed)"): [
            "line 1 hooks flowed in without a fence",
            "line 2 hooks flowed in without a fence",
        ],
        (OBSERVES, "note = fence.around(f)\nmodule.register_forward_hook(note, with_kwargs=True)"): [],
        (OBSERVES, "module.register_forward_hook(Hook(module, fence.around(f)))"): [],
    },
    rules.arrows: {
        ("pipeline/laws.py", "import torch"): ["imports torch, which plan may not"],
        ("pipeline/laws.py", "import rich"): ["imports rich, which plan may not"],
        ("pipeline/laws.py", "from pipeline import runtime"): ["imports pipeline.runtime: plan may not import run"],
        ("pipeline/laws.py", "from .stage import Stage"): ["imports pipeline.stage: plan may not import run"],
        ("pipeline/schedules/new.py", "from ..stage import S"): ["imports pipeline.stage: plan may not import run"],
        ("pipeline/__init__.py", "from . import step"): ["imports pipeline.step: plan may not import run"],
        ("pipeline/stage.py", "import reference.model"): ["imports reference.model: run may not import reference"],
        ("pipeline/stage.py", "def f():\n  import validation"): ["imports validation: run may not import validation"],
        ("pipeline/stage.py", "import rich"): ["imports rich, which run may not"],
        ("pipeline/stage.py", "import tests.data"): ["imports tests.data"],
        ("reference/model.py", "from pipeline import build"): ["imports pipeline: reference may not import plan"],
        ("reference/step.py", "import_module('validation')"): [
            "imports validation: reference may not import validation"
        ],
        ("validation/worlds/world.py", "import validation.__main__"): [
            "imports validation.__main__: validation may not import front"
        ],
        ("validation/worlds/world.py", "import pandas"): ["imports pandas, which validation may not"],
        ("pipeline/__init__.py", f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {STEP}"): [],
        (WORLD, "import json, torch, rich\nfrom pipeline.step import P\nfrom reference import model"): [],
    },
    rules.upwards: {
        ("validation/core/x.py", "def f():\n    from validation.own.case import Case"): [
            UP.format(2, "own.case", "core", "own")
        ],
        **{
            (f"validation/{detects}/x.py", "import validation.explain.explain"): [
                UP.format(1, "explain.explain", "core", "explain")
            ]
            for detects in ("core", "core/observe")  # outcomes do not hang on explanations
        },
        ("validation/records/x.py", "from validation.own.case import Case\nimport validation"): [],
    },
    rules.past_the_face: {
        ("validation/commands/x.py", f"def f():\n  {FILE}"): [PAST.format(2, "runs.file", "runs")],
        ("validation/wings/mutate/x.py", "from pipeproof.wings.runs import record_run"): [
            "line 1: the wing mutate imports validation.wings.runs"
        ],
        ("validation/wings/runs/x.py", FILE): [],
        ("validation/x.py", "from pipeproof.wings.adapters.megatron import validate"): [],
        ("validation/x.py", "from pipeproof.wings.adapters.megatron_whole import bare"): [
            PAST.format(1, "adapters.megatron_whole", "adapters")
        ],
        ("validation/__init__.py", "from pipeproof.wings.mutate import mutate"): [],
    },
}


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_can_be_broken(rule: Rule) -> None:
    assert any(BROKEN[rule].values()), "a rule that nothing breaks is none"
    for given, complaints in BROKEN[rule].items():
        path, text = given if isinstance(given, tuple) else ("pipeline/bad.py", given)
        assert list(rule(Source(path, text))) == complaints, text
