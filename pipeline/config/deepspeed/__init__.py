"""DeepSpeed config files: `auto`, keys that are ignored, refused or known by another name."""
