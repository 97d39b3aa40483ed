"""One module a group of tables. `TABLES` in it is what gets measured."""
