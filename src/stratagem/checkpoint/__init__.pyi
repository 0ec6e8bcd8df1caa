"""Public names: what type checkers see, and the table from which `__init__.py` loads them."""

from stratagem.checkpoint.checkpoint import Checkpoint as Checkpoint
from stratagem.checkpoint.in_memory import MemoryBackup as MemoryBackup
from stratagem.checkpoint.latest import (
    checkpoints_iterator as checkpoints_iterator,
)
from stratagem.checkpoint.latest import (
    latest_checkpoint as latest_checkpoint,
)
from stratagem.checkpoint.manager import CheckpointManager as CheckpointManager
from stratagem.checkpoint.policies import (
    Any as Any,
)
from stratagem.checkpoint.policies import (
    KeepEveryHours as KeepEveryHours,
)
from stratagem.checkpoint.policies import (
    KeepLatest as KeepLatest,
)
from stratagem.checkpoint.policies import (
    SaveEverySeconds as SaveEverySeconds,
)
from stratagem.checkpoint.policies import (
    SaveEverySteps as SaveEverySteps,
)
from stratagem.checkpoint.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from stratagem.checkpoint.saving import (
    CheckpointOptions as CheckpointOptions,
)
from stratagem.checkpoint.saving import (
    list_variables as list_variables,
)
from stratagem.checkpoint.saving import (
    load_checkpoint as load_checkpoint,
)
from stratagem.checkpoint.saving import (
    load_variable as load_variable,
)
