"""The engine of simulated ranks, without torch: threads in turn, clocks, and decisions about the next step."""
