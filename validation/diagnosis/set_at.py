"""The lines of the user's code that set what a call worked on, as its source reads: nothing is run for that.

A value is followed backwards: to the assignments that reach it in its function, into the call that the function was
called by, and through a container to where that is filled. What a call made is followed no further. A line in a
branch may not have run.
"""

import ast
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeproof.worlds.stack import Line, Stack

Role = Callable[[ast.Call], ast.expr | None]  # what a call worked on, if it is such a one
Function = ast.FunctionDef | ast.AsyncFunctionDef

_TAKES = frozenset({"pop", "popleft", "get", "get_nowait"})
_PUTS = frozenset({"append", "appendleft", "insert", "put", "add"})
_MOST = 12  # statements that are looked at


def backward_of(call: ast.Call) -> ast.expr | None:
    """What a backward began at."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="autograd") | ast.Attribute(attr="autograd"), attr="backward" | "grad"):
            return call.args[0] if call.args else None
        case ast.Attribute(value=root, attr="backward"):
            return root
    return None


def received_by(call: ast.Call) -> ast.expr | None:
    """What a message was received into."""
    return _given(call, 0, "tensor") if _tail(call.func) in ("recv", "irecv") else None


@dataclass(frozen=True)
class _Use:
    """An expression in a line of a function, of whose value ``element`` is meant; ``outer`` are the callers."""

    what: ast.expr | None
    line: Line
    outer: Stack
    element: int | None = None


Set = tuple[str, _Use]  # a name, and what it was set to, where
_BRANCHES = (ast.If, ast.Match, ast.ExceptHandler)


def set_at(stack: Stack, role: Role) -> list[tuple[str, Line]]:
    """Names and the lines that set them, the nearest first; empty where the source does not tell."""
    found: dict[Line, str] = {}
    roots = (role(call) for call in (_calls(stack[0]) if stack else ()))
    uses = [_Use(root, stack[0], stack[1:]) for root in roots if root is not None][:1]
    for use in uses:
        for name, one in _sources(use):
            if one.line not in found and len(found) < _MOST:
                found[one.line] = name
                uses.append(one)
    return [(name, line) for line, name in found.items()]


def _sources(use: _Use) -> Iterator[Set]:
    """What set the variables in ``use``."""
    for one in _parts(use.what, use.element):
        container = _container(one)
        if container is not None:
            yield from _filled(container, use)
        elif isinstance(one, ast.Name):
            yield from _assigned(one.id, use)


def _parts(what: ast.AST | None, element: int | None = None) -> list[ast.expr]:
    """The variables, and what is taken out of containers; none of what a call makes."""
    match what:
        case ast.Tuple(elts=parts) if element is not None and element < len(parts):
            return _parts(parts[element])
        case ast.Name(id=name):
            return [what] if name != "self" else []
        case ast.IfExp(body=one, orelse=other):
            return [*_parts(one), *_parts(other)]
        case ast.expr() if _container(what) is not None:
            return [what]
        case None | ast.Call():
            return []
    parts = [one for child in ast.iter_child_nodes(what) for one in _parts(child)]
    if not isinstance(what, ast.ListComp | ast.GeneratorExp | ast.SetComp):
        return parts
    own = {name for each in what.generators for name in _names(each.target)}
    return [one for one in parts if own.isdisjoint(_names(one))]


def _names(what: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(what) if isinstance(one, ast.Name)}


def _container(what: ast.expr) -> ast.expr | None:
    """Out of what it is taken, if it is; of a container in another, the outermost."""
    match what:
        case ast.Call(func=ast.Attribute(value=inside, attr=name)) if name in _TAKES:
            return _container(inside) or inside
        case ast.Subscript(value=inside):
            return _container(inside) or inside
    return None


def _filled(container: ast.expr, use: _Use) -> Iterator[Set]:
    """Where ``container`` is filled: one of an object in all methods, one of a function in there."""
    tree, function, key = _tree(use.line), _function(use.line), ast.unparse(container)
    if tree is None or function is None:
        return
    owners = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and function in one.body]
    scopes = owners[0].body if owners and isinstance(container, ast.Attribute) else [function]
    for scope in (one for one in scopes if isinstance(one, Function)):
        for statement in _statements(scope):
            match statement:
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=to, attr=name), args=[*_, put])) if name in _PUTS:
                    pass
                case ast.Assign(targets=[ast.Subscript(value=to)], value=put):
                    pass
                case _:
                    continue
            if ast.unparse(_container(to) or to) == key:
                line = _line(use.line, statement, scope)
                yield _if_reached(key.rpartition(".")[2], statement, scope), _Use(put, line, (), use.element)


def _assigned(name: str, use: _Use) -> Iterator[Set]:
    """The assignments of a variable that reach ``use``; of an argument, what set it in the call."""
    function = _function(use.line)
    if function is None:
        return
    way = list(_way(function, use.line.number))
    owners = [function, *(block[k] for block, k in way)]
    for (block, k), owner in reversed(list(zip(way, owners, strict=False))):
        for statement in (*reversed(block[:k]), owner):
            for one in _statements(statement) if statement is not owner else (owner,):  # else all of its block
                for value, element in _bound(one, name):
                    told = name if one is owner else _if_reached(name, one, statement)
                    yield told, _Use(value, _line(use.line, one, function), use.outer, element)
            if any(_bound(statement, name)):
                return
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    for call in _calls(use.outer[0]) if use.outer and name in names else ():
        if _tail(call.func) == function.name:
            at = names.index(name) - (names[0] == "self" and isinstance(call.func, ast.Attribute))
            yield from _sources(_Use(_given(call, at, name), use.outer[0], use.outer[1:], use.element))
            return


def _if_reached(name: str, statement: ast.stmt, around: ast.stmt) -> str:
    """``name``, and that ``statement``, which sets it, is in a branch of what is ``around``, if it is."""
    branches = (one for one in ast.walk(around) if isinstance(one, _BRANCHES) and one is not statement)
    return f"{name}, if reached" if any(statement in ast.walk(one) for one in branches) else name


def _bound(statement: ast.stmt, name: str) -> Iterator[tuple[ast.expr | None, int | None]]:
    """What a statement itself sets a variable to, if it does, and which element of that is meant."""
    value: ast.expr | None
    match statement:
        case ast.Assign(targets=targets, value=value):
            pass
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value):
            targets = [target]
        case ast.For(target=target):
            targets, value = [target], None
        case _:
            return
    for target in targets:
        elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        for k, one in enumerate(elements):
            if isinstance(one, ast.Name) and one.id == name:
                yield value, (k if len(elements) > 1 else None)


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    return (one for one in ast.walk(node) if isinstance(one, ast.stmt))


def _way(node: ast.AST, number: int) -> Iterator[tuple[Sequence[ast.stmt], int]]:
    """The blocks around a line from the outermost in, and the number of the statement in each."""
    for _, block in ast.iter_fields(node):
        for k, one in enumerate(block if isinstance(block, list) else ()):
            if getattr(one, "lineno", number + 1) <= number <= getattr(one, "end_lineno", 0):
                if isinstance(one, ast.stmt):
                    yield block, k
                yield from _way(one, number)
                return


def _calls(line: Line) -> list[ast.Call]:
    """The calls of the statement at ``line``."""
    function = _function(line)
    way = [] if function is None else list(_way(function, line.number))
    nodes = ast.walk(way[-1][0][way[-1][1]]) if way else ()
    return [one for one in nodes if isinstance(one, ast.Call)]


def _given(call: ast.Call, at: int, name: str) -> ast.expr | None:
    """An argument of ``call``."""
    named = {one.arg: one.value for one in call.keywords}
    return call.args[at] if at < len(call.args) else named.get(name)


def _function(line: Line) -> Function | None:
    tree = _tree(line)
    functions = (one for one in (ast.walk(tree) if tree is not None else ()) if isinstance(one, Function))
    around = (one for one in functions if one.lineno <= line.number <= (one.end_lineno or 0))
    return next((one for one in around if one.name == line.function), None)


def _line(near: Line, statement: ast.stmt, function: Function) -> Line:
    text = linecache.getline(near.file, statement.lineno).strip()
    return Line(near.file, statement.lineno, function.name, text)


def _tail(function: ast.expr) -> str:
    """The last of a dotted name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _tree(line: Line) -> ast.Module | None:
    """The source of ``line``, if it is still what ran."""
    linecache.checkcache(line.file)
    lines = linecache.getlines(line.file)
    same = 0 < line.number <= len(lines) and lines[line.number - 1].strip() == line.text
    return _parsed("".join(lines)) if same else None


@lru_cache(maxsize=16)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
