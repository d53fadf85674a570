"""How long buffers live."""

from pipeproof.pipeline.buffers import RECEIVED, SENT, WEIGHTS, buffer_peaks
from pipeproof.pipeline.program import lower, program_from_csv
from pipeproof.pipeline.schedules import build

TEXT = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0RECV_B1,0I1,0W0,0W1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
)


def test_buffers_live_from_posting_to_use() -> None:
    peaks = buffer_peaks(program_from_csv(TEXT))
    assert peaks[RECEIVED] == ((1, 4), (2, 1))
    assert peaks[SENT] == ((2, 3), (2, 7)), "without a wait, to the end of the step"
    assert peaks[WEIGHTS] == ((2, 7), (0, 0))


def test_a_wait_ends_a_send() -> None:
    program = lower(build("1f1b", ranks=2, microbatches=4))
    assert [peak.value for peak in buffer_peaks(program)[SENT]] == [4, 4]
    assert [peak.value for peak in buffer_peaks(program.with_waits)[SENT]] == [2, 4]


def test_early_receives_cost_buffers() -> None:
    schedule = build("gpipe", ranks=2, microbatches=6)
    counts = [max(peak.value for peak in buffer_peaks(lower(schedule, early=early))[RECEIVED]) for early in range(4)]
    assert counts == sorted(counts)
    assert counts[0] < counts[3]
