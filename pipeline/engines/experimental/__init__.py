"""Code that was never run on its target hardware; only a run whose config names it imports it. See README.md."""
