"""Parametrization across sizes (muP, CompleteP): factors of learning rate, initialization, epsilon, weight decay."""
