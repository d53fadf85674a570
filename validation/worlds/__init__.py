"""Where jobs run: processes, torchrun, a pytest session over ranks; what they report, and where they stall."""
