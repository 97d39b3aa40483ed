"""The pure core, which decides: no I/O, no clock, no random numbers, no await. Time and draws are arguments."""
