"""Code that was never run on its target hardware; it is imported only by a run whose config names it. See README.md."""
