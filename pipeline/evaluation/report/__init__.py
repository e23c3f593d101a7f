"""The HTML report (`headrace report`): loss curves, sizes against quality, goodput, samples."""
