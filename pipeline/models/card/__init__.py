"""Model cards: what a model was made from, step by step, as README.md in its folder and as data in its manifest."""
