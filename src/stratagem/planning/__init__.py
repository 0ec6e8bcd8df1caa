"""Training-step planning (`sg.plan`): memory, step time and scaling on hardware you don't have."""

from stratagem.planning.candidates import Form, PlanCandidate, assumptions_of
from stratagem.planning.captured_steps import capture_script, with_global_batch
from stratagem.planning.choices import PlanChoice, PlanSearch
from stratagem.planning.memory import CompilerMemory, MemoryPlan
from stratagem.planning.planner import plan, plan_step
from stratagem.planning.result import Plan
from stratagem.planning.schedule import Reduction, Schedule, share_behind
from stratagem.planning.search import search, search_step
from stratagem.planning.step_time import Assumptions, StepTime
from stratagem.planning.targets import ACCELERATORS, Accelerator, Target, parse_target

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Assumptions",
    "CompilerMemory",
    "Form",
    "MemoryPlan",
    "Plan",
    "PlanCandidate",
    "PlanChoice",
    "PlanSearch",
    "Reduction",
    "Schedule",
    "StepTime",
    "Target",
    "assumptions_of",
    "capture_script",
    "parse_target",
    "plan",
    "plan_step",
    "search",
    "search_step",
    "share_behind",
    "with_global_batch",
]
