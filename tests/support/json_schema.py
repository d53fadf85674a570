"""Whether data is as a JSON Schema says: as much of that standard as ours uses."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support.sources import ROOT

OURS = json.loads((ROOT / "validation" / "reports" / "schema.json").read_text())

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def documented(text: str) -> dict[str, Any]:
    """The JSON document ``text``, which our schema describes."""
    data: dict[str, Any] = json.loads(text)
    found = list(complaints(data, OURS, root=OURS))
    assert not found, found
    return data


def complaints(data: Any, schema: Mapping[str, Any], *, root: Mapping[str, Any], at: str = "$") -> Iterator[str]:
    """What in ``data`` is not as ``schema``, a part of ``root``, says."""
    if "$ref" in schema:
        schema = {**root["$defs"][schema["$ref"].rpartition("/")[2]], **schema}
    if "const" in schema and data != schema["const"]:
        yield f"{at} is {data!r}, not {schema['const']!r}"
    if "enum" in schema and data not in schema["enum"]:
        yield f"{at} is {data!r}, none of {schema['enum']}"
    if "anyOf" in schema and all(any(complaints(data, one, root=root, at=at)) for one in schema["anyOf"]):
        yield f"{at} is {data!r}, which fits none of {schema['anyOf']}"
    if "type" in schema and not is_a(data, schema["type"]):
        yield f"{at} is {data!r}, no {schema['type']}"
    elif isinstance(data, dict):
        yield from _of_object(data, schema, root, at)
    elif isinstance(data, list):
        for number, one in enumerate(data):
            yield from complaints(one, schema.get("items", {}), root=root, at=f"{at}[{number}]")


def is_a(data: Any, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    return any(isinstance(data, _TYPES[name]) and (name == "boolean" or not isinstance(data, bool)) for name in names)


def _of_object(data: Any, schema: Mapping[str, Any], root: Mapping[str, Any], at: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    yield from (f"{at} lacks {name}" for name in schema.get("required", ()) if name not in data)
    for name, one in data.items():
        if name in known:
            yield from complaints(one, known[name], root=root, at=f"{at}.{name}")
        elif others is False:
            yield f"{at} has {name}, which the schema does not know"
        elif isinstance(others, dict):
            yield from complaints(one, others, root=root, at=f"{at}.{name}")
