"""
The three ways to write a configuration: YAML, JSON, TOML.

Each module has one function that reads text into plain values under a `Reading`, and each accepts the same values as
the others: finite numbers of 64 bits, text, true, false, null, lists, mappings with text as keys.
"""
