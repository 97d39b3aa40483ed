"""What decides. Pure: no I/O, no clock, no dice, no await. Time and chance arrive as arguments."""
