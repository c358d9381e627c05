"""The web UI: its static files and the chats that the server keeps for it."""
