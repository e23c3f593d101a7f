"""The ground floor: errors, finished directories (manifest, atomic rename), config files, locks, verbs. No torch."""
