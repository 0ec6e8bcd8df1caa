"""Groups of processes that continue without lost members."""

from stratagem.elastic.group import ElasticGroup
from stratagem.elastic.views import View

__all__ = ["ElasticGroup", "View"]
