"""Verbs of `headrace` that need several packages: schema, explain, status, submit."""
