"""Writing shards: who writes what (deduplication over replicas), locations in files, fsync, checksums."""
