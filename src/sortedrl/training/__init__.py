"""A whole training run: settings, resources, the run directory, the trainer."""
