"""From tables of runs to numbers that answer a question. Reads records, never trains."""
