"""Named sessions: the sessions and their pins (manager), saving and restoring (transfer), the file format."""
