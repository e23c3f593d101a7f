"""Code that has never run on what it is for; found by name, imported by none but a run that names it. See README.md."""
