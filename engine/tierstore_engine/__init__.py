"""The bundled paged-attention engine."""
