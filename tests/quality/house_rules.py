"""The house rules: a rule is a function from a source to complaints."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping

from tests.support.sources import (
    EVERY,
    MODULES,
    OURS,
    QUIET,
    ROOT,
    TEXTS,
    Function,
    Source,
    imported,
    without_type_checking,
)

PLAN = set(
    "action schedule schedules columns cells graph dataflow memory laws program messages transports deadlock "
    "program_laws symbolic timeline sizes partition text_grid plan files profile trace deliveries costs chrome_trace "
    "mesh mesh_file mesh_sums recorded checked".split()
)
STARTERS = "validation.commands.starters."  # files that become a user's own
FRONT = {"validation.__main__", "validation.pytest_plugin"}
# Which layers a layer may import, and which distributions (None: whatever pyproject.toml declares).
LAYERS: Mapping[str, set[str]] = {
    "plan": {"plan"},
    "run": {"plan", "run"},
    "reference": {"reference"},
    "validation": {"plan", "run", "reference", "validation"},
    "front": {"plan", "run", "reference", "validation", "front"},
}
# numpy in the reference: its random numbers are part of what a stage depends on.
OUTSIDE: Mapping[str, set[str] | None] = {"plan": {"numpy"}, "run": {"torch"}, "reference": {"torch", "numpy"}}
# The rooms of validation, the lowest first: a room imports only rooms before it.
ROOMS = ("core", "explain", "worlds", "whitebox", "own", "records", "reports", "wings", "commands")


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
    *(f"validation.wings.adapters.{name}" for name in ("adapter", "step")),
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


def layer(module: str) -> str | None:
    """The layer of one of our modules; None for everything else."""
    top, _, rest = module.partition(".")
    if top == "pipeline":
        return "plan" if not rest or rest.split(".")[0] in PLAN else "run"
    if top == "validation":
        return "front" if module in FRONT or module.startswith(STARTERS) else "validation"
    return top if top == "reference" else None


def declared() -> set[str]:
    """What the distributions that pyproject.toml declares are imported as."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (names for extra, names in project["optional-dependencies"].items() if extra != "dev")
    names = [*project["dependencies"], *(name for names in extras for name in names)]
    found = {re.split(r"[^\w-]", name)[0] for name in names}
    # nanotron is from its repository, for what the index has does not import; colossalai asks for an older torch.
    elsewhere = {"nanotron", "colossalai"}
    return {name.removesuffix("-core") for name in found} | elsewhere | {"_pytest", "xdist"}  # megatron-core: megatron


def arrows(source: Source) -> Iterator[str]:
    """Imports go down the layers only, and outside the standard library only where the layer may."""
    own = layer(source.module)
    assert own is not None, f"{source.path} is in no layer"
    outside = OUTSIDE.get(own) if own in OUTSIDE else declared()
    for _, name in imported(without_type_checking(source), MODULES):
        top, target = name.split(".")[0], layer(name)
        if target is not None:
            if target not in LAYERS[own]:
                yield f"imports {name}: {own} may not import {target}"
        elif top in ("tests", "ci"):
            yield f"imports {name}"
        elif top not in sys.stdlib_module_names and top not in (outside or ()):
            yield f"imports {name}, which {own} may not"


def upwards(source: Source) -> Iterator[str]:
    """Imports, in any function, of a room that comes after one's own."""
    own = room(source.module)
    for line, name in imported(source, MODULES):
        target = room(name)
        if own is not None and target is not None and ROOMS.index(target) > ROOMS.index(own):
            yield f"line {line} imports {name}: {own} comes before {target}"


def room(module: str) -> str | None:
    """The room of one of our modules; None for those in front of all rooms and outside of validation."""
    parts = module.split(".")
    return parts[1] if parts[0] == "validation" and len(parts) > 1 and parts[1] in ROOMS else None


def names_on(face: Source) -> Iterator[str]:
    """What stands in the ``__all__`` of a face."""
    for node in face.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)


# Modules that stand on a wing's face: they load when they are wanted, one without the others.
ON_FACES = {
    f"{source.module}.{name}"
    for source in OURS
    if source.path.startswith("validation/wings/") and source.path.endswith("/__init__.py")
    for name in names_on(source)
} & MODULES
STARTERS = "validation.commands.starters."  # files that become a user's own; most want a framework


def wing_of(module: str) -> str | None:
    """The wing that one of our modules belongs to."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["validation", "wings"] and len(parts) > 2 else None


def past_the_face(source: Source) -> Iterator[str]:
    """Imports of what is inside of a wing, from outside, and of a wing by another."""
    own = wing_of(source.module)
    for line, name in imported(source, MODULES):
        wing = wing_of(name)
        if wing in (None, own):
            continue
        if own is not None:
            yield f"line {line}: the wing {own} imports {name}"
        elif name != f"validation.wings.{wing}" and name not in ON_FACES:
            yield f"line {line}: imports {name}, and not the face of {wing}"


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
    arrows: OURS,
    upwards: OURS,
    past_the_face: OURS,
}
