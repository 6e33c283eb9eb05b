"""Adapters between engines and a store: one module per engine."""
