"""The report of a profile: one page that needs no network."""
