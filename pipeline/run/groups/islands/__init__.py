"""Low-communication training (DiLoCo): islands that exchange pseudo-gradients every H steps, on torchft."""
