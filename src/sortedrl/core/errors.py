"""The base class of errors that a user can fix."""


class UserError(Exception):
    """Its text is one line: what is wrong, why, and the fix. The command line prints it without a traceback."""


def first_sentences(error: Exception, count: int = 2) -> str:
    """Of a long message, such as PyTorch's if memory runs out: what happened, and how much was asked for."""
    return ". ".join(str(error).split("\n")[0].split(". ")[:count]).rstrip(".")
