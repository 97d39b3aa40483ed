"""
Something to watch: `make run`, or `python -m reefknot.demo`.

The show is the whole system at work beside a service that misbehaves; with `--retry` it is the tour of retrying alone.
Nothing leaves the machine.
"""
