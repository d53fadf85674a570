"""Jobs and results as bytes: a test module's code travels by value, all other code by name."""

import functools
import io
import pickle
import sys
from types import FunctionType
from typing import Any

import cloudpickle

_OURS = frozenset({"pipeline", "reference", "validation"})


def pack(value: object) -> bytes:
    """The value as bytes, closures and lambdas included; tensors travel as their bytes, not as shared memory.

    Raises whatever an object that cannot be pickled raises: there is no one type for it.
    """
    buffer = io.BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The value that ``pack`` was given. Only for bytes of a rank of one's own: unpickling runs code."""
    return pickle.loads(data)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and _travels_by_value(obj.__module__):
            cloudpickle.register_pickle_by_value(sys.modules[obj.__module__])
        return super().reducer_override(obj)


@functools.cache
def _travels_by_value(name: str) -> bool:
    # A module that pytest rewrote would be imported in a worker without its telling assertions, or under
    # `--import-mode=importlib` not at all. pytest also rewrites plugins, hence ours: those go by name.
    module = sys.modules.get(name)
    return module is not None and "@pytest_ar" in vars(module) and name.partition(".")[0] not in _OURS
