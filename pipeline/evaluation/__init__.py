"""What a model is worth: held-out loss, serving programs that score it, comparison of models, HTML report."""
