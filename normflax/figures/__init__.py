"""Figures as pure functions of the tables that `normflax.load_table` returns.

`depth` and `layers` draw, `captions` says in words what was drawn and from what, `export` writes files. Importing this
package imports nothing; its modules need matplotlib and pandas, never jax and no display.
"""
