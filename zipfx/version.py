"""Version: the number of this version of zipfx. `pyproject.toml` reads it from here."""

__version__ = "0.1.0"
