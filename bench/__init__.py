"""Side by side with the peers: `python -m bench`. Measures and reports; it changes nothing about what it measures."""
