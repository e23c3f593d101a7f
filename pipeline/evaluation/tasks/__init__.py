"""Tasks with answers: rows, requests, figures. Evaluated by the engine in training, and on a model folder."""
