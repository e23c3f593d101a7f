"""Imports no other package: errors, finished directories (manifest, atomic rename), config files, locks, verbs. No
torch."""
