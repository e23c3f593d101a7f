"""Binary formats of tokens directories: Megatron's .bin and .idx, loss masks, packs, memory maps."""
