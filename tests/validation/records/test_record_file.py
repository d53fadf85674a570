"""Records on disk: what was written comes back to the last bit, and nothing else is taken for a record."""

import hashlib
import json
import math
import pickletools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from pipeproof.core.nudged import Nudged
from pipeproof.core.tolerance import Floor, same_bits
from pipeproof.records.record import Record, RecordedFloors, RecordedOperation, RecordError
from pipeproof.records.record_file import FORMAT, VERSION, describe, read, write
from pipeproof.worlds.output_file import OutputError, OutputFile
from tests.support.golden import golden
from tests.support.sweeps import some

FLOOR = Floor(1e-8, 2e-7, 0.25, size=3e-9)
WEIGHT, BIAS = torch.arange(6.0).reshape(2, 3) / 7, torch.tensor([1.0, -0.0])
MOVED = Nudged({"w": 0.1}, {"w": 1e-3}, norm=math.inf, loss=0.3, least=0.5, updates={"w": 0.2})
RECORD = Record(
    "expected",
    {"case": "1f1b r2 s2 m2", "seed": 3, "ragged": True},
    (
        RecordedOperation("eval", ("aa", "bb"), (0.1, math.nan), loss=math.inf),
        RecordedOperation(
            "train",
            ("cc", "dd"),
            (0.1 + 0.2, 1e-300),
            loss=0.5,
            norm=2 / 3,
            before={"w": WEIGHT, "b": BIAS},
            gradients={"w": WEIGHT * 2, "tied": WEIGHT * 2, "b": None},
            parameters={"w": WEIGHT - 1, "b": BIAS},
            buffers={"n": torch.tensor(3)},
            floors=RecordedFloors((FLOOR, FLOOR), FLOOR, {"w": FLOOR, "tied": FLOOR, "b": FLOOR}, MOVED),
        ),
    ),
    {"w": ((0, 0),), "tied": ((1, 1), (1, 2))},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "x.safetensors"
    with OutputFile(str(file)) as out:
        write(RECORD, out)
    return file


def test_a_record_comes_back_bit_for_bit(path: Path) -> None:
    found = read(path)
    assert (found.kind, found.config, found.places) == (RECORD.kind, RECORD.config, RECORD.places)
    evaluated, trained = found.operations
    assert (evaluated.losses[0], evaluated.loss) == (0.1, math.inf)
    assert math.isnan(evaluated.losses[1])
    assert (trained.losses, trained.norm, trained.floors) == ((0.1 + 0.2, 1e-300), 2 / 3, RECORD.operations[1].floors)
    assert trained.gradients["b"] is None
    for kind in ("before", "gradients", "parameters", "buffers"):
        wanted, observed = getattr(RECORD.operations[1], kind), getattr(trained, kind)
        assert list(observed) == list(wanted)
        assert all(wanted[name] is None or same_bits(observed[name], wanted[name]) for name in wanted)


def test_one_record_is_one_file(tmp_path: Path) -> None:
    written = set()
    for number in range(20):
        with OutputFile(str(tmp_path / str(number))) as file:
            write(RECORD, file)
        written.add((tmp_path / str(number)).read_bytes())
    assert len(written) == 1


def test_equal_tensors_are_stored_once_and_nothing_is_pickled(path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert len(header) - 1 == 5, "two weights, the tied gradient once, one bias, one buffer"
    with pytest.raises(ValueError, match=r"opcode|exhausted|no newline"):
        list(pickletools.genops(data))


def test_a_tensor_is_read_only_when_it_is_asked_for(path: Path) -> None:
    """One that was altered does no harm to the others."""
    data = bytearray(path.read_bytes())
    at = data.index(WEIGHT.numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    trained = read(path).operations[1]
    assert same_bits(trained.parameters["w"], WEIGHT - 1)
    with pytest.raises(RecordError, match=r"x.safetensors was altered since it was written: tensor \w{12} is not"):
        trained.before["w"]


DAMAGE: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda data: data[:-5], r"is cut short: \d+ bytes of \d+; record it again"),
    "cut in the header": (lambda data: data[:100], "is cut short: it has 100 bytes, and its header alone is longer"),
    "longer": (lambda data: data + b"\0", r"is too long: \d+ bytes of \d+"),
    "reworded": (
        lambda data: data.replace(b"1f1b r2", b"1f1b r4"),
        "was altered since it was written: its description is not what its checksum says",
    ),
    "newer": (
        lambda data: data.replace(b'"version":"1"', b'"version":"2"'),
        "is a record of version 2: this pipeproof reads version 1; use the pipeproof that wrote it",
    ),
    "a config": (lambda data: b'{"format": "pipeproof/config"}', "is a config, and no record: `pipeproof record --con"),
    "foreign": (
        lambda data: b"schedule,rank\n1f1b,0\n",
        "is no record: expected a file that `pipeproof record` or --record wrote",
    ),
    "empty": (lambda data: b"", "is no record"),
    "too short": (lambda data: data[:3], "is no record"),
    "no length": (lambda data: b"\xff" * 40, "is no record"),
    "a list": (lambda data: (2).to_bytes(8, "little") + b"[]", "is no record"),
    "deep": (lambda data: (99_999).to_bytes(8, "little") + b"[" * 99_999, "is no record"),
    "of others": (lambda data: save({"w": WEIGHT}), "is no record"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_no_whole_record_is_refused(path: Path, name: str) -> None:
    damage, words = DAMAGE[name]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RecordError, match=words) as refusal:
        read(path)
    assert "\n" not in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no such file: .*nowhere"):
        read(tmp_path / "nowhere")


@pytest.mark.long
@pytest.mark.parametrize("step", some([7, 1], left=[1]))
def test_no_single_changed_byte_goes_unseen(path: Path, step: int) -> None:
    """Bytes in turn, flipped: reading all of it either refuses, or gives what was written."""
    whole = path.read_bytes()
    wanted = everything(read(path))
    unseen = []
    for at in range(0, len(whole), step):
        data = bytearray(whole)
        data[at] ^= 0x10
        path.write_bytes(data)
        try:
            if everything(read(path)) != wanted:
                unseen.append(at)
        except RecordError:
            continue
    assert unseen == []


def everything(record: Record) -> str:
    tensors = [
        {name: None if tensor is None else tensor.tolist() for name, tensor in getattr(one, kind).items()}
        for one in record.operations
        for kind in ("before", "gradients", "parameters", "buffers")
    ]
    numbers = [(one.operation, one.microbatches, one.losses, one.loss, one.norm) for one in record.operations]
    return repr((record.kind, record.config, record.places, numbers, tensors))


def test_a_record_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="No space left"), OutputFile(str(tmp_path / "x")) as out:
        write(RECORD, out)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    odd = Record("observed", {}, (RecordedOperation("train", (), (), gradients={"w": torch.ones(1).to_sparse()}),))
    with OutputFile(str(tmp_path / "x")) as out, pytest.raises(ValueError, match="a sparse tensor has no digest: make"):
        write(odd, out)
    assert list(tmp_path.iterdir()) == []


def first_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    """The mapping of that name in the first operation."""
    return data["operations"][0][name]


FORMS: Mapping[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "older": (lambda data: data.pop("places"), "it lacks 'places'"),
    "no floors": (lambda data: data["operations"][0].pop("floors"), "it lacks 'floors'"),
    "no number": (lambda data: data["operations"][0].update(losses=["a"]), "could not convert string to float: 'a'"),
    "no tensor": (lambda data: first_of(data, "before").update(w=None), "before has no tensor for w"),
    "no floor": (lambda data: first_of(data, "floors")["gradients"].clear(), "the gradient of w has no floor"),
    "fewer floors": (lambda data: first_of(data, "floors").update(losses=[]), "1 losses have 0 floors"),
    "other dtype": (lambda data: first_of(data, "floors")["norm"]["precision"].update(name="fp8"), "it lacks 'fp8'"),
    "no place": (lambda data: data["places"].update(w=[[-1, 0]]), "rank -1 and stage 0 are no place"),
    "half a place": (lambda data: data["places"].update(w=[[1]]), "missing 1 required positional argument"),
    "no mapping": (lambda data: data.update(config=[]), "its config is no mapping"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_record_of_another_form_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    change, words = FORMS[name]
    one = RecordedOperation(
        "train",
        ("m",),
        (1.0,),
        1.0,
        2.0,
        before={"w": torch.ones(2)},
        gradients={"w": torch.ones(2)},
        floors=RecordedFloors((FLOOR,), FLOOR, {"w": FLOOR}),
    )
    tensors: dict[str, Tensor] = {}
    data = json.loads(describe(Record("expected", {}, (one,), {"w": ((0, 0),)}), tensors))
    change(data)
    text = json.dumps(data)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    metadata = {"format": FORMAT, "version": str(VERSION), "record": text, "sha256": checksum}
    (tmp_path / "x").write_bytes(save(tensors, metadata))
    with pytest.raises(RecordError, match=re.escape(words)) as refusal:
        read(tmp_path / "x")
    golden(str(refusal.value))
