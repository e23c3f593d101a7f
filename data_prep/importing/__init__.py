"""`headrace import`: turns tokens that other tools made into a tokens directory, with their document borders."""
