"""Model folders of Hugging Face: metadata, strict loading, compressed-tensors."""
