"""One fixed profile: the same examples in every run, few enough that the whole folder takes seconds."""

from hypothesis import settings

settings.register_profile("unit", derandomize=True, max_examples=80, deadline=None, database=None)
settings.load_profile("unit")
