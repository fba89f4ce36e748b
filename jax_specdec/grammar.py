"""Grammars: masks of allowed tokens, from matchers, ahead of the tokens.

A matcher follows one text and knows which tokens may come next. The functions here ask the matchers
of a batch for the masks of all its drafts, which `rejection_sample` takes as `token_bitmask`.
"""

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
