"""The house rules as a test. A rule is a function from a source to complaints, and is shown sources that break it."""

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping

import pytest

from tests.support.sources import EVERY, OURS, QUIET, TEXTS, Function, Source


def own_parameters(function: Function) -> list[ast.arg]:
    """The parameters that can be passed by position, without self or cls."""
    return [one for one in (*function.args.posonlyargs, *function.args.args) if one.arg not in ("self", "cls")]


def short_files(source: Source) -> Iterator[str]:
    if (count := len(source.text.splitlines())) > 400:
        yield f"has {count} lines, above 400"


def short_functions(source: Source) -> Iterator[str]:
    for function in source.functions:
        if (count := (function.end_lineno or function.lineno) - function.lineno + 1) > 70:
            yield f"{function.name} has {count} lines, above 70"


_OF_USERS = ("validation.whitebox.validator",)  # where users give much by name
MANY = {"validate": 9, "fuzz": 8}  # a user's one call: every option is in its signature, where an editor shows it


def few_parameters(source: Source) -> Iterator[str]:
    for function in source.functions:
        count = len(own_parameters(function)) + len(function.args.kwonlyargs)
        public = source.module in _OF_USERS and MANY.get(function.name)
        if count > (public or 7):
            yield f"{function.name} has {count} parameters, above 7"


def options_by_keyword(source: Source) -> Iterator[str]:
    """At most one parameter with a default can be passed by position; more are keyword-only."""
    for function in source.functions:
        count = len(function.args.defaults)
        if count > 1:
            names = ", ".join(parameter.arg for parameter in own_parameters(function)[-count:])
            yield f"{function.name}: {names} have defaults: all but the first must be keyword-only"


def annotated(source: Source) -> Iterator[str]:
    for function in source.functions:
        rest = filter(None, (function.args.vararg, function.args.kwarg))
        for parameter in (*own_parameters(function), *function.args.kwonlyargs, *rest):
            if parameter.annotation is None:
                yield f"{function.name}: {parameter.arg} is not annotated"
        if function.returns is None:
            yield f"{function.name}: what it returns is not annotated"


def documented(source: Source) -> Iterator[str]:
    """Modules, and what is public at a module's top level."""
    if ast.get_docstring(source.tree) is None:
        yield "has no docstring"
    for node in source.tree.body:
        if isinstance(node, Function | ast.ClassDef) and node.name[0] != "_" and not ast.get_docstring(node):
            yield f"{node.name} has no docstring"


def silent(source: Source) -> Iterator[str]:
    names = (node for node in source.nodes if isinstance(node, ast.Name))
    yield from (f"line {node.lineno} prints" for node in names if node.id == "print")


def asserts_with_words(source: Source) -> Iterator[str]:
    asserts = (node for node in source.nodes if isinstance(node, ast.Assert))
    yield from (f"line {node.lineno} asserts without words" for node in asserts if node.msg is None)


# Written so that they do not match themselves.
MACHINE_PATH = re.compile(r"(?<![\w.}~])/(?:work|home|root|Users|mnt|srv)/\w*")
REGISTRY = re.compile(r"\bpypi[.]\w+|python[h]osted|[i]ndex-url|download[.]pytorch|/simple[/]", re.IGNORECASE)


def portable(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        for match in (*MACHINE_PATH.finditer(line), *REGISTRY.finditer(line)):
            yield f"line {number} names a machine's path or a registry: {match[0]}"


MAKERS = re.compile(r"torch\.(?:cuda|xpu|mps|mtia)\b|backends\.cuda|[\"'](?:cuda|nccl)[\"']")
# One knows what is each maker's, one what transports do; the others give frameworks on CPUs what they ask of CUDA.
KNOW_DEVICES = (
    "validation/worlds/accelerator.py",
    "pipeline/transports.py",
    "validation/wings/adapters/on_cpu.py",
)


def any_device(source: Source) -> Iterator[str]:
    """Devices go by types that torch names; what only one maker's have is in few files."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if source.path not in KNOW_DEVICES and (match := MAKERS.search(line)):
            yield f"line {number} is about one maker's devices: {match[0]}"


HOOKS = re.compile(r"(register_\w*hook|hook_first)$")
# Whose hooks may raise: they run in a reference or in a step of ours, or plant a fault; or have a fence of their own.
NOT_OBSERVING = (
    *(f"validation.{name}." for name in ("wings.primitives", "wings.specimens", "wings.simulated")),
    "validation.wings.composed.gradients",
    "validation.wings.mutate.",
    *(f"validation.whitebox.{name}" for name in ("task", "tensor_index")),
    "validation.wings.runs.recorder",
    *(f"validation.wings.adapters.{name}" for name in ("job", "sight")),
)


def fenced(source: Source) -> Iterator[str]:
    """What observes a user's step is hooked in within a fence."""
    if not source.module.startswith("validation.") or source.module.startswith(NOT_OBSERVING):
        return
    made = [node for node in source.nodes if isinstance(node, ast.Assign) and "around(" in ast.unparse(node.value)]
    names = {
        one.id for node in made for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)
    }
    for node in source.nodes:
        function = node.func if isinstance(node, ast.Call) else None
        name = getattr(function, "attr", getattr(function, "id", ""))
        if isinstance(node, ast.Call) and HOOKS.match(name):
            hook = ast.unparse(node.args[name == "hook_first"])
            if "around(" not in hook and names.isdisjoint(re.findall(r"\w+", hook)):
                yield f"line {node.lineno} hooks {hook} in without a fence"


Rule = Callable[[Source], Iterator[str]]
RULES: Mapping[Rule, list[Source]] = {
    short_files: EVERY,
    short_functions: EVERY,
    few_parameters: EVERY,
    options_by_keyword: OURS,
    annotated: OURS,
    documented: OURS,
    silent: QUIET,
    asserts_with_words: OURS,
    portable: TEXTS,
    any_device: OURS,
    fenced: OURS,
}


def broken(rule: Rule, found: Collection[Source]) -> list[str]:
    return [f"{source.path}: {complaint}" for source in found for complaint in rule(source)]


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    complaints = broken(rule, RULES[rule])
    assert not complaints, "\n".join(complaints)


BROKEN: Mapping[Rule, Mapping[str, list[str]]] = {
    short_files: {"x = 1\n" * 401: ["has 401 lines, above 400"], "x = 1\n" * 400: []},
    short_functions: {
        "def f():\n" + "    x = 1\n" * 70: ["f has 71 lines, above 70"],
        "class C:\n  async def f():\n" + "    x = 1\n" * 70: ["f has 71 lines, above 70"],
    },
    few_parameters: {
        "def f(a, b, c, d, /, e, f, *, g, h): ...": ["f has 8 parameters, above 7"],
        "class C:\n  def f(self, a, b, c, d, e, f, g): ...": [],
    },
    options_by_keyword: {
        "def f(a, b=0, c=1): ...": ["f: b, c have defaults: all but the first must be keyword-only"],
        "class C:\n  def f(self, a=0, b=1): ...": ["f: a, b have defaults: all but the first must be keyword-only"],
        "def f(a, b=0, *, c=1): ...": [],
    },
    annotated: {
        "def f(a, *b, c, **d): ...": [
            *(f"f: {name} is not annotated" for name in "acbd"),
            "f: what it returns is not annotated",
        ],
        "class C:\n  def f(self) -> None: ...": [],
    },
    documented: {
        "def f(): ...\nclass C: ...\ndef _g(): ...": [
            "has no docstring",
            "f has no docstring",
            "C has no docstring",
        ]
    },
    silent: {"def f():\n  print(1)": ["line 2 prints"], "map(print, [])": ["line 1 prints"], "pprint = 1": []},
    asserts_with_words: {"assert x": ["line 1 asserts without words"], "assert x, 'why'": []},
    portable: {
        "x = '/ho" + "me/me/main'": ["line 1 names a machine's path or a registry: /ho" + "me/me"],
        "\n# https://py" + "pi.org/simple": ["line 2 names a machine's path or a registry: py" + "pi.org"],
        "pip install --in" + "dex-url x": ["line 1 names a machine's path or a registry: in" + "dex-url"],
        "a/home/b and https://example.com/work/x": [],
    },
    any_device: {
        "torch.cuda.synchronize()\nx = 'nccl'": [
            "line 1 is about one maker's devices: torch.cuda",
            "line 2 is about one maker's devices: 'nccl'",
        ],
        "torch.accelerator.synchronize()  # cuda:0": [],
    },
    fenced: {
        "tensor.register_hook(flowed)\nhook_first(tensor, flowed)": [
            "line 1 hooks flowed in without a fence",
            "line 2 hooks flowed in without a fence",
        ],
        "note = fence.around(f)\nmodule.register_forward_hook(note, with_kwargs=True)": [],
        "module.register_forward_hook(Hook(module, fence.around(f)))": [],
    },
}


@pytest.mark.long
@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_rule_can_be_broken(rule: Rule) -> None:
    for text, complaints in BROKEN[rule].items():
        path = "validation/core/observe/bad.py" if rule is fenced else "pipeline/bad.py"
        assert list(rule(Source(path, text))) == complaints


def test_every_rule_is_shown_broken() -> None:
    assert set(BROKEN) == set(RULES)
