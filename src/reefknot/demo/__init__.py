"""
The demos: `make run`, or `python -m reefknot.demo`.

`show` is the whole system at work with a service that fails on purpose; with `--retry`, `tour` is a tour of retries
alone. Nothing leaves the machine.
"""
