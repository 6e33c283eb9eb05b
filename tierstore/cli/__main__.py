"""``python -m tierstore.cli`` is ``tierstore``."""

from tierstore.cli import main

if __name__ == "__main__":
    main()
