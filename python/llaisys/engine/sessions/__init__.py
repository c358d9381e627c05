"""Named sessions: the table and its pins, saving and restoring, the file format."""
