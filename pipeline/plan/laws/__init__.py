"""Published scaling laws for batch size, learning rate, weight decay and tokens; warnings of configs far from them."""
