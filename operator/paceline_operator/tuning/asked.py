"""Is an answer of the twin still about what is the case? It comes seconds later, and people edit meanwhile. Pure."""

from __future__ import annotations

from paceline_operator.tuning.facts import Situation
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.state import Phase, State

__all__ = ["still_asked"]


def still_asked(question: Question, situation: Situation, state: State) -> bool:
    """Return whether `question` would be put as it was: about the same knobs, within the same bounds, for the same
    objective, and as a search where nothing is tried, or about the change that is being verified.
    """
    if dict(question.knobs) != dict(situation.knobs) or dict(question.bounds) != dict(situation.bounds):
        return False
    stated = (situation.ttft, situation.tpot, situation.percentile)
    own = question.objective
    if own.stated and stated != (own.ttft, own.tpot, own.percentile):
        return False
    if not own.stated and (situation.ttft, situation.tpot) != (None, None):
        return False
    if question.only is None:
        return state.trial is None
    return state.phase is Phase.VERIFYING and state.trial is not None and question.only == (dict(state.trial.before),)
