"""Says counts and times for people."""


def counted(count: float, noun: str) -> str:
    """Return a count with its noun, which takes an s unless there is exactly one: 1 pair, 2 pairs."""
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Format a short time for people."""
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def minutes_text(seconds: float) -> str:
    """Format minutes and seconds as 4:05 min."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d} min"
