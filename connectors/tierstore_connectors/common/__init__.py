"""What connectors to engines share. Nothing here knows an engine."""
