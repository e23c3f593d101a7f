"""The checks of `headrace doctor`, each a module with `run(context)`; `headrace/doctor/table.json` lists them."""
