"""The client of a daemon: the connection, the mapping of the daemon's arena, requests and answers."""
