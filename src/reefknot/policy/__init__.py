"""
Configuration: from the text that people write to checked settings and a policy book.

`reading` parses text and keeps the position of every value, `layers` finds the file and applies environment and flags
on top, `schema` and `check` refuse mistakes, `dialects` makes the policy book, `secrets` resolves references. Nothing
here acts on a setting.
"""
