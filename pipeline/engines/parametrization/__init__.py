"""Parametrization across sizes (muP, CompleteP): factors on learning rate, initialization, epsilon, weight decay."""
