"""Acceptance statistics of a generation, read from its step records."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_specdec._src.serving.batch import StepRecord


@dataclasses.dataclass(frozen=True)
class AcceptanceStats:
    """How verification went, summed over steps and requests.

    Counts are of verifications, before stop tokens and budgets cut their tokens.

    Attributes:
      num_verifications: target passes of a request that emitted tokens.
      num_draft_tokens: drafts offered.
      num_accepted_tokens: drafts accepted.
      num_emitted_tokens: accepted drafts and recovered or bonus tokens.
      mean_acceptance_length: ``1 + accepted / verifications``; the recovered or bonus token counts.
      draft_acceptance_rate: ``accepted / drafts``; 0 where nothing was drafted.
      unconditional_rates: K rates; entry i is the share of verifications that accepted drafts
        ``0..i``, among those that were offered draft i; 0 where none was.

    Example:
      >>> import numpy as np
      >>> steps = StepRecord(
      ...     token_ids=np.array([[[5, 6, 7]], [[8, -1, -1]]]), num_kept=np.array([[3], [1]]),
      ...     num_proposed=np.array([[2], [2]]), num_accepted=np.array([[2], [0]]),
      ...     num_emitted=np.array([[3], [1]]))
      >>> stats = AcceptanceStats.from_steps(steps)
      >>> stats.mean_acceptance_length, stats.unconditional_rates
      (2.0, (0.5, 0.5))
    """

    num_verifications: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    unconditional_rates: tuple[float, ...]

    @classmethod
    def from_steps(cls, steps: StepRecord) -> AcceptanceStats:
        """Sum up records ``[S, B, ...]``.

        Args:
          steps: as `GenerateOutput.steps` holds them.

        Returns:
          The statistics; a mean length of 1 where nothing was verified.
        """
        proposed, accepted = np.asarray(steps.num_proposed), np.asarray(steps.num_accepted)
        emitted = np.asarray(steps.num_emitted)
        verifications, drafts = int((emitted > 0).sum()), int(proposed.sum())
        rates = []
        for i in range(np.asarray(steps.token_ids).shape[-1] - 1):
            offered = int((proposed > i).sum())
            rates.append(float((accepted > i).sum() / offered) if offered else 0.0)
        return cls(
            num_verifications=verifications,
            num_draft_tokens=drafts,
            num_accepted_tokens=int(accepted.sum()),
            num_emitted_tokens=int(emitted.sum()),
            mean_acceptance_length=1 + int(accepted.sum()) / max(verifications, 1),
            draft_acceptance_rate=int(accepted.sum()) / max(drafts, 1),
            unconditional_rates=tuple(rates),
        )
