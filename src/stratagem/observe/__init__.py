"""What a run did: events, goodput, stragglers, watch, report, profiles."""
