"""A batch that lives: turns join and leave it between decode steps."""
