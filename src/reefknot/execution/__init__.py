"""What tries: drivers of the one decision. They run the work, wait, and tell; they never decide."""
