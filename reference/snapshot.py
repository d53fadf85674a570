"""Everything in reach of code from some objects, now, for restoration in place."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeproof.reference.generators import drew, own_generators, set_states_on, states_on
from pipeproof.reference.reach import PLAIN, Item, NotPutBack, keepers_of

_HOOKS_OF_ALL = ("forward_pre", "forward", "backward_pre", "backward")
Digest = Callable[[Tensor], bytes]


class Snapshot:
    """Everything in reach from ``roots``: tensors by their bytes, numbers, containers, generators.

    It takes the memory of those tensors once more, or as much of the ``host``'s; but not for weights of modules in
    reach of nothing else, and not for references of ``lean`` objects: rerun code has others in their place. ``digest``:
    the test for changed weights. ``begun``: by id, their digests at the start of a step: changed ones keep their bytes,
    too.
    """

    def __init__(
        self,
        roots: Iterable[object],
        *,
        lean: Iterable[object] = (),
        host: bool = False,
        digest: Digest | None = None,
        begun: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        self.lost: dict[str, None] = {}  # irreversible changes, each once
        self._host, self._digest = host, digest
        self._parts: list[Item] = []
        self._bytes: dict[int, Item | None] = {}  # by the storage that has them
        self._written = set[int]()
        self._places = {torch.device("cpu")}
        self._observed: dict[int, object] = {}  # by id, which is no other's meanwhile
        self._keepers: dict[type, list[Callable[[Any], Iterable[Item]]]] = {}
        self._weights: dict[int, dict[str, Any]] = {}  # of modules, by the id of the mapping that has them
        self._kept_digests: list[tuple[Tensor, bytes]] = []
        self._with_bytes = True
        hooks = (vars(nn.modules.module)[f"_global_{which}_hooks"].values() for which in _HOOKS_OF_ALL)
        with _plainly():
            self._walk([*roots, *own_generators(()), *(hook for each in hooks for hook in each)])
            self._walk_lean(lean, begun)
            drawn = states_on(self._places)
        self._parts.append(Item((), lambda: not drew(drawn), lambda: set_states_on(drawn)))

    def put_back(self) -> None:
        """Restore everything. Nothing is raised: failures are ``lost``."""
        with _plainly():
            self._wait(*self._places)
            bytes_of = {storage: part for storage, part in self._bytes.items() if part is not None}
            self._written |= {storage for storage, part in bytes_of.items() if self._is_put_back(part)}
            for part in self._parts:
                self._is_put_back(part)

    def close(self) -> None:
        """Restore for the last time: check weights, too."""
        self.put_back()
        for one, was in self._kept_digests:
            if self._digest is not None and self._digest(one) != was:
                self.lost["weights"] = None

    def wrote(self, tensor: Tensor) -> bool:
        """True if ``tensor`` was changed before its restoration."""
        with _plainly():
            inner: Tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's part on this rank
            return inner.layout is torch.strided and inner.untyped_storage()._cdata in self._written

    def _is_put_back(self, part: Item) -> bool:
        try:
            if part.is_same():
                return False
            part.put_back()
        except NotPutBack as error:
            self.lost[str(error)] = None
        except Exception as error:  # no one type: an object may refuse in its own way
            self.lost[f"what raised {type(error).__name__}: {error}"] = None
        return True

    def _walk(self, roots: Iterable[object]) -> None:
        stack = list(roots)
        while stack:
            one = stack.pop()
            if type(one) in PLAIN or id(one) in self._observed:
                continue
            self._observed[id(one)] = one
            if issubclass(type(one), nn.Module):
                weights = vars(one).get("_parameters")
                self._weights[id(weights)] = weights if isinstance(weights, dict) else {}
            for part in self._parts_of(one):
                self._parts.append(part)
                own = id(one) in self._weights
                stack += [each for each in part.leads_to if not isinstance(each, Tensor)] if own else part.leads_to

    def _walk_lean(self, others: Iterable[object], begun: Mapping[int, bytes]) -> None:
        """Note weight digests, and further objects without their bytes; keep references from weights."""
        every = {id(one): one for own in self._weights.values() for one in own.values() if isinstance(one, Tensor)}
        weights = [one for one in every.values() if id(one) not in self._observed]
        self._walk([vars(one) for one in weights])
        if (digest := self._digest) is not None:  # modules of weights outside ``begun`` are never run again
            self._kept_digests += [(one, digest(one)) for one in weights if id(one) in begun]
        self._walk([one for one, now in self._kept_digests if now != begun[id(one)]])
        self._with_bytes = False
        self._walk([*weights, *others])

    def _parts_of(self, one: Any) -> list[Item]:
        kind = type(one)
        if kind not in self._keepers:
            self._keepers[kind] = keepers_of(kind)
        found = list[Item]()
        for keep in (*self._keepers[kind], *((self._tensor,) if issubclass(kind, Tensor) else ())):
            try:
                found += keep(one)
            except Exception:  # no one type: an object may not let anybody look into it
                continue
        return found

    def _tensor(self, one: Tensor) -> Iterator[Item]:
        """A tensor's state beside its bytes, and the bytes once for all tensors sharing them."""
        yield Item([one._backward_hooks, getattr(one, "_post_accumulate_grad_hooks", None)])
        if one.is_leaf:
            yield _gradient(one)
        if bool(is_traceable_wrapper_subclass(one)) or one.is_meta:  # a wrapper, like a DTensor, has no bytes
            return
        if one.layout is not torch.strided:
            if self._with_bytes:
                yield _sparse(one)
            return
        storage = one.untyped_storage()
        yield _form(one, storage)
        if storage._cdata not in self._bytes:
            if one.device not in self._places:
                self._wait(one.device)
                self._places.add(one.device)
            self._bytes[storage._cdata] = self._content(storage) if self._with_bytes else None

    def _wait(self, *devices: torch.device) -> None:
        """Wait for queued work: a tensor may have its bytes in the host's memory, and reading does not wait."""
        for device in devices:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.current_stream(device).synchronize()

    def _content(self, storage: torch.UntypedStorage) -> Item:
        size, kept = storage.nbytes(), _view(storage).to("cpu" if self._host else storage.device, copy=True)

        def is_same() -> bool:
            return storage.nbytes() == size and torch.equal(_view(storage), kept.to(storage.device))

        def put_back() -> None:
            if storage.nbytes() != size:
                storage.resize_(size)
            _view(storage).copy_(kept)

        return Item((), is_same, put_back)


@contextmanager
def keep_unchanged(*roots: object, lost: Callable[[str], None] = lambda what: None, **more: Any) -> Iterator[Snapshot]:
    """On exit, restore everything in reach of ``roots`` to its state on entry.

    ``lost`` is called with failures. ``more``: arguments for ``Snapshot``.
    """
    snapshot = Snapshot(roots, **more)
    try:
        yield snapshot
    finally:
        snapshot.close()
        if snapshot.lost:
            lost(" and ".join(snapshot.lost))


@contextmanager
def _plainly() -> Iterator[None]:
    """Use plain tensors, whatever modes the caller has set."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


def _view(storage: torch.UntypedStorage) -> Tensor:
    """View the storage's bytes in a tensor."""
    found = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return found.view(torch.int64) if storage.nbytes() % torch.int64.itemsize == 0 else found


def _gradient(one: Tensor) -> Item:
    kept, wanted = one.grad, one.requires_grad

    def put_back() -> None:
        if not one.is_leaf:
            one.detach_()
        one.grad = kept
        one.requires_grad_(wanted)

    return Item([kept], lambda: one.is_leaf and one.grad is kept and one.requires_grad == wanted, put_back)


def _sparse(one: Tensor) -> Item:
    """A sparse tensor's elements."""

    def elements(of: Tensor) -> list[Tensor]:
        return [of._indices(), of._values()] if of.layout is torch.sparse_coo else [of.values()]

    kept, version = one.clone(), one._version

    def put_back() -> None:
        one.copy_(kept)
        torch._C._autograd._unsafe_set_version_counter((one,), (version,))

    return Item((), lambda: all(map(torch.equal, elements(one), elements(kept))), put_back)


def _form(one: Tensor, storage: torch.UntypedStorage) -> Item:
    """A tensor's place in its storage, and autograd's count of writes."""

    def now() -> tuple[Any, ...]:
        place = one.untyped_storage()._cdata, one.storage_offset(), one.size(), one.stride(), one.dtype
        return *place, None if one.is_inference() else one._version

    kept = now()
    _, offset, size, stride, dtype, version = kept

    def put_back() -> None:
        if now()[:-1] != kept[:-1]:
            one.data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
        if version is not None:
            torch._C._autograd._unsafe_set_version_counter((one,), (version,))

    return Item((), lambda: now() == kept, put_back)
