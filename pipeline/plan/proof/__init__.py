"""`headrace prove`: equivalence of a layout with one plain process: gradients, losses, reshard; tolerances."""
