"""stub"""


def complete_override(kind):
    return lambda incomplete: []
