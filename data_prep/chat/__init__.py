"""Chat templates: conversations to token ids with a loss mask (supervised fine-tuning)."""
