"""Imports no other package: errors, finished directories (manifest, rename), config files, locks, verbs. No torch."""
