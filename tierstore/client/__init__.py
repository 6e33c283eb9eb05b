"""The client of a daemon: its connection, the arena it maps, and what it asks and is told."""
