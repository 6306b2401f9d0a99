"""The `ridgeline` command."""


def main() -> None:
    """Entry point; commands are added as they are built."""
