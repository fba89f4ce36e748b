"""Synthetic rule: drafts stay at a configured rate, whatever the models say.

For measuring a serving system at a chosen acceptance: the work is real, the tokens are not the
target's. Position ``i`` is kept with ``conditional_rates[i]``, given that all before it were.
"""

from __future__ import annotations

import jax


def accepts(u: jax.Array, conditional_rate: jax.Array) -> jax.Array:
    """Whether one request, greedy or sampled, keeps one draft: ``u < conditional_rate``.

    Args:
      u: ``[]`` float32 uniform on [0, 1).
      conditional_rate: ``[]`` float32 in [0, 1].

    Returns:
      ``[]`` bool.
    """
    return u < conditional_rate
