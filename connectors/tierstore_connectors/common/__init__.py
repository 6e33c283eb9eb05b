"""Code shared by connectors. It does not depend on any engine."""
