"""Reads the times of a column of text: dates with a time zone or without, or numbers."""

from enum import StrEnum

import polars as pl

PLAIN_FORMAT = "%Y-%m-%d %H:%M:%S%.f"
ZONED_FORMAT = f"{PLAIN_FORMAT}%#z"
US, NS = 1e6, 1e9
EPOCHS = ((1e17, NS, "nanoseconds"), (1e14, US, "microseconds"), (1e11, 1e3, "milliseconds"))
"""Numbers from each bound on cannot be seconds since 1970: they would be thousands of years away."""
MEANT = "a time such as 2024-05-10 00:00:07.5+00:00, or seconds"


class TimeStyle(StrEnum):
    """How a file writes its times."""

    ZONED = "with a time zone"
    PLAIN = "without a time zone"
    NUMBER = "as a number"


def style_of(text: str) -> TimeStyle | None:
    """Return the style of one cell; None if it is no time."""
    cell = pl.DataFrame({"time": [text]})
    for style in (TimeStyle.NUMBER, TimeStyle.ZONED, TimeStyle.PLAIN):
        if cell.select(time_of(pl.col("time"), style, thorough=True))["time"][0] is not None:
            return style
    return None


def time_of(text: pl.Expr, style: TimeStyle, *, thorough: bool) -> pl.Expr:
    """Return the time as microseconds, or as a number for TimeStyle.NUMBER; null for what is no time of this style.

    To be `thorough` takes twice as long: it also reads UTC, decimal commas, minutes without seconds.
    """
    if style is TimeStyle.NUMBER:
        number = text.str.strip_chars().cast(pl.Float64, strict=False)
        return pl.when(number.is_finite()).then(number)
    if thorough:
        text = (
            text.str.strip_chars()
            .str.replace(r"(?i)\s*(z|utc|gmt)$", "+00:00")
            .str.replace(r"^(\S{10})t", "${1}T")
            .str.replace(r"(:\d\d),(\d)", "$1.$2")
            .str.replace(r"^(\S{10}[ T]\d\d:\d\d)($|\s*[+-])", "$1:00$2")
        )
    usual = text.str.replace("T", " ", literal=True)
    if style is TimeStyle.ZONED:
        moment = usual.str.to_datetime(ZONED_FORMAT, time_unit="us", time_zone="UTC", strict=False)
    else:
        moment = usual.str.to_datetime(PLAIN_FORMAT, time_unit="us", strict=False)
    return moment.dt.epoch("us")


def seconds_since_first(times: pl.Series, style: TimeStyle) -> tuple[pl.Series, str | None]:
    """Return what `time_of` read in seconds after the earliest, and a note if numbers were not taken for seconds."""
    if style is not TimeStyle.NUMBER:
        return (times - times.min()) / US, None
    largest = float(times.abs().max() or 0.0)  # type: ignore[arg-type]  # a number, as polars does not say
    for bound, divisor, unit in EPOCHS:
        if largest >= bound:
            return (times - times.min()) / divisor, f"times were taken for {unit} since 1970"
    return times - times.min(), None
