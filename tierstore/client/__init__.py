"""The client of a daemon: its connection, its mapping of the arena, its requests and their answers."""
