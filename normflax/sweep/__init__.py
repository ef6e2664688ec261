"""Many runs: which run is which, and what is there already."""
