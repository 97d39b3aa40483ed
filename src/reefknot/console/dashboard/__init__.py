"""The pages and the HTTP API of a store, behind a token: everything they show or do is an operation of `operations`."""
