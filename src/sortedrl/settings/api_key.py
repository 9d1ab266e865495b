"""The API key of a server. Engines read it; processes that run foreign code must not get it."""

VARIABLE = "SORTEDRL_API_KEY"  # of the environment
