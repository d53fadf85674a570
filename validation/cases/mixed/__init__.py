"""Steps in mixed precision, by hand: right ones, and those in which one convention is forgotten."""
