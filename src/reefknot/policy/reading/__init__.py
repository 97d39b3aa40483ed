"""
The three formats of a configuration: YAML, JSON, TOML.

Each has one function that reads text into plain values under a `ParseSession`, and all accept the same values: finite
numbers of 64 bits, text, true, false, null, lists, mappings with text as keys.
"""
