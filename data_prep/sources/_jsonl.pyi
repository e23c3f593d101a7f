VERSION: int
MAX_KEYS: int

def strings(
    block: memoryview, keys: tuple[str, ...], required: int, /
) -> tuple[*tuple[list[str | None], ...], bytes]: ...
