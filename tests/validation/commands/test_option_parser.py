"""Command lines that argparse alone would misread."""

import pytest

from validation.commands.option_parser import OptionParser, UsageError, joined


def test_a_value_may_begin_with_a_minus() -> None:
    assert joined(["plan", "--split", "-1,9", "--times=-1", "-h"]) == ["plan", "--split=-1,9", "--times=-1", "-h"]
    assert joined(["--a", "--b", "-.5", "--memory", "-inf", "--c"]) == ["--a", "--b=-.5", "--memory=-inf", "--c"]
    assert joined([]) == []


def test_what_is_no_value_is_left_alone() -> None:
    assert joined(["show", "x.csv", "--run", "-q", "--", "-1"]) == ["show", "x.csv", "--run", "-q", "--", "-1"]


def test_a_mistake_is_an_error_that_says_where_help_is() -> None:
    with pytest.raises(UsageError, match="unrecognized arguments: --rank; see x --help"):
        OptionParser(prog="x").parse_args(["--rank"])
