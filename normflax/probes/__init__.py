"""What is measured, where, and when. Probes change no number of a run."""
