"""What a model is trained on: sources (NumPy only), batches (jax) and the losses to compare with (NumPy only)."""
