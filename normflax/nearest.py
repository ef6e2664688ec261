"""One sentence for a word that is not in the list it was taken from."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'pre'?` when something allowed is close to `word`, else nothing."""
    close = get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown(what: str, word: str, allowed: Iterable[str]) -> str:
    """The sentence: what was not understood, what would be, and the nearest of it."""
    allowed = list(allowed)
    return f"{what} '{word}' is unknown: it is one of {', '.join(allowed)}{nearest(word, allowed)}"
