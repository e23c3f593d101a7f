"""Predicts memory, time and cost of a run before it starts (`headrace plan`), and checks its config and layout."""
