"""Public names: what type checkers see, and the table from which `__init__.py` loads them."""

from stratagem.cluster.preemption.configuration import EXIT_CODE as EXIT_CODE
from stratagem.cluster.preemption.configuration import GoogleCloudSource as GoogleCloudSource
from stratagem.cluster.preemption.configuration import PolledSource as PolledSource
from stratagem.cluster.preemption.configuration import PreemptionWatcher as PreemptionWatcher
from stratagem.cluster.preemption.configuration import TerminationConfig as TerminationConfig
from stratagem.cluster.preemption.notices import Notice as Notice
from stratagem.cluster.preemption.notices import NoticeSource as NoticeSource
from stratagem.cluster.preemption.signals import SignalSource as SignalSource
