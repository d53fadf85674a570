"""The engine is apart from what wraps torch: it could schedule the threads of anything."""

from tests.support.sources import MODULES, OURS, imported

WING = "validation.wings.simulated."


def test_the_engine_knows_neither_torch_nor_what_wraps_it() -> None:
    engine = [one for one in OURS if one.module.startswith(f"{WING}engine.")]
    names = {(one.module, name) for one in engine for _, name in imported(one, MODULES)}
    assert len(engine) > 5
    assert [pair for pair in names if pair[1].partition(".")[0] in ("torch", "numpy")] == []
    assert [pair for pair in names if pair[1].startswith(WING) and not pair[1].startswith(f"{WING}engine")] == []
