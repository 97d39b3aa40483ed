"""Work as values: messages, states, admission, routing, waiting. Pure."""
