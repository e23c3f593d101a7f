"""What every change has to leave as it is, in four minutes: `make guard`."""
