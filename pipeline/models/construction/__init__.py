"""Building a model: meta device, initial values by name and counter-based random numbers, values from safetensors."""
