"""Command lines that argparse alone would misread."""

import argparse
from typing import Any

import pytest

from pipeproof.commands.option_parser import OptionParser, UsageError


def parsed(*words: str) -> tuple[dict[str, Any], list[str]]:
    parser = OptionParser(prog="x")
    for option in ("--split", "--times", "--memory"):
        parser.add_argument(option, default=argparse.SUPPRESS)
    parser.add_argument("--run", action="store_true", default=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(words)
    return vars(options), rest


def test_a_value_may_begin_with_a_minus() -> None:
    assert parsed("--split", "-1,9", "--times=-1") == ({"split": "-1,9", "times": "-1"}, [])
    assert parsed("--run", "--split", "-.5", "--memory", "-inf") == (
        {"run": True, "split": "-.5", "memory": "-inf"},
        [],
    )
    assert parsed() == ({}, [])


def test_what_is_no_value_is_left_alone() -> None:
    assert parsed("x.csv", "--run", "-q", "--times", "1") == ({"run": True, "times": "1"}, ["x.csv", "-q"])
    with pytest.raises(UsageError, match="argument --times: expected one argument"):
        parsed("--times", "-q")


def test_a_mistake_says_where_help_is() -> None:
    with pytest.raises(UsageError, match="unrecognized arguments: --rank; see x --help"):
        OptionParser(prog="x").parse_args(["--rank"])
