"""`headrace doctor`: what has to hold on a machine before a training starts there, cheap and fatal things first."""
