"""Model cards: the steps that made a model, as README.md in its folder and as data in its manifest."""
