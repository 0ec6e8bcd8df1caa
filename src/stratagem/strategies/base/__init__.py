"""Strategy, the base class of all strategies, and the parts that all of them share."""
