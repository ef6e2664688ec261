"""What a run leaves on disk (`store`), how it is judged (`stability`), and how it is read back (`table`).

Nothing here imports jax: a record is written and read with NumPy, pandas and pyarrow alone.
"""
