"""A stack as a line: what it says, and what cannot be."""

import pytest

from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.wings.primitives.primitive import PRIMITIVES, VARIANTS
from pipeproof.wings.primitives.stacks import Stack, StackError, smallest_stack
from tests.support.golden import golden


@pytest.mark.parametrize(
    ("line", "sizes", "parts", "said"),
    [
        ("pp=2,tp=2,ddp=2", {"pp": 2, "tp": 2, "dp": 2}, ("tp", "ddp"), "pp=2,tp=2,ddp=2"),
        (" DP=2 , cp=4", {"dp": 2, "cp": 4}, ("cp", "ddp"), "ddp=2,cp=4"),
        ("hsdp=2x4,sp=2", {"dp_replicate": 2, "dp_shard": 4, "sp": 2}, ("sp", "hsdp"), "hsdp=2x4,sp=2"),
        ("fsdp=2,ep=2", {"fsdp": 2, "ep": 2}, ("ep", "zero-3"), "zero-3=2,ep=2"),
        ("pp=4", {"pp": 4}, (), "pp=4"),
        ("recompute,dp=2,tp=2", {"dp": 2, "tp": 2}, ("tp", "recompute", "ddp"), "ddp=2,tp=2,recompute"),
        ("ring=2", {"cp": 2}, ("ring",), "ring=2"),
        (" One-Device", {}, (), "one-device"),
    ],
)
def test_a_line_is_a_mesh_and_what_is_on_it(
    line: str, sizes: dict[str, int], parts: tuple[str, ...], said: str
) -> None:
    stack = Stack.parse(line, microbatches=16)
    assert list(stack.sizes.items()) == list(sizes.items()), "the order of the mesh"
    assert stack.parts == parts, "the innermost first"
    assert str(stack) == said
    assert Stack.parse(said, microbatches=16) == stack


@pytest.mark.parametrize("name", [*PRIMITIVES, *VARIANTS])
def test_every_primitive_is_a_stack_of_its_own(name: str) -> None:
    stack = Stack.parse(smallest_stack(name))
    assert (stack.parts or ("pp",)) == (name,)
    assert stack.ranks == 2 ** len(stack.sizes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pp=2,tpp=2", "unknown primitive 'tpp' in stack 'pp=2,tpp=2': did you mean 'tp'? known are recompute"),
        ("", "stack '' names no primitive: expected some, e.g. pp=2,tp=2,ddp=2"),
        ("pp=2,", "stack 'pp=2,' names no primitive between commas: expected some"),
        ("pp=2,pp=4", "stack 'pp=2,pp=4' has pp twice: leave one out"),
        ("dp=2,ddp-every=2", "has dp twice: leave one out"),
        ("tp=2,sp=2", "stack tp=2,sp=2: tp and sp do the same work: leave one out"),
        ("dp=2,fsdp=2", "stack ddp=2,zero-3=2: ddp and zero-3 do the same work: leave one out"),
        ("cp=2,ep=2", "an expert's capacity and the auxiliary loss count the tokens of a rank"),
        ("tp=3", "stack tp=3: tp 3 does not divide heads 4: use a divisor"),
        ("sp=3", "sp 3 does not divide sequence 16: use a divisor"),
        ("ep=3", "stack ep=3: ep 3 does not divide 4 experts: use a divisor"),
        ("cp=16", "2 * cp 32 does not divide sequence 16: each rank takes two pieces; use a divisor"),
        ("fsdp=3", "4 microbatches for 3 replicas, which all work on one at a time: use a multiple"),
        ("dp=8", "stack ddp=8: 4 microbatches for 8 replicas: give each at least one"),
        ("recompute,recompute-selective", "recompute and recompute-selective do the same work: leave one out"),
        ("recompute=2", "says recompute=2: recompute has no ranks of its own; leave out =2"),
        ("dp=2,zero-1=2", "has dp twice: leave one out"),
        ("zero-1=2,tp=2", "torch's ZeroRedundancyOptimizer takes no DTensors"),
        ("pp", "stack 'pp' says 'pp': expected the ranks along pp, e.g. pp=2"),
        ("pp=two", "says 'pp=two': expected the ranks along pp, e.g. pp=2"),
        ("hsdp=2", "expected the ranks along dp_replicate and dp_shard, e.g. hsdp=2x2"),
        ("tp=2x2", "expected the ranks along tp, e.g. tp=2"),
        ("tp=-2", "says 'tp=-2': expected the ranks along tp, e.g. tp=2"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(line: str, words: str) -> None:
    with pytest.raises(StackError) as refused:
        Stack.parse(line)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "schedule", "words"),
    [
        ("pp=0", "1f1b", "pp in stack 'pp=0' is 0: expected at least 1"),
        ("pp=999", "1f1b", "is 999: expected at most 256"),
        ("pp=16,dp=4,tp=4,ep=4", "1f1b", "ranks of stack pp=16,ddp=4,tp=4,ep=4 is 1024: expected at most 256"),
        ("pp=2", "1f2b", "unknown schedule '1f2b'"),
    ],
)
def test_counts_and_schedules_have_their_own_bounds(line: str, schedule: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        Stack.parse(line, schedule=schedule, microbatches=16)


def test_a_stack_says_how_to_run_it_again() -> None:
    stack = Stack.parse("pp=2,dp=2", schedule="zb-h1", microbatches=8, seed=3)
    assert (stack.virtual, stack.layers, stack.each) == (2, 8, 4)
    golden(stack.replay)
    golden(Stack.parse("tp=2").replay)
