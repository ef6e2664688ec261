"""Training as a pure function of settings, seed and step."""
