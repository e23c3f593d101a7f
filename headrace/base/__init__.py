"""The ground floor: errors, finished directories (manifest, atomic rename), config files, locks, the verbs. No torch."""
