"""The version of both packages; pyproject.toml reads it here, so that it is known without an installation."""

VERSION = "0.1.0"
