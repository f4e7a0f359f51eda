"""Chooses how many tokens the draft proposes in each round of speculative decoding."""
from dataclasses import dataclass

MIN_PROPOSALS, MAX_PROPOSALS = 2, 8 # of a round
# The initial counts, as if 7 of 8 proposals had been accepted. After a few rounds, the real counts outweigh them.
PRIOR_CHECKED, PRIOR_ACCEPTED = 8.0, 7.0
DECAY = 0.95 # the counts of earlier rounds are multiplied by this after each round
# The time of a pass of the target over k + 1 positions, in steps of the target: PASS_COST + k * PASS_COST_PER_PROPOSAL.
PASS_COST, PASS_COST_PER_PROPOSAL = 1.4, 0.045 # for GPT-2 in float32; two Intel processors had a PASS_COST of 1.1, 1.5


@dataclass
class DraftLength:
    """Chooses how many tokens the draft proposes in a round. It depends on counts only, and never on measured times.

    relative_cost is the time of a step of the draft, in steps of the target.
    """
    relative_cost: float
    num_checked: float = PRIOR_CHECKED # proposals up to the first that was rejected in each round
    num_accepted: float = PRIOR_ACCEPTED

    def record(self, num_proposed: int, num_accepted: int) -> None:
        """Count a round. Earlier rounds lose weight."""
        if num_proposed:
            self.num_checked = DECAY * self.num_checked + min(num_accepted + 1, num_proposed)
            self.num_accepted = DECAY * self.num_accepted + num_accepted

    def best(self) -> int:
        """How many tokens to propose: from 2 to 8, whichever has the largest speedup; 0 if no draft is faster.

        After a 0, nothing more is recorded, so the draft stays off.
        """
        k = max(range(MIN_PROPOSALS, MAX_PROPOSALS + 1), key=self.speedup)
        return k if self.speedup(k) > 1 else 0

    def speedup(self, k: int) -> float:
        """The expected number of tokens of a round with k proposals, divided by its cost in steps of the target.

        The expectation is that of Leviathan et al. (2023): 1 + a + ... + a**k, with the acceptance rate a.
        """
        rate = self.num_accepted / self.num_checked
        num_tokens = (1 - rate**(k + 1)) / (1 - rate) # rate is below 1, because the prior is
        return num_tokens / (PASS_COST + k * (PASS_COST_PER_PROPOSAL + self.relative_cost))
