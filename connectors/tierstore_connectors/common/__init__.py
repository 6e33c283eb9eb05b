"""Code that several connectors use, and that depends on no engine."""
