"""Records of a run and views of them: events, goodput, stragglers, watch, report, profiles."""
