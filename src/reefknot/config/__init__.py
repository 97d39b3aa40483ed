"""
From what people write to what the program obeys.

`document` reads text into a checked tree that knows where everything was written, `load` finds the file and lays the
environment and flags over it, `secrets` follows references. Nothing here acts on a setting.
"""
