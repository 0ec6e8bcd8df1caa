"""Groups of processes that continue without lost members."""

from stratagem.elastic.backed_rounds import scale_of_sums
from stratagem.elastic.group import ElasticGroup
from stratagem.elastic.views import View

__all__ = ["ElasticGroup", "View", "scale_of_sums"]
