"""Grammars: masks of allowed tokens, from matchers, ahead of the tokens."""

from jax_specdec._src.logits.grammar import (
    ForcedDrafts,
    GrammarError,
    GrammarLookahead,
    advance_matchers,
    forced_drafts,
    grammar_bitmask,
)
from jax_specdec._src.logits.matchers import DelayedMatcher, GrammarMatcher, LlguidanceMatcher

__all__ = [
    "DelayedMatcher",
    "ForcedDrafts",
    "GrammarError",
    "GrammarLookahead",
    "GrammarMatcher",
    "LlguidanceMatcher",
    "advance_matchers",
    "forced_drafts",
    "grammar_bitmask",
]
