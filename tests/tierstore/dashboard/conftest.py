from tests.browser import chromium, visit

__all__ = ["chromium", "visit"]
