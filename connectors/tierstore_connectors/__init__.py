"""Adapters between engines and a store: one package per engine."""
