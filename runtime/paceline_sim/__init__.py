"""The twin: the production scheduler under a virtual clock, to ask what would happen if…"""

from paceline_core.causes import Breakdown
from paceline_sim.readers import read_trace, trace_of_records
from paceline_sim.replay import simulate
from paceline_sim.report import Spread, Summary, summarise
from paceline_sim.result import Outcome, Result
from paceline_sim.roofline import Roofline
from paceline_sim.search import Candidate, Engine, candidates, evaluate, sweep_values
from paceline_sim.slo import Slo
from paceline_sim.teaching import teach
from paceline_sim.trace import Trace, TraceRequest

__all__ = [
    "Breakdown",
    "Candidate",
    "Engine",
    "Outcome",
    "Result",
    "Roofline",
    "Slo",
    "Spread",
    "Summary",
    "Trace",
    "TraceRequest",
    "candidates",
    "evaluate",
    "read_trace",
    "simulate",
    "summarise",
    "sweep_values",
    "teach",
    "trace_of_records",
]
