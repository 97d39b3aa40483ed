"""Questions and actions of operators, the same for the command line, the HTTP API, the dashboard and the metrics."""
