"""How numbers of things are said."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """Says how many there are, such as `1 row` or `3 rows`; `many` is the plural where no s makes it."""
    return f"{number} {one if number == 1 else many or one + 's'}"
