"""`headrace import`: tokens that other tools made become a tokens directory, with their document borders."""
