"""Evaluation of models: held-out loss, scoring by the programs that serve them, comparison, HTML report."""
