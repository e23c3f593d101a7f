"""Writes shards: division among ranks (replicas once), locations in files, fsync, checksums."""
