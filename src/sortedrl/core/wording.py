"""Counts and kinds of values in printed text, and text from outside that is safe to print."""

# C0 and C1 codes move the cursor, set the title or clear the screen; bidirectional marks reorder what is read.
_CONTROL = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPED = {code: chr(code).encode("unicode_escape").decode() for code in _CONTROL}


def printable(text: str) -> str:
    """One line without control characters: those in the text are shown as escape sequences of Python."""
    return text.translate(_ESCAPED)


def counted(number: int, noun: str) -> str:
    """ "1 line", "2 lines", "10,000 lines". For nouns whose plural ends in -s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def kind_of(value: object) -> str:
    """ "an int", "a dict", "None", "the class Pool": what a wrong value is."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
