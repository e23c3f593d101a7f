"""Verbs of `headrace` that need more than one package: schema, explain, status, submit."""
