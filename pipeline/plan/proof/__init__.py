"""`headrace prove`: checks a layout against one plain process: gradients, losses, reshard; tolerances."""
