"""
Configuration: from what people write to what the program obeys.

`reading` parses text and knows where everything was written, `layers` finds the file and lays environment and flags
over it, `schema` and `check` refuse mistakes, `dialects` make the policy book, `secrets` follows references. Nothing
here acts on a setting.
"""
