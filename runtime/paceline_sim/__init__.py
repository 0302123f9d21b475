"""The twin: the production scheduler under a virtual clock, to ask what would happen if…"""

from paceline_sim.replay import simulate
from paceline_sim.result import Outcome, Result
from paceline_sim.teaching import teach
from paceline_sim.trace import Trace, TraceRequest

__all__ = ["Outcome", "Result", "Trace", "TraceRequest", "simulate", "teach"]
