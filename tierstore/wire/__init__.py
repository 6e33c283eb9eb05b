"""The protocol between clients and daemon: messages and their framing."""
