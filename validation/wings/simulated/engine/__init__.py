"""The engine of simulated ranks, which knows no torch: threads that take turns, clocks, who decides what is next."""
