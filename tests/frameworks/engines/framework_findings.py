"""What is known to be wrong in frameworks, each with the smallest case that shows it; FINDINGS.md tells causes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tests.frameworks.engines.framework_case import FrameworkCase


@dataclass(frozen=True)
class FrameworkFinding:
    """``line`` is the smallest case; ``shows`` says of a case of that framework whether it should show there too.

    ``by_luck``: on real ranks it hangs on who is given memory that was freed, and shows in most runs.
    """

    name: str
    line: str
    shows: Callable[[FrameworkCase], bool]
    by_luck: bool = False


def _told(case: FrameworkCase) -> Any:
    """The layout, of a framework that the finding is about."""
    return case.layout


def _crossed(case: FrameworkCase) -> bool:
    one = _told(case)
    steady = case.microbatches > 2  # with fewer no rank sends and receives in both directions at once
    return bool(one.pp == 2 and one.vp > 1 and not one.p2p_overlap and steady)


def _clipped_by_one_stage(case: FrameworkCase) -> bool:
    one = _told(case)
    return bool(one.clipped and one.pp > 1 and not one.zero and not one.bf16)


def _norm_of_nothing(case: FrameworkCase) -> bool:
    one = _told(case)
    own_sum = one.bf16 and (not one.zero or one.accumulate == "fp32")
    alone = {
        "uniform": (one.layers + 2) // one.pp == 1,
        "parameters": one.layers < one.pp,
    }  # the last layer, in a stage
    return bool(one.tied and own_sum and one.pp > 1 and alone.get(one.partition, False))


_SPLITTING = ("zb-h1", "zb-v", "dualpipev")  # torchtitan's schedules with backwards of weights apart

FRAMEWORK_FINDINGS: Mapping[str, tuple[FrameworkFinding, ...]] = MappingProxyType(
    {
        "megatron": (
            FrameworkFinding("crossed-messages", "megatron r2 v2 m4 dp1 layers=4 seed=0", _crossed),
            FrameworkFinding(
                "freed-while-sent",
                "megatron r2 v2 m4 dp1 layers=4 p2p-overlap deallocate seed=0",
                lambda case: _told(case).deallocate and _told(case).p2p_overlap,
                by_luck=True,
            ),
        ),
        "deepspeed": (
            FrameworkFinding(
                "clipped-by-one-stage", "deepspeed r2 v1 m1 dp1 layers=1 clipped seed=0", _clipped_by_one_stage
            ),
            FrameworkFinding(
                "reentrant-without-gradient",
                "deepspeed r1 v1 m1 dp1 layers=1 tied recompute=1 reentrant seed=0",
                lambda case: _told(case).reentrant and not _told(case).blocks_alone,
            ),
            FrameworkFinding("norm-of-nothing", "deepspeed r2 v1 m1 dp1 layers=1 tied bf16 seed=0", _norm_of_nothing),
        ),
        "torchtitan": (
            FrameworkFinding(
                "selective-with-split",
                "torchtitan r2 v2 m1 dp1 layers=2 schedule=InterleavedZeroBubble ac=selective seed=0",
                lambda case: _told(case).ac == "selective" and case.schedule in _SPLITTING,
            ),
            FrameworkFinding(
                "resharded-with-split",
                "torchtitan r2 v2 m1 dp2 layers=2 schedule=InterleavedZeroBubble reshard=always seed=0",
                lambda case: _told(case).reshard == "always" and case.schedule in _SPLITTING,
            ),
        ),
    }
)


def known(case: FrameworkCase, findings: Sequence[FrameworkFinding]) -> bool:
    """Whether one of ``findings`` should show in ``case``."""
    return any(finding.shows(case) for finding in findings)
