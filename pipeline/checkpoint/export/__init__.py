"""Export of a checkpoint to a Hugging Face folder (safetensors); list and verify the checkpoints of a run."""
