"""One self-contained HTML page about a run, or about several side by side."""
