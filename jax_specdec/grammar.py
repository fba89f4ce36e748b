"""Grammars: masks of allowed tokens, from matchers, ahead of the tokens."""

from jax_specdec._src.grammar import (
    CopyingMatcher,
    DelayedMatcher,
    GrammarError,
    GrammarLookahead,
    GrammarMatcher,
    LlguidanceMatcher,
    advance_matchers,
    grammar_bitmask,
)

__all__ = [
    "CopyingMatcher",
    "DelayedMatcher",
    "GrammarError",
    "GrammarLookahead",
    "GrammarMatcher",
    "LlguidanceMatcher",
    "advance_matchers",
    "grammar_bitmask",
]
