"""Training-step planning (`sg.plan`): memory, step time and scaling on hardware you don't have."""

from stratagem.planning.planner import plan as plan
from stratagem.planning.result import Plan
from stratagem.planning.search import search
from stratagem.planning.step_time import Assumptions

__all__ = ["Assumptions", "Plan", "search"]
