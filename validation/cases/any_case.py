"""A case of whatever runtime: from its line, and to its verdict."""

from typing import TypeAlias, TypeVar

from pipeproof.cases.case import Case
from pipeproof.cases.frameworks.framework_case import FrameworkCase, is_of_framework

AnyCase: TypeAlias = Case | FrameworkCase
SomeCase = TypeVar("SomeCase", Case, FrameworkCase)  # a campaign has one kind


def case_of_line(line: str) -> AnyCase:
    """The case that ``line`` spells. Raises ``CaseError`` or ``ScheduleError``."""
    return FrameworkCase.parse(line) if is_of_framework(line) else Case.parse(line)
