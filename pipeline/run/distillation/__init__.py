"""Knowledge distillation: divergences, teachers, cached logits, the objective, and the control run."""
