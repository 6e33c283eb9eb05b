"""What a client and a daemon say to each other: the messages, and how they are framed."""
