"""Holding what was seen against what was expected, law by law."""
